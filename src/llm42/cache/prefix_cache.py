"""The prefix cache: full blocks of canonical KV, found again by the tokens that lead to them.

Invariants: only blocks below a request's watermark are published, so every hit is canonical KV; a published block is
never written again. A block's key is its parent's name and its own token ids, compared exactly: no hash can collide
into somebody else's KV. Names are never reused, so a block whose parent was evicted is unreachable, not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from llm42.cache.block_pool import BlockPool
from llm42.cache.page_table import PageTable

_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


class PrefixCache:
    """Finds and publishes blocks; the pool evicts them, least recently used first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._names = count(_ROOT + 1)
        self._entries: dict[_Key, tuple[int, int]] = {}
        self._key_of: dict[int, _Key] = {}
        pool.attach_cache(self._key_of.__contains__, self._forget)

    def __len__(self) -> int:
        """How many blocks are cached, in use or not."""
        return len(self._entries)

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The longest run of cached blocks that hold a prefix of ``token_ids``, and the last one's name."""
        size = self._pool.block_size
        parent, blocks = _ROOT, []
        for start in range(0, len(token_ids) - size + 1, size):
            entry = self._entries.get((parent, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            block, parent = entry
            blocks.append(block)
        return blocks, parent

    def publish(self, table: PageTable, token_ids: Sequence[int], watermark: int) -> None:
        """Offer the table's full blocks below the watermark.

        Where another request published the same content first, that one stays and this block remains private.
        """
        size = self._pool.block_size
        while (table.num_published + 1) * size <= watermark:
            index = table.num_published
            key = (table.cached_parent, tuple(token_ids[index * size : (index + 1) * size]))
            if key not in self._entries:
                block = table.blocks[index]
                self._entries[key] = (block, next(self._names))
                self._key_of[block] = key
            table.cached_parent = self._entries[key][1]
            table.num_published += 1

    def clear(self) -> None:
        """Forget all blocks; those that requests hold become theirs alone, and what follows them is found no more."""
        self._pool.evict_all()
        self._entries.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        del self._entries[self._key_of.pop(block)]
