"""The kernels' formulas in fp64, their test inputs, and how far from the formula a kernel may be.

A result may be 2 units in the last place off, and 4 in fp32, where the formula says nothing about rounding; where large
terms cancel, the fp32 sum of them may be off by its own rounding too (the root-mean-square law: Higham, *Accuracy and
Stability of Numerical Algorithms*, section 2.8), however small the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from llm42.kernels import Kernels, KVPool, KVShape, RowBatch, RowSegment

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6
# What every second row of a pass is overwritten with, and whether the even or the odd ones keep their contents; first
# a pass in which all do.
HOSTILE = ((None, 0), (math.inf, 0), (math.nan, 1), (6.0e4, 0), (-6.0e4, 1), (0.0, 1))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def threads(count: int):
    """This many threads for PyTorch and for whatever shares its pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring numbers of the dtype at each of ``x`` (fp64)."""
    info = torch.finfo(dtype)
    exponents = torch.frexp(x.abs().clamp_min(info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(x, info.eps), exponents)


@dataclass(frozen=True)
class Expected:
    """What a formula gives in fp64, and for sums how many terms it adds and the sum of their magnitudes."""

    value: torch.Tensor
    magnitude: torch.Tensor | float = 0.0
    terms: int = 1

    def allowed(self, dtype: torch.dtype) -> torch.Tensor:
        """The error allowed to a result of this dtype, by element."""
        ulps = 4.0 if dtype == torch.float32 else 2.0
        return ulps * ulp(self.value, dtype) + self.terms**0.5 * 2.0**-24 * self.magnitude


def assert_close(found: torch.Tensor, expected: Expected) -> None:
    assert found.shape == expected.value.shape
    assert found.numel() > 0
    excess = ((found.double() - expected.value).abs() / expected.allowed(found.dtype)).flatten()
    worst = int(excess.argmax())
    assert (excess <= 1.0).all(), (
        f"{found.dtype} {found.flatten()[worst].item()!r} is {excess[worst].item():.3g} times as far as allowed from"
        f" {expected.value.flatten()[worst].item()!r} (flat index {worst} of {found.numel()})"
    )


def assert_agree(found: torch.Tensor, other: torch.Tensor, expected: Expected) -> None:
    """Both are close to the formula, and to each other by the same measure."""
    assert_close(found, expected)
    assert_close(other, expected)
    assert_close(found, Expected(other.double(), expected.magnitude, expected.terms))


def assert_rows_are_their_own(
    operation: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: Sequence[int]
) -> None:
    """Each of the rows gets the bits it gets alone, at every index of passes of so many rows, beside anything."""
    with threads(1):
        alone = torch.cat([operation(row) for row in rows.split(1)])
    assert alone.shape[0] == rows.shape[0]
    assert alone.isfinite().all()
    for num_threads in (1, 2):
        with threads(num_threads):
            for count in counts:
                for fill, parity in HOSTILE:
                    kept = (torch.arange(count) % 2 == parity) | (fill is None)
                    crowd = rows[:count].clone()
                    crowd[~kept] = 0.0 if fill is None else fill
                    if kept.any():
                        where = f"{count} rows, every second {fill}, {num_threads} threads"
                        assert torch.equal(operation(crowd)[kept], alone[:count][kept]), where


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Expected:
    x, weight = x.double(), weight.double()
    value, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    return Expected(value, magnitude, x.shape[-1] + 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> Expected:
    wide = x.double()
    return Expected(wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double())


def silu_mul(gate_up: torch.Tensor) -> Expected:
    gate, up = gate_up.double().chunk(2, -1)
    return Expected(gate * torch.sigmoid(gate) * up)


def rope_table(positions: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines ``[positions, 2, head_dim / 2]`` in fp32."""
    frequencies = 10000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> Expected:
    """Rotary embedding of ``x [rows, heads, head_dim]`` at ``positions [rows]``."""
    cos, sin = table.double()[positions].unsqueeze(2).unbind(1)
    a, b = x.double().chunk(2, -1)
    magnitude = torch.cat((abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin)), -1)
    return Expected(torch.cat((a * cos - b * sin, b * cos + a * sin), -1), magnitude, 2)


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float, window: int | None
) -> Expected:
    """Causal attention of ``q [rows, heads, head_dim]``, from position ``start`` on.

    Keys and values are ``[length, kv_heads, head_dim]``. An error in a score is a relative error of its weight, so the
    rounding of the scores' own sums counts as well.
    """
    group = q.shape[1] // keys.shape[1]
    q, keys, values = (t.double().transpose(0, 1) for t in (q, keys, values))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    positions = torch.arange(start, start + q.shape[1])[:, None]
    columns = torch.arange(keys.shape[1])
    hidden = columns > positions
    if window is not None:
        hidden |= columns <= positions - window
    weights = torch.softmax((q @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf), -1)
    score_terms = (q.abs() @ keys.abs().transpose(1, 2) * scale).masked_fill(hidden, 0.0).amax(-1, keepdim=True)
    value, magnitude = weights @ values, weights @ values.abs() * (1.0 + score_terms)
    return Expected(
        *(t.transpose(0, 1).reshape(q.shape[1], -1) for t in (value, magnitude)), keys.shape[1] + q.shape[2]
    )


@dataclass(frozen=True)
class Paged:
    """Keys and values of sequences in a pool of one layer, wherever their pages lie."""

    kernels: Kernels
    pool: KVPool
    block_size: int
    num_blocks: int

    @classmethod
    def empty(cls, kernels, *, kv_heads, head_dim, dtype, block_size=4, num_blocks=100, garbage=0.0) -> Paged:
        """A pool that holds ``garbage`` everywhere but in the reserved block."""
        pool = kernels.new_kv_pool(KVShape(1, num_blocks * block_size, kv_heads, head_dim), dtype, CPU)
        pool.write(torch.arange(block_size, num_blocks * block_size), torch.tensor(garbage))
        return cls(kernels, pool, block_size, num_blocks)

    @property
    def kv(self) -> Any:
        """What the kernels take."""
        return self.pool.layer(0)

    @property
    def slots(self) -> torch.Tensor:
        """All slots."""
        return torch.arange(self.num_blocks * self.block_size)

    def read(self, slots: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Keys and values ``[2, slots, kv_heads, head_dim]``."""
        return self.pool.read(torch.as_tensor(slots))[0]

    def put(self, blocks: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a sequence ``[length, kv_heads, head_dim]`` from position 0 on into its pages."""
        slots = [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(len(keys))]
        self.pool.write(torch.tensor(slots), torch.stack((keys, values))[None])

    def attend(
        self, segments: Sequence[RowSegment], q: torch.Tensor, *, window: int | None = None, num_rows: int | None = None
    ) -> torch.Tensor:
        """Attention of the segments' rows ``q``; rows past them are padding."""
        num_rows = num_rows or q.shape[0]
        q = torch.cat((q, q.new_ones(num_rows - q.shape[0], *q.shape[1:])))
        plan = self.kernels.begin_pass(RowBatch(segments, num_rows, self.block_size), CPU)
        return self.kernels.paged_attention(plan, q, self.kv, q.shape[2] ** -0.5, window)
