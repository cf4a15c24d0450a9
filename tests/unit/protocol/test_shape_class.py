"""A shape class: what it holds, what it pads to, and how it is described."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.protocol import ShapeClass
from llm42.protocol.shape_class import describe_counts

COUNTS = st.sets(st.integers(1, 300), min_size=1, max_size=30)


def counts_of(description):
    """The counts that a description stands for."""
    counts = []
    for part in description.split(", "):
        run, _, step = part.partition(" by ")
        first, _, last = run.partition("-")
        counts.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return counts


@given(COUNTS, st.integers(0, 400))
def test_padding_gives_the_smallest_count_that_holds_the_rows(counts, rows):
    shapes = ShapeClass(counts)
    fitting = [count for count in counts if count >= rows]
    if fitting:
        assert shapes.pad(rows) == min(fitting)
    else:
        with pytest.raises(ValueError, match=f"{rows} rows do not fit a class whose largest count is {max(counts)}"):
            shapes.pad(rows)


@given(COUNTS)
def test_a_class_holds_its_counts_and_no_other(counts):
    shapes = ShapeClass(counts)
    assert {rows for rows in range(302) if rows in shapes} == counts
    assert shapes.largest == max(counts)
    assert all(shapes.pad(rows) == rows for rows in counts)


def test_counts_are_a_set_in_any_order():
    shapes = ShapeClass([8, 2, 8, 4])
    assert shapes.row_counts == (2, 4, 8)
    assert shapes == ShapeClass(iter((4, 8, 2)))
    assert hash(shapes) == hash(ShapeClass((2, 4, 8)))
    assert shapes != ShapeClass([2, 4])
    assert shapes != (2, 4, 8)


@pytest.mark.parametrize("counts", [[], [0], [4, -1]])
def test_a_class_without_positive_counts_is_refused(counts):
    with pytest.raises(ValueError, match="a shape class needs positive row counts, not "):
        ShapeClass(counts)


@pytest.mark.parametrize(
    ("counts", "description"),
    [
        ([], ""),
        ([64], "64"),
        ([1, 2], "1, 2"),
        ([1, 2, 3], "1-3"),
        ([2, 4, 6], "2-6 by 2"),
        ([16, 1, 3, 2], "1-3, 16"),
        ([1, 5, 6, 7], "1, 5-7"),
        ([*range(1, 17), *range(18, 65, 2), *range(80, 257, 16)], "1-16, 18-64 by 2, 80-256 by 16"),
    ],
)
def test_runs_steps_and_single_counts_are_described(counts, description):
    assert describe_counts(counts) == description


def test_a_class_shows_its_counts():
    assert repr(ShapeClass([1, 2, 3, 8])) == "ShapeClass(1-3, 8)"


@given(COUNTS)
def test_a_description_names_every_count_once(counts):
    assert counts_of(describe_counts(counts)) == sorted(counts)
