"""The page table of one request: which block holds which of its positions.

Invariant: position p lies in slot ``blocks[p // block_size] * block_size + p % block_size``, from the moment its block
is taken until it is trimmed or freed: verification writes to the very slots that drafting used.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm42.cache.block_pool import BlockPool


class PageTable:
    """Blocks of one request, taken from and returned to a `BlockPool`."""

    __slots__ = ("_pool", "blocks", "cached_parent", "num_published")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.num_published = 0
        """Leading blocks that the prefix cache has been told about, or that came from it."""
        self.cached_parent = 0
        """The prefix cache's name for the last of those."""

    @property
    def capacity(self) -> int:
        """Positions that have a slot."""
        return len(self.blocks) * self._pool.block_size

    def missing(self, num_positions: int) -> int:
        """Blocks still to be allocated to hold ``num_positions``."""
        return max(0, self._pool.blocks_for(num_positions) - len(self.blocks))

    def adopt(self, blocks: Sequence[int], parent: int) -> None:
        """Start with blocks of the prefix cache, which the table shares from now on."""
        if self.blocks:
            raise ValueError("only an empty page table can start from the prefix cache")
        self._pool.share(blocks)
        self.blocks.extend(blocks)
        self.num_published = len(blocks)
        self.cached_parent = parent

    def grow(self, num_positions: int) -> None:
        """Make room for ``num_positions`` in all.

        Raises:
            OutOfBlocksError: The pool has too few blocks; the table is unchanged.
        """
        self.blocks.extend(self._pool.allocate(self.missing(num_positions)))

    def trim(self, num_positions: int) -> None:
        """Return the blocks past ``num_positions``."""
        keep = self._pool.blocks_for(num_positions)
        self._release(keep)

    def free(self) -> None:
        """Return all blocks, the last first, so that a cached prefix outlives its continuations."""
        self._release(0)
        self.num_published = 0
        self.cached_parent = 0

    def _release(self, keep: int) -> None:
        surplus = self.blocks[keep:]
        del self.blocks[keep:]
        self._pool.release(reversed(surplus))
