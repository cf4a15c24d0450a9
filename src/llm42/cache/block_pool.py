"""The pool of KV blocks: reference counts, a free list, and an LRU of blocks that only the prefix cache remembers.

Invariant: every block except the reserved one is in exactly one of three states: referenced (count > 0), evictable
(count 0, content kept for the prefix cache) or free. Block 0 is reserved: its slot 0 is never written and stays zero
(what a masked position reads), its slot 1 takes the writes of padding rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

RESERVED_BLOCK = 0
NULL_SLOT = 0
PADDING_SLOT = 1


class OutOfBlocksError(Exception):
    """The pool cannot give as many blocks as were asked for; nothing was allocated."""


class BlockPool:
    """Blocks 1..num_blocks - 1 for requests, block 0 reserved.

    Args:
        num_blocks: Blocks in all, the reserved one included (at least 2).
        block_size: Positions of one block (at least 2, so that the reserved block has its two slots).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is reserved), not {num_blocks}")
        if block_size < 2:
            raise ValueError(f"block_size must be at least 2, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, RESERVED_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._is_cached: Callable[[int], bool] = lambda _block: False
        self._on_evict: Callable[[int], None] = lambda _block: None

    def attach_cache(self, is_cached: Callable[[int], bool], on_evict: Callable[[int], None]) -> None:
        """Let a prefix cache keep the content of unreferenced blocks until they are needed."""
        self._is_cached = is_cached
        self._on_evict = on_evict

    @property
    def num_usable(self) -> int:
        """Blocks that requests can use in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now (free or evictable)."""
        return len(self._free) + len(self._evictable)

    def references(self, block: int) -> int:
        """How many page tables hold the block."""
        return self._references[block]

    def blocks_for(self, num_positions: int) -> int:
        """How many blocks hold that many positions."""
        return -(-num_positions // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference; evicts the least recently used cached ones if it must.

        Raises:
            OutOfBlocksError: Fewer than ``count`` blocks are free or evictable.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks were asked for and {self.num_free} are free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these (referenced or evictable) blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in the order given: the first one released is evicted first."""
        for block in blocks:
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._is_cached(block):
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def evict_all(self) -> None:
        """Free every block that only the prefix cache remembers."""
        while self._evictable:
            self._free.append(self._evict())

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._on_evict(block)
        return block

    def check(self) -> None:
        """Verify the invariant.

        Raises:
            RuntimeError: A block is in none or in several states.
        """
        free, evictable = set(self._free), set(self._evictable)
        referenced = {block for block, count in enumerate(self._references) if count > 0}
        union = free | evictable | referenced
        if len(self._free) != len(free) or len(union) != len(free) + len(evictable) + len(referenced):
            raise RuntimeError("a KV block is in two states at once")
        if union != set(range(1, self.num_blocks)):
            raise RuntimeError("a KV block is lost, or the reserved one is in use")
        if any(not self._is_cached(block) for block in evictable):
            raise RuntimeError("a block is kept for the prefix cache, which does not know it")
