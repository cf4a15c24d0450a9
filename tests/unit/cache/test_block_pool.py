"""The block pool: every block is in one state, and the cache's blocks go in the order they were released."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.cache import BlockPool, OutOfBlocksError
from llm42.cache.block_pool import NULL_SLOT, PADDING_SLOT, RESERVED_BLOCK


def caching_pool(num_blocks, cached):
    """A pool whose cache knows the blocks in ``cached`` and forgets them on eviction; returns the evictions, too."""
    pool, evicted = BlockPool(num_blocks, 2), []

    def on_evict(block):
        cached.discard(block)
        evicted.append(block)

    pool.attach_cache(cached.__contains__, on_evict)
    return pool, evicted


@given(st.data())
def test_any_history_agrees_with_a_model_of_counts_and_two_queues(data):
    num_blocks = data.draw(st.integers(2, 8))
    cached, counts, lru = set(), {}, []
    pool, evicted = caching_pool(num_blocks, cached)
    for _ in range(data.draw(st.integers(0, 40))):
        held = sorted(block for block, count in counts.items() if count)
        operation = data.draw(st.sampled_from(["allocate", "allocate", "release", "release", "share", "cache"]))
        if operation == "allocate":
            count = data.draw(st.integers(0, 3))
            num_free = num_blocks - 1 - len(held)
            if count > num_free:
                with pytest.raises(OutOfBlocksError):
                    pool.allocate(count)
            else:
                num_evictions = max(0, count - (num_free - len(lru)))
                blocks = pool.allocate(count)
                assert not set(blocks) & set(held), "a block was given twice"
                assert RESERVED_BLOCK not in blocks
                assert evicted == lru[:num_evictions], "evicted out of order, or before the free blocks were used up"
                del lru[:num_evictions]
                evicted.clear()
                counts.update(dict.fromkeys(blocks, 1))
        elif operation == "share":
            candidates = held + lru
            if candidates:
                block = data.draw(st.sampled_from(candidates))
                pool.share([block])
                counts[block] = counts.get(block, 0) + 1
                lru = [other for other in lru if other != block]
        elif held and operation == "cache":
            cached.add(data.draw(st.sampled_from(held)))
        elif held:
            block = data.draw(st.sampled_from(held))
            pool.release([block])
            counts[block] -= 1
            if not counts[block] and block in cached:
                lru.append(block)
        pool.check()
        assert all(pool.references(block) == counts.get(block, 0) for block in range(num_blocks))
        assert pool.num_free == num_blocks - 1 - sum(count > 0 for count in counts.values())


def test_an_allocation_that_fails_takes_nothing_and_evicts_nothing():
    cached = set()
    pool, evicted = caching_pool(4, cached)
    (block,) = pool.allocate(1)
    cached.add(block)
    pool.release([block])
    with pytest.raises(OutOfBlocksError, match="4 blocks were asked for and 3 are free"):
        pool.allocate(4)
    assert (pool.num_free, evicted) == (3, [])


def test_the_least_recently_released_cached_block_is_evicted_first():
    cached = set()
    pool, evicted = caching_pool(4, cached)
    first, second, third = pool.allocate(3)
    cached.update((first, second, third))
    pool.release([second, third, first])
    assert pool.allocate(2) == [second, third]
    assert evicted == [second, third]


def test_a_hit_renews_a_cached_block():
    cached = set()
    pool, evicted = caching_pool(3, cached)
    first, second = pool.allocate(2)
    cached.update((first, second))
    pool.release([first, second])
    pool.share([first])
    pool.release([first])
    pool.allocate(1)
    assert evicted == [second]


def test_a_shared_block_is_free_only_when_its_last_holder_releases_it():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert (pool.references(blocks[0]), pool.num_free) == (1, 1)
    pool.release(blocks)
    assert (pool.references(blocks[0]), pool.num_free) == (0, 2)


def test_releasing_more_often_than_taking_is_refused():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match=f"block {blocks[0]} is released more often"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.share(blocks)


def test_the_reserved_block_is_never_given_and_has_both_its_slots():
    pool = BlockPool(5, 2)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_usable == 4
    assert {NULL_SLOT, PADDING_SLOT} == {0, 1}, "both lie in block 0 of any size"


@pytest.mark.parametrize(("num_positions", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_positions_are_rounded_up_to_blocks(num_positions, num_blocks):
    assert BlockPool(2, 4).blocks_for(num_positions) == num_blocks


@pytest.mark.parametrize(("num_blocks", "block_size", "name"), [(1, 2, "num_blocks"), (2, 1, "block_size")])
def test_a_size_without_room_for_the_reserved_slots_is_refused(num_blocks, block_size, name):
    with pytest.raises(ValueError, match=name):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.pop(), "lost"),
        (lambda pool: pool._free.append(pool._free[-1]), "two states"),
        (lambda pool: pool._free.append(RESERVED_BLOCK), "reserved"),
        (lambda pool: pool._references.__setitem__(pool._free[-1], 1), "two states"),
        (lambda pool: pool._evictable.__setitem__(pool._free.pop(), None), "does not know"),
    ],
    ids=["lost", "free twice", "reserved", "referenced and free", "evictable and unknown"],
)
def test_check_notices_damage(damage, message):
    pool = BlockPool(4, 2)
    pool.allocate(1)
    pool.check()
    damage(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check()
