"""The page table: a position keeps its slot while it is held, and nothing is left behind when it is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.cache import BlockPool, OutOfBlocksError, PageTable


def slots(table, pool, num_positions):
    """Where the positions lie, as the kernels compute it from the blocks."""
    size = pool.block_size
    return [table.blocks[position // size] * size + position % size for position in range(num_positions)]


@given(st.data())
def test_tables_never_overlap_and_a_held_position_never_moves(data):
    pool = BlockPool(data.draw(st.integers(2, 12)), data.draw(st.integers(2, 4)))
    tables = [PageTable(pool) for _ in range(3)]
    for _ in range(data.draw(st.integers(0, 30))):
        table = data.draw(st.sampled_from(tables))
        before = list(table.blocks)
        operation = data.draw(st.sampled_from(["grow", "grow", "trim", "free"]))
        target = data.draw(st.integers(0, 20))
        if operation == "free":
            table.free()
            assert table.blocks == []
        elif operation == "trim":
            table.trim(target)
            assert table.blocks == before[: pool.blocks_for(target)]
        else:
            try:
                table.grow(target)
                assert table.capacity >= target
                assert table.missing(target) == 0
                assert table.blocks[: len(before)] == before
            except OutOfBlocksError:
                assert table.blocks == before
        held = [block for other in tables for block in other.blocks]
        assert len(set(held)) == len(held)
        assert all(pool.references(block) == (block in held) for block in range(pool.num_blocks))
        pool.check()


def test_a_freed_entry_is_never_used_again_by_its_old_owner():
    """The trap: an entry of a freed page table that still holds a valid slot number."""
    pool = BlockPool(4, 2)
    old, new = PageTable(pool), PageTable(pool)
    old.grow(6)
    taken = list(old.blocks)
    old.free()
    new.grow(6)
    assert sorted(new.blocks) == sorted(taken)
    assert old.blocks == []
    assert old.capacity == 0
    with pytest.raises(OutOfBlocksError):
        old.grow(1)
    old.free()
    assert all(pool.references(block) == 1 for block in new.blocks), "freeing again must not touch the new owner"


def test_a_trimmed_entry_is_never_used_again_by_its_old_owner():
    pool = BlockPool(4, 2)
    old, new = PageTable(pool), PageTable(pool)
    old.grow(6)
    trimmed = old.blocks[1:]
    old.trim(2)
    new.grow(2)
    assert new.blocks[0] in trimmed
    old.grow(4)
    assert not set(old.blocks) & set(new.blocks)


def test_verification_finds_the_slots_that_drafting_used():
    pool = BlockPool(8, 2)
    table = PageTable(pool)
    table.grow(5)
    drafted = slots(table, pool, 5)
    table.grow(9)
    assert slots(table, pool, 5) == drafted
    table.trim(6)
    assert slots(table, pool, 5) == drafted


def test_trimming_keeps_the_block_of_the_last_kept_position():
    pool = BlockPool(8, 4)
    table = PageTable(pool)
    table.grow(12)
    table.trim(5)
    assert len(table.blocks) == 2
    table.trim(100)
    assert len(table.blocks) == 2


def test_growing_without_memory_changes_nothing():
    pool = BlockPool(3, 2)
    table = PageTable(pool)
    table.grow(2)
    before = list(table.blocks)
    with pytest.raises(OutOfBlocksError):
        table.grow(7)
    assert table.blocks == before
    assert pool.num_free == 1


def test_adopted_blocks_are_shared_not_taken():
    pool = BlockPool(4, 2)
    owner, other = PageTable(pool), PageTable(pool)
    owner.grow(4)
    other.adopt(owner.blocks, parent=7)
    assert other.blocks == owner.blocks
    assert (other.num_published, other.cached_parent) == (2, 7)
    owner.free()
    assert [pool.references(block) for block in other.blocks] == [1, 1]


def test_only_an_empty_table_can_adopt():
    pool = BlockPool(4, 2)
    table = PageTable(pool)
    table.grow(2)
    with pytest.raises(ValueError, match="empty"):
        table.adopt([table.blocks[0]], parent=1)


def test_freeing_forgets_what_was_published():
    pool = BlockPool(4, 2)
    owner, other = PageTable(pool), PageTable(pool)
    owner.grow(4)
    other.adopt(owner.blocks, parent=7)
    other.free()
    assert (other.num_published, other.cached_parent) == (0, 0)


def test_freeing_returns_the_last_block_first_so_that_a_prefix_outlives_its_continuations():
    pool, evicted = BlockPool(4, 2), []
    pool.attach_cache(lambda _block: True, evicted.append)
    table = PageTable(pool)
    table.grow(6)
    blocks = list(table.blocks)
    table.free()
    pool.allocate(3)
    assert evicted == blocks[::-1]
