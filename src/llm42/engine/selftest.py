"""The start-up self-test: do the kernels keep the promises that determinism rests on, on the loaded weights?

It compares bits. Linears at the canonical row counts: one probe row at every index, among copies of itself and among
hostile neighbours. Whole canonical passes: one sequence at other row indices, in other pages, in other chunks, with
other neighbours, and repeated. Row counts do fail: MKL's fp32 GEMM on AVX2 treats the last row of five differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llm42.config import EngineConfig
from llm42.kernels import Kernels, KVPool, PreparedLinear, RowBatch, RowSegment
from llm42.model.decoder import Decoder

_HUGE = 1.0e4
_PROBE_LENGTH = 12
_BLOCK_SIZE = 4


@torch.inference_mode()
def self_test(config: EngineConfig, decoder: Decoder) -> str | None:
    """Check the canonical configuration; return None if it holds, else the reason why it does not."""
    for check in (_check_linears, _check_passes):
        reason = check(config, decoder)
        if reason is not None:
            return reason
    return None


def _check_linears(config: EngineConfig, decoder: Decoder) -> str | None:
    layers = [(name, linear, config.canonical_rows) for name, linear in decoder.linears.items()]
    for name, linear, rows in [*layers, ("lm_head", decoder.lm_head, config.canonical_logit_rows)]:
        if not _is_row_invariant(decoder.kernels, linear, rows):
            return (
                f"a row of the {name} layer depends on its index or its neighbours in a pass of {rows} rows; "
                "choose another canonical_rows or canonical_logit_rows (multiples of 16 usually work)"
            )
    return None


def _is_row_invariant(kernels: Kernels, linear: PreparedLinear, rows: int) -> bool:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, linear.weight.shape[1])
    noise = torch.randn(shape, generator=generator).to(device=linear.weight.device, dtype=linear.dtype)
    probe = noise[0].clone()
    copies = kernels.linear(probe.expand(shape).contiguous(), linear)
    if not torch.equal(copies, copies[:1].expand_as(copies)):
        return False
    for index in {0, 1 % rows, rows // 2, rows - 1}:
        hostile = noise * _HUGE
        hostile[index] = probe
        if not torch.equal(kernels.linear(hostile, linear)[index], copies[0]):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Layout:
    """One way to run the probe sequence: chunk lengths, index of its first row, first block, neighbours' seed."""

    chunks: tuple[int, ...]
    offset: int
    first_block: int
    neighbour_seed: int


def _layouts(rows: int) -> Iterator[_Layout]:
    length = min(_PROBE_LENGTH, rows)
    whole = (length,)
    yield _Layout(whole, 0, 1, 0)
    yield _Layout(whole, 0, 1, 0)
    yield _Layout(whole, rows - length, 7, 1)
    yield _Layout((length - length // 2, length // 2), rows // 3, 4, 2)


def _check_passes(config: EngineConfig, decoder: Decoder) -> str | None:
    run = _prepare_probe(config, decoder)
    expected: torch.Tensor | None = None
    for layout in _layouts(config.canonical_rows):
        hidden = run(layout)
        if expected is None:
            expected = hidden
        elif not torch.equal(hidden, expected):
            return f"a canonical pass of {config.canonical_rows} rows gives other bits in another layout ({layout})"
    return None


def _prepare_probe(config: EngineConfig, decoder: Decoder) -> Callable[[_Layout], torch.Tensor]:
    model = decoder.config
    rows = config.canonical_rows
    length = min(_PROBE_LENGTH, rows)
    sequence = [(7 * position + 3) % model.vocab_size for position in range(length)]
    blocks = -(-rows // _BLOCK_SIZE)

    def run(layout: _Layout) -> torch.Tensor:
        kv = KVPool(
            num_layers=model.num_hidden_layers,
            num_blocks=16 + 2 * blocks,
            block_size=_BLOCK_SIZE,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        pages = list(range(layout.first_block, layout.first_block + -(-length // _BLOCK_SIZE)))
        generator = torch.Generator().manual_seed(layout.neighbour_seed)
        outputs, start = [], 0
        for chunk in layout.chunks:
            offset = min(layout.offset, rows - chunk)
            ids = torch.randint(model.vocab_size, (rows,), generator=generator)
            ids[offset : offset + chunk] = torch.tensor(sequence[start : start + chunk])
            neighbours = [(0, offset, 16), (offset + chunk, rows - offset - chunk, 16 + blocks)]
            segments = [
                RowSegment(row, 0, count, range(block, block + blocks)) for row, count, block in neighbours if count
            ]
            segments.append(RowSegment(offset, start, chunk, pages))
            segments.sort(key=lambda segment: segment.row)
            batch = RowBatch(segments, rows, _BLOCK_SIZE, is_canonical=True)
            hidden = decoder.forward(ids.to(decoder.device), batch, kv)
            outputs.append(hidden[offset : offset + chunk])
            start += chunk
        return torch.cat(outputs)

    return run
