"""KV memory: the block pool, the page table of a request, and the prefix cache.

Owns which block belongs to whom; knows nothing of tensors or models. Imports `llm42.protocol` at most.
"""

from llm42.cache.block_pool import BlockPool, OutOfBlocksError
from llm42.cache.page_table import PageTable
from llm42.cache.prefix_cache import PrefixCache

__all__ = ["BlockPool", "OutOfBlocksError", "PageTable", "PrefixCache"]
