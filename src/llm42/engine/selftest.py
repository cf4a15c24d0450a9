"""The start-up self-test: do the kernels keep the promises that determinism rests on, on the loaded weights?

It compares bits. Linears at the canonical row counts: one probe row at every index, among copies of itself and among
hostile neighbours. Whole canonical passes: one sequence at other row indices, in other pages, in other chunks, among
padding, many short or few long hostile neighbours, and repeated. Row counts do fail: MKL's fp32 GEMM on AVX2 treats
the last row of five differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llm42.config import EngineConfig
from llm42.kernels import Kernels, PreparedLinear, RowBatch, RowSegment
from llm42.kernels.attention import KEY_TILE
from llm42.model.decoder import Decoder

_HUGE = 1.0e4
_PROBE_LENGTH = 13
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
    """One way to run the probe's rows."""

    chunks: tuple[int, ...]
    """How many of its rows each pass carries."""
    offset: int
    """Index of its first row in the pass."""
    pages: tuple[int, ...]
    """Its blocks, in the order of its positions."""
    neighbour_length: int
    """Rows of each neighbouring segment; 0 for none: padding all around."""


def _check_passes(config: EngineConfig, decoder: Decoder) -> str | None:
    rows = config.canonical_rows
    length = min(_PROBE_LENGTH, rows)
    halves = (length - length // 2, length // 2)
    probe = _Probe(config, decoder, length)
    straight = tuple(range(1, probe.num_pages + 1))
    layouts = [
        _Layout((length,), 0, straight, 0),
        _Layout((length,), 0, straight, 0),
        _Layout((length,), rows - length, tuple(page + 3 for page in reversed(straight)), 1),
        _Layout(halves if length > 1 else (1,), rows // 3, straight[::2] + straight[1::2], rows),
    ]
    expected, *others = (probe.run(layout) for layout in layouts)
    for layout, hidden in zip(layouts[1:], others, strict=True):
        if not torch.equal(hidden, expected):
            return (
                f"a canonical pass of {rows} rows gives other bits with the probe in chunks of {layout.chunks} from "
                f"row {layout.offset} on, beside neighbours of {layout.neighbour_length} rows each"
            )
    return None


class _Probe:
    """Rows of one sequence whose KV below is given, across the border of two key tiles."""

    def __init__(self, config: EngineConfig, decoder: Decoder, length: int) -> None:
        self._rows = config.canonical_rows
        self._decoder = decoder
        self._start = KEY_TILE - length // 2
        self._tokens = [(7 * position + 3) % decoder.config.vocab_size for position in range(length)]
        self.num_pages = -(-(self._start + length) // _BLOCK_SIZE)
        num_layers, two, _, num_kv_heads, head_dim = decoder.new_kv_pool(1, _BLOCK_SIZE).data.shape
        context = torch.randn(
            (num_layers, two, self._start, num_kv_heads, head_dim), generator=torch.Generator().manual_seed(1)
        )
        self._context = context.to(decoder.device, decoder.dtype)

    def run(self, layout: _Layout) -> torch.Tensor:
        """The final hidden states of the probe's rows, ``[length, hidden]``."""
        first_neighbour = max(layout.pages) + 1
        kv = self._decoder.new_kv_pool(first_neighbour + 2 * self._rows, _BLOCK_SIZE)
        kv.data[:, :, first_neighbour * _BLOCK_SIZE :] = _HUGE
        slots = torch.tensor(layout.pages)[:, None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE)
        kv.data[:, :, slots.view(-1)[: self._start].to(kv.data.device)] = self._context
        outputs, done = [], 0
        for chunk in layout.chunks:
            offset = min(layout.offset, self._rows - chunk)
            ids = torch.arange(self._rows) * 31 % self._decoder.config.vocab_size
            ids[offset : offset + chunk] = torch.tensor(self._tokens[done : done + chunk])
            segments = [RowSegment(offset, self._start + done, chunk, layout.pages)]
            if layout.neighbour_length:
                for first, stop in ((0, offset), (offset + chunk, self._rows)):
                    segments.extend(_neighbours(first, stop, layout.neighbour_length, first_neighbour))
            segments.sort(key=lambda segment: segment.row)
            batch = RowBatch(segments, self._rows, _BLOCK_SIZE)
            hidden = self._decoder.forward(ids.to(self._decoder.device), batch, kv)
            outputs.append(hidden[offset : offset + chunk])
            done += chunk
        return torch.cat(outputs)


def _neighbours(first: int, stop: int, length: int, first_block: int) -> Iterator[RowSegment]:
    """Segments for the rows ``first`` to ``stop - 1``, each ending at another position of its own hostile KV."""
    for row in range(first, stop, length):
        count = min(length, stop - row)
        num_blocks = -(-(row % 7 + count) // _BLOCK_SIZE)
        yield RowSegment(row, row % 7, count, range(first_block + row, first_block + row + num_blocks))
