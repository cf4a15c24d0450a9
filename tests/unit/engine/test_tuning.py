"""What passes cost, how often candidates are wrong, and which W and G follow."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.engine.tuning import FlipRate, PassCosts, choose_policy
from llm42.protocol import ShapeClass

ROWS = (1, 3, 8, 20, 64, 128)
RATES = st.floats(0.0, 1.0)
LOADS = st.integers(0, 64)


class FixedCosts(PassCosts):
    """A known overhead."""

    def __init__(self, overhead_rows):
        super().__init__()
        self._overhead_rows = overhead_rows

    @property
    def overhead_rows(self):
        return self._overhead_rows


def observed(costs, overhead, per_row, count=300):
    for rows in islice(cycle(ROWS), count):
        costs.observe(rows, overhead + per_row * rows)
    return costs


def policy(overhead=16.0, rate=0.0, **fields):
    usual = {"num_deterministic": 8, "num_ordinary": 0, "max_rows": 64, "window_size": None, "group_size": None}
    return choose_policy(FixedCosts(overhead), FlipRate(1e6, rate * 1e6), **(usual | fields))


def policy_of_one_count(*arguments, max_rows=64, **fields):
    """As `policy`, where every canonical pass is padded to the same row count."""
    return policy(*arguments, max_rows=max_rows, canonical=ShapeClass([max_rows]), **fields)


# Costs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [1e-5, 1e-3])
@pytest.mark.parametrize("overhead_rows", [0.0, 0.5, 16.0, 200.0])
def test_passes_of_many_sizes_tell_what_having_one_costs(overhead_rows, per_row):
    costs = observed(PassCosts({1: per_row * 40, 64: per_row * 90}), overhead_rows * per_row, per_row)
    assert costs.overhead_rows == pytest.approx(overhead_rows, rel=0.05, abs=0.5)


def test_costs_follow_a_change():
    costs = observed(PassCosts(), 0.020, 0.001)
    assert costs.overhead_rows == pytest.approx(20.0, rel=0.05)
    observed(costs, 0.100, 0.001)
    assert costs.overhead_rows == pytest.approx(100.0, rel=0.05)


def test_a_prior_is_believed_until_something_is_measured():
    costs = PassCosts({1: 11.0, 11: 21.0, 101: 111.0})
    assert costs.overhead_rows == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        ({64: 1.0}, 16.0),
        ({1: 2.0, 64: 1.0}, 16.0),
        ({1: 1.0, 64: 1.0 + 1e-9}, 256.0),
        ({1: 0.001, 64: 1.0}, 0.0),
    ],
    ids=["one size", "larger passes are faster", "rows cost nothing", "nothing but rows"],
)
def test_an_overhead_that_cannot_be_told_is_a_usual_one_and_an_absurd_one_is_bounded(prior, expected):
    assert PassCosts(prior).overhead_rows == expected


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0.0, 10.0)), max_size=50))
def test_an_overhead_is_a_bounded_number_whatever_is_measured(passes):
    costs = PassCosts()
    for rows, seconds in passes:
        costs.observe(rows, seconds)
    assert 0.0 <= costs.overhead_rows <= 256.0


def test_an_overhead_stays_a_number_when_all_passes_have_one_size():
    costs = observed(PassCosts(), 0.020, 0.001)
    for _ in range(3000):
        costs.observe(32, 0.052)
    assert 15.0 <= costs.overhead_rows <= 21.0


# Flips ----------------------------------------------------------------------------------------------------------------


def test_the_rate_of_flips_starts_at_one_in_a_thousand_and_counts_windows_with_a_rollback():
    flips = FlipRate()
    assert flips.value == 0.001
    for index in range(10_000):
        flips.observe(8, is_rollback=index % 10 == 0)
    assert flips.value == pytest.approx(1 / 80, rel=0.02)


# The choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [0.0, 16.0, 256.0])
@pytest.mark.parametrize("num_ordinary", [0, 20])
@pytest.mark.parametrize("num_deterministic", [1, 8, 30])
def test_without_padding_windows_are_small_since_their_rows_are_run_twice(overhead, num_ordinary, num_deterministic):
    """A verification pass commits a token of its own, so it saves nothing to have few of them."""
    load = {"num_deterministic": num_deterministic, "num_ordinary": num_ordinary}
    assert policy(overhead, 0.001, **load).window_size == 2
    assert policy(overhead, 0.001, **load, canonical=ShapeClass(range(1, 65))).window_size == 2


@pytest.mark.parametrize(("num_deterministic", "window_size"), [(1, 64), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2)])
def test_windows_fill_a_pass_that_is_padded_anyway(num_deterministic, window_size):
    chosen = policy_of_one_count(num_deterministic=num_deterministic)
    assert (chosen.window_size, chosen.group_size) == (window_size, num_deterministic)


def test_windows_leave_room_for_the_rows_of_ordinary_requests():
    alone = policy_of_one_count(num_deterministic=2)
    beside = policy_of_one_count(num_deterministic=2, num_ordinary=32)
    assert alone.window_size * alone.group_size == 64
    assert beside.window_size * beside.group_size == 32


def test_many_flips_make_small_windows():
    sizes = [policy_of_one_count(rate=rate, num_deterministic=1).window_size for rate in (0.0, 0.02, 0.1, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 64
    assert sizes[2] < 64
    assert sizes[-1] == 2


def test_windows_of_several_requests_share_a_pass_as_far_as_it_has_rows():
    assert policy(num_deterministic=3).group_size == 3
    assert policy(num_deterministic=64).group_size == 32


COSTS = st.floats(0.0, 256.0)


@given(RATES, COSTS, LOADS, LOADS, st.integers(1, 300), st.booleans())
def test_a_window_is_never_larger_than_a_pass_but_for_the_least_of_two(
    rate, overhead, num_deterministic, num_ordinary, max_rows, is_padded
):
    load = {"num_deterministic": num_deterministic, "num_ordinary": num_ordinary}
    chosen = (policy_of_one_count if is_padded else policy)(overhead, rate, max_rows=max_rows, **load)
    assert 2 <= chosen.window_size <= max(2, max_rows)
    assert 1 <= chosen.group_size <= max(1, num_deterministic)
    assert chosen.group_size * chosen.window_size <= max(max_rows, chosen.window_size)


@given(RATES, COSTS, LOADS, LOADS, st.integers(2, 100), st.integers(1, 16))
def test_sizes_set_by_hand_are_kept(rate, overhead, num_deterministic, num_ordinary, window, group):
    load = {"num_deterministic": num_deterministic, "num_ordinary": num_ordinary}
    chosen = policy(overhead, rate, window_size=window, group_size=group, **load)
    assert (chosen.window_size, chosen.group_size) == (window, group)
    assert policy(overhead, rate, window_size=window, **load).window_size == window
    assert policy(overhead, rate, group_size=group, **load).group_size == group


@given(RATES, RATES, COSTS, st.integers(4, 64))
def test_more_flips_never_make_a_window_larger(first, second, overhead, max_rows):
    few, many = sorted((first, second))
    sizes = [policy_of_one_count(overhead, rate, num_deterministic=1, max_rows=max_rows) for rate in (few, many)]
    assert sizes[0].window_size >= sizes[1].window_size


@given(RATES, COSTS, st.integers(4, 64), st.integers(4, 64))
def test_more_padding_never_makes_a_window_smaller(rate, overhead, first, second):
    little, much = sorted((first, second))
    fields = {"num_deterministic": 1, "max_rows": little}
    padded = [policy(overhead, rate, canonical=ShapeClass([rows]), **fields) for rows in (little, much)]
    assert padded[0].window_size <= padded[1].window_size
