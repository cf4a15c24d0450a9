"""Paged attention in PyTorch: tiles of queries against tiles of keys, with the online softmax of FlashAttention.

Source of the recurrence: arXiv 2205.14135, algorithm 1. Invariant, which makes it row-local: a query row at position p
always sits at index ``p % QUERY_TILE`` of a tile that starts at a multiple of ``QUERY_TILE``; keys come in tiles of
``KEY_TILE`` positions from position 0 on; every product has one fixed shape per tile. So which operations make up a
row's result, and in which order, follows from p alone. Positions that a tile may not see are read from the null slot.

A decode row pays for a whole tile of queries, which costs about a tenth of a step: the time goes into reading keys and
values, and those are read once for the tile. Attention is in return the same for every kind of pass, so fast passes
draft what the verifier confirms unless the linear layers disagree.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from llm42.cache.block_pool import NULL_SLOT
from llm42.kernels.interface import RowBatch, RowSegment

QUERY_TILE = 8
KEY_TILE = 128
_MASKED = -1.0e30


class AttentionPlan:
    """Index tensors that all layers of a pass share.

    ``tile_rows [tiles, QUERY_TILE]`` is the pass row at each place of each query tile (``num_rows`` for an empty
    place), longest context first; ``row_places [rows]`` is the inverse.
    """

    def __init__(self, batch: RowBatch, device: torch.device) -> None:
        self.num_rows = batch.num_rows
        self.positions = torch.from_numpy(batch.positions).to(device)
        self.slots = torch.from_numpy(batch.slots).to(device)
        self._device = device
        self._block_size = batch.block_size
        tiles = sorted((tile for segment in batch.segments for tile in _tiles(segment)), key=lambda tile: -tile[1])
        self._lengths = [end for _, end, _, _ in tiles]
        self._segments = [segment for segment, _, _, _ in tiles]
        rows = np.full((len(tiles), QUERY_TILE), self.num_rows, dtype=np.int64)
        places = np.full(self.num_rows, rows.size, dtype=np.int64)
        starts = np.zeros((len(tiles), 1), dtype=np.int64)
        for index, (_, _, first_position, pass_rows) in enumerate(tiles):
            place = first_position % QUERY_TILE
            rows[index, place : place + len(pass_rows)] = pass_rows
            places[pass_rows.start : pass_rows.stop] = (
                index * QUERY_TILE + place + np.arange(len(pass_rows), dtype=np.int64)
            )
            starts[index] = first_position - place
        self.tile_rows = torch.from_numpy(rows).to(device)
        self.row_places = torch.from_numpy(places).to(device)
        self._tile_positions = torch.from_numpy(starts + np.arange(QUERY_TILE)).to(device)
        self._key_tiles: dict[tuple[int, int, int | None], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def num_tiles(self) -> int:
        """How many query tiles the pass has."""
        return len(self._lengths)

    @cached_property
    def _key_slots(self) -> list[torch.Tensor]:
        """Per key tile, the slots ``[active tiles, KEY_TILE]`` to read; the tiles it concerns are the first ones."""
        result = []
        size = self._block_size
        for start in range(0, self._lengths[0] if self._lengths else 0, KEY_TILE):
            active = sum(length > start for length in self._lengths)
            slots = np.full((active, KEY_TILE), NULL_SLOT, dtype=np.int64)
            for index in range(active):
                stop = min(self._lengths[index], start + KEY_TILE)
                blocks = np.asarray(
                    self._segments[index].blocks[start // size : (stop - 1) // size + 1], dtype=np.int64
                )
                all_slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
                slots[index, : stop - start] = all_slots[start % size :][: stop - start]
            result.append(torch.from_numpy(slots).to(self._device))
        return result

    def key_tiles(self, num_kv_heads: int, group: int, window: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What to read and what to hide, per key tile.

        Returns:
            Pairs of the rows ``[active tiles * num_kv_heads * KEY_TILE]`` of the flattened pool to gather, and a mask
            ``[active tiles, 1, QUERY_TILE * group, KEY_TILE]`` that is true where a query may not see a key.
        """
        key = (num_kv_heads, group, window)
        if key not in self._key_tiles:
            heads = torch.arange(num_kv_heads, device=self._device)
            self._key_tiles[key] = [
                (
                    (slots[:, None, :] * num_kv_heads + heads[:, None]).view(-1),
                    self._hidden(index * KEY_TILE, slots.shape[0], group, window),
                )
                for index, slots in enumerate(self._key_slots)
            ]
        return self._key_tiles[key]

    def _hidden(self, start: int, active: int, group: int, window: int | None) -> torch.Tensor:
        keys = torch.arange(start, start + KEY_TILE, device=self._device)
        queries = self._tile_positions[:active, :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return hidden.repeat_interleave(group, dim=1).unsqueeze(1)


def _tiles(segment: RowSegment) -> list[tuple[RowSegment, int, int, range]]:
    """Cut a segment at multiples of the tile: (segment, end position, first position, rows of the pass)."""
    result = []
    position, stop = segment.start, segment.start + segment.length
    while position < stop:
        end = min(stop, (position // QUERY_TILE + 1) * QUERY_TILE)
        row = segment.row + position - segment.start
        result.append((segment, end, position, range(row, row + end - position)))
        position = end
    return result


def tiled_attention(
    plan: AttentionPlan, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float, window: int | None
) -> torch.Tensor:
    """Attention of the rows ``q [rows, heads, head_dim]``; see `Kernels.paged_attention`."""
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv[0].shape[1]
    group = num_heads // num_kv_heads
    tiles = plan.num_tiles
    padded = torch.cat((q.float() * scale, q.new_zeros(1, num_heads, head_dim, dtype=torch.float32)))
    queries = padded[plan.tile_rows].view(tiles, QUERY_TILE, num_kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(tiles, num_kv_heads, QUERY_TILE * group, head_dim)
    shape = (tiles, num_kv_heads, QUERY_TILE * group)
    highest = q.new_full(shape, _MASKED, dtype=torch.float32)
    total = q.new_zeros(shape, dtype=torch.float32)
    result = q.new_zeros((*shape, head_dim), dtype=torch.float32)
    for index, hidden in plan.key_tiles(num_kv_heads, group, window):
        active = hidden.shape[0]
        keys, values = (
            pool.view(-1, head_dim).index_select(0, index).view(active, num_kv_heads, KEY_TILE, head_dim).float()
            for pool in kv
        )
        scores = _bmm(queries[:active], keys.transpose(2, 3))
        scores.masked_fill_(hidden, _MASKED)
        new_highest = torch.maximum(highest[:active], scores.amax(-1))
        weights = scores.sub_(new_highest.unsqueeze(-1)).exp_().masked_fill_(hidden, 0.0)
        decay = torch.exp(highest[:active] - new_highest)
        highest[:active] = new_highest
        total[:active] = total[:active] * decay + weights.sum(-1)
        result[:active] = result[:active] * decay.unsqueeze(-1) + _bmm(weights, values)
    # An empty place of a tile may have seen nothing; it is never read, but must not divide by zero.
    result /= total.clamp_min_(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    flat = result.view(tiles, num_kv_heads, QUERY_TILE, group, head_dim).transpose(1, 2)
    flat = flat.reshape(tiles * QUERY_TILE, num_heads * head_dim).to(q.dtype)
    return torch.cat((flat, flat.new_zeros(1, num_heads * head_dim)))[plan.row_places]


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of ``[tiles, heads, n, k]`` and ``[tiles, heads, k, m]``, one fixed-shape product per tile and head."""
    tiles, heads = a.shape[:2]
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(tiles, heads, a.shape[2], b.shape[3])
