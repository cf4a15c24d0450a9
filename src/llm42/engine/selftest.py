"""The start-up self-test: do the kernels keep the promises that determinism rests on, on the loaded weights?

It compares the bits of whole canonical passes: one sequence at several row counts of the class, at other row indices,
in other pages of another size, in other chunks, among padding, many short or few long hostile neighbours, and repeated.
The linear layers by themselves are the atlas's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llm42.kernels import RowBatch, RowSegment
from llm42.kernels.attention import KEY_TILE
from llm42.model.decoder import Decoder
from llm42.protocol import ShapeClass

_HUGE = 1.0e4
PROBE_LENGTH = 13
_ROW_COUNTS = (24, 64)
_SMALL, _USUAL = 4, 16
"""Block sizes: kernels may read blocks of a handful of positions in another way than those of the default size."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One way to run the probe's rows."""

    rows: int
    """Rows of the passes."""
    chunks: tuple[int, ...]
    """How many of its rows each pass carries."""
    offset: int
    """Index of its first row in the pass."""
    block_size: int
    pages: tuple[int, ...]
    """Its blocks, in the order of its positions."""
    neighbour_length: int
    """Rows of each neighbouring segment; 0 for none: padding all around."""


@torch.inference_mode()
def self_test(decoder: Decoder, canonical: ShapeClass) -> str | None:
    """Check canonical passes at row counts of the class; return None if they agree, else the reason."""
    length = min(PROBE_LENGTH, canonical.largest)
    counts = sorted({canonical.pad(min(rows, canonical.largest)) for rows in (length, *_ROW_COUNTS)})
    halves = (length - length // 2, length // 2)
    probe = _Probe(decoder, length, counts[-1])
    straight = probe.pages(_SMALL)
    layouts = [_Layout(counts[0], (length,), 0, _SMALL, straight, 0)] * 2
    for rows in counts:
        pages = tuple(page + 3 for page in reversed(probe.pages(_USUAL)))
        layouts.append(_Layout(rows, (length,), rows - length, _USUAL, pages, 1))
    rows, chunks = counts[len(counts) // 2], halves if length > 1 else (1,)
    layouts.append(_Layout(rows, chunks, rows // 3, _SMALL, straight[::2] + straight[1::2], rows))
    expected, *others = (probe.run(layout) for layout in layouts)
    for layout, hidden in zip(layouts[1:], others, strict=True):
        if not torch.equal(hidden, expected):
            return (
                f"a canonical pass of {layout.rows} rows gives other bits than one of {counts[0]} with the probe in "
                f"chunks of {layout.chunks} from row {layout.offset} on, beside neighbours of "
                f"{layout.neighbour_length} rows each"
            )
    return None


class _Probe:
    """Rows of one sequence whose KV below is given, across the border of two key tiles."""

    def __init__(self, decoder: Decoder, length: int, max_rows: int) -> None:
        self._max_rows = max_rows
        self._decoder = decoder
        self._start = KEY_TILE - length // 2
        self._tokens = [(7 * position + 3) % decoder.config.vocab_size for position in range(length)]
        like = decoder.new_kv_pool(1, self._start).read(torch.arange(self._start))
        context = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
        self._context = context.to(decoder.device, decoder.dtype)

    def pages(self, block_size: int) -> tuple[int, ...]:
        """As many blocks as the probe takes, in order."""
        return tuple(range(1, -(-(self._start + len(self._tokens)) // block_size) + 1))

    def run(self, layout: _Layout) -> torch.Tensor:
        """The final hidden states of the probe's rows, ``[length, hidden]``."""
        first_neighbour, size = max(layout.pages) + 1, layout.block_size
        num_pages = first_neighbour + 2 * self._max_rows
        kv = self._decoder.new_kv_pool(num_pages, size)
        kv.write(torch.arange(first_neighbour * size, num_pages * size), torch.tensor(_HUGE))
        slots = torch.tensor(layout.pages)[:, None] * size + torch.arange(size)
        kv.write(slots.view(-1)[: self._start], self._context)
        outputs, done = [], 0
        for chunk in layout.chunks:
            offset = min(layout.offset, layout.rows - chunk)
            ids = torch.arange(layout.rows) * 31 % self._decoder.config.vocab_size
            ids[offset : offset + chunk] = torch.tensor(self._tokens[done : done + chunk])
            segments = [RowSegment(offset, self._start + done, chunk, layout.pages)]
            if layout.neighbour_length:
                for first, stop in ((0, offset), (offset + chunk, layout.rows)):
                    segments.extend(_neighbours(first, stop, layout, first_neighbour))
            segments.sort(key=lambda segment: segment.row)
            batch = RowBatch(segments, layout.rows, size)
            hidden = self._decoder.forward(ids.to(self._decoder.device), batch, kv)
            outputs.append(hidden[offset : offset + chunk])
            done += chunk
        return torch.cat(outputs)


def _neighbours(first: int, stop: int, layout: _Layout, first_block: int) -> Iterator[RowSegment]:
    """Segments for the rows ``first`` to ``stop - 1``, each ending at another position of its own hostile KV."""
    for row in range(first, stop, layout.neighbour_length):
        count = min(layout.neighbour_length, stop - row)
        num_blocks = -(-(row % 7 + count) // layout.block_size)
        yield RowSegment(row, row % 7, count, range(first_block + row, first_block + row + num_blocks))
