"""The prefix cache: a hit is the same tokens after the same tokens, canonical, or it is no hit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.cache import BlockPool, PageTable, PrefixCache

SIZE = 2


def make_cache(num_blocks=20):
    pool = BlockPool(num_blocks, SIZE)
    return pool, PrefixCache(pool)


def publish(pool, cache, token_ids, watermark=None):
    """A request that computes these tokens, its hit included; returns its page table."""
    table = PageTable(pool)
    table.adopt(*cache.match(token_ids))
    table.grow(len(token_ids))
    cache.publish(table, token_ids, len(token_ids) if watermark is None else watermark)
    return table


@settings(max_examples=150)
@given(st.data())
def test_every_hit_holds_exactly_the_prefix_that_was_asked_for(data):
    """The memory is written as a request would write it: each block with the whole prefix that leads to it."""
    pool, cache = make_cache(num_blocks=data.draw(st.integers(5, 12)))
    memory, tables = {}, []
    for _ in range(data.draw(st.integers(1, 25))):
        if tables and data.draw(st.booleans()):
            tables.pop(data.draw(st.integers(0, len(tables) - 1))).free()
        token_ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        hit, parent = cache.match(token_ids)
        for index, block in enumerate(hit):
            assert memory[block] == token_ids[: (index + 1) * SIZE], "somebody else's KV"
        needed = pool.blocks_for(len(token_ids)) - len(hit)
        if needed > pool.num_free - sum(pool.references(block) == 0 for block in hit):
            continue
        table = PageTable(pool)
        table.adopt(hit, parent)
        table.grow(len(token_ids))
        for index in range(len(hit), len(table.blocks)):
            assert not pool._is_cached(table.blocks[index]), "a published block is given away"
            memory[table.blocks[index]] = token_ids[: (index + 1) * SIZE]
        cache.publish(table, token_ids, data.draw(st.integers(len(hit) * SIZE, len(token_ids))))
        tables.append(table)
        pool.check()
        assert len(cache) == len(cache._key_of) <= pool.num_usable


def test_what_was_published_is_found_by_its_tokens_in_whole_blocks():
    pool, cache = make_cache()
    table = publish(pool, cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 5])[0] == table.blocks[:2]
    assert cache.match([1, 2, 3, 4])[0] == table.blocks[:2]
    assert cache.match([1, 2, 3])[0] == table.blocks[:1]
    assert cache.match([1, 2, 3, 9])[0] == table.blocks[:1]
    assert cache.match([1])[0] == []
    assert cache.match([])[0] == []
    assert cache.match([9, 2, 3, 4])[0] == []


def test_the_same_tokens_after_another_prefix_are_no_hit():
    pool, cache = make_cache()
    publish(pool, cache, [1, 1, 5, 5])
    assert cache.match([5, 5])[0] == []
    other = publish(pool, cache, [2, 2, 5, 5])
    assert cache.match([2, 2, 5, 5])[0] == other.blocks
    assert len(cache) == 4


def test_nothing_above_the_watermark_is_published():
    pool, cache = make_cache()
    token_ids = [1, 2, 3, 4, 5, 6]
    table = publish(pool, cache, token_ids, watermark=0)
    for watermark, num_blocks in enumerate([0, 0, 1, 1, 2, 2, 3]):
        cache.publish(table, token_ids, watermark)
        assert cache.match(token_ids)[0] == table.blocks[:num_blocks]


def test_publishing_again_changes_nothing():
    pool, cache = make_cache()
    table = publish(pool, cache, [1, 2, 3, 4])
    before = cache.match([1, 2, 3, 4])
    cache.publish(table, [1, 2, 3, 4], 4)
    assert cache.match([1, 2, 3, 4]) == before
    assert len(cache) == 2


def test_of_two_that_computed_the_same_the_first_stays_and_the_second_keeps_its_own():
    pool, cache = make_cache()
    first, second = PageTable(pool), PageTable(pool)
    for table in (first, second):
        table.grow(4)
    for table in (first, second):
        cache.publish(table, [1, 2, 3, 4], 4)
    assert cache.match([1, 2, 3, 4])[0] == first.blocks
    assert len(cache) == 2
    assert not set(first.blocks) & set(second.blocks)
    num_free = pool.num_free
    second.free()
    assert pool.num_free == num_free + 2
    assert len(cache) == 2
    pool.check()


def test_a_continuation_of_a_duplicate_is_found_after_the_first_ones_blocks():
    pool, cache = make_cache()
    first, second = PageTable(pool), PageTable(pool)
    first.grow(2)
    second.grow(4)
    cache.publish(first, [1, 2], 2)
    cache.publish(second, [1, 2, 3, 4], 4)
    assert cache.match([1, 2, 3, 4])[0] == [first.blocks[0], second.blocks[1]]


def test_a_child_whose_parent_was_evicted_is_unreachable_and_not_wrong():
    pool, cache = make_cache(num_blocks=4)
    parent, child = PageTable(pool), PageTable(pool)
    parent.grow(2)
    child.grow(4)
    cache.publish(parent, [1, 2], 2)
    cache.publish(child, [1, 2, 3, 4], 4)  # its own first block is a duplicate, so nothing holds the cached one
    parent.free()
    taken = PageTable(pool)
    taken.grow(2)
    assert cache.match([1, 2, 3, 4])[0] == [], "the parent is gone"
    cache.publish(taken, [1, 2], 2)
    assert cache.match([1, 2, 3, 4])[0] == taken.blocks, "a new parent has a new name: the old child is not its child"
    child.free()
    taken.free()
    pool.check()
    assert len(pool.allocate(3)) == 3, "the unreachable child can be evicted like any other"
    assert len(cache) == 0


def test_a_child_published_after_its_parent_was_evicted_is_unreachable_and_not_wrong():
    pool, cache = make_cache(num_blocks=4)
    parent, child = PageTable(pool), PageTable(pool)
    parent.grow(2)
    child.grow(4)
    cache.publish(parent, [1, 2], 2)
    cache.publish(child, [1, 2, 3, 4], 2)
    parent.free()
    taken = PageTable(pool)
    taken.grow(2)
    cache.publish(child, [1, 2, 3, 4], 4)
    cache.publish(taken, [8, 9], 2)
    assert cache.match([1, 2, 3, 4])[0] == []
    assert cache.match([8, 9, 3, 4])[0] == taken.blocks
    child.free()
    pool.check()


def test_an_evicted_block_is_forgotten_before_it_is_given_away():
    pool, cache = make_cache(num_blocks=3)
    publish(pool, cache, [1, 2, 3, 4]).free()
    assert len(cache) == 2
    taken = PageTable(pool)
    taken.grow(2)
    assert len(cache) == 1
    assert len(cache.match([1, 2, 3, 4])[0]) == 1, "the continuation goes first"
    assert not set(cache.match([1, 2, 3, 4])[0]) & set(taken.blocks)


def test_the_least_recently_used_prefix_is_evicted_first():
    pool, cache = make_cache(num_blocks=4)
    for prompt in ([1, 1], [2, 2], [3, 3]):
        publish(pool, cache, prompt).free()
    publish(pool, cache, [1, 1]).free()
    PageTable(pool).grow(2)
    assert [bool(cache.match(prompt)[0]) for prompt in ([1, 1], [2, 2], [3, 3])] == [True, False, True]


def test_a_prefix_in_use_is_never_evicted():
    pool, cache = make_cache(num_blocks=4)
    first = publish(pool, cache, [1, 1])
    user = publish(pool, cache, [1, 1])
    first.free()
    publish(pool, cache, [2, 2]).free()
    PageTable(pool).grow(4)
    assert cache.match([1, 1])[0] == user.blocks
    assert cache.match([2, 2])[0] == []
