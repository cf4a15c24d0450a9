"""top_k, top_p and min_p keep exactly the ids that a plain-Python definition keeps, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.sampling import filters

NEAR = 1e-6  # a reference in float64 may put a sum this near to a limit on either side of it


def make_row(values):
    """Float32 row with maximum 0."""
    row = torch.tensor(values, dtype=torch.float32)
    return row - row.amax()


# Few distinct values, so that ties are everywhere; -inf is what masks leave.
tied_rows = st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0, -20.0, -math.inf]), min_size=1, max_size=400)
smooth_rows = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=400)
rows = st.one_of(tied_rows, smooth_rows).filter(lambda values: max(values) > -math.inf).map(make_row)


def by_order(row):
    return sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))


def reference_top_p_lengths(values, top_p):
    """Shortest and longest prefix that the definition allows, given rounding, for `values` in order."""
    weights = [math.exp(value) for value in values]
    total, running, sums = math.fsum(weights), 0.0, []
    for weight in weights:
        running += weight
        sums.append(running)
    goals = [top_p * total * (1 - NEAR), min(top_p * total * (1 + NEAR), running)]
    return [next(n for n, mass in enumerate(sums, start=1) if mass >= goal) for goal in goals]


def kept(row, top_k=0, top_p=1.0, min_p=0.0):
    ids = filters.kept_ids(row, top_k=top_k, top_p=top_p, min_p=min_p)
    return list(range(row.numel())) if ids is None else ids.tolist()


@given(rows, st.integers(1, 450))
def test_top_k_keeps_exactly_the_first_k_of_the_order(row, k):
    assert filters.top_k_ids(row, k).tolist() == sorted(by_order(row.tolist())[:k])
    assert kept(row, top_k=k) == sorted(by_order(row.tolist())[:k])


@given(rows, st.one_of(st.floats(1e-6, 1, exclude_max=True), st.sampled_from([1e-300, 0.5, 1 - 2**-53])))
def test_top_p_keeps_the_shortest_prefix_of_the_order_that_reaches_it(row, top_p):
    order = by_order(row.tolist())
    ids = kept(row, top_p=top_p)
    shortest, longest = reference_top_p_lengths([row[token_id].item() for token_id in order], top_p)
    assert shortest <= len(ids) <= longest
    assert ids == sorted(order[: len(ids)])


@given(rows, st.floats(1e-6, 1))
def test_min_p_keeps_ids_by_probability_relative_to_the_best(row, min_p):
    ids = set(kept(row, min_p=min_p))
    ratios = [math.exp(value) for value in row.tolist()]
    assert {token_id for token_id, ratio in enumerate(ratios) if ratio > min_p * (1 + NEAR)} <= ids
    assert ids <= {token_id for token_id, ratio in enumerate(ratios) if ratio >= min_p * (1 - NEAR)}


@given(rows, st.integers(0, 450), st.floats(0.01, 1), st.floats(0, 1))
def test_filters_compose_in_the_documented_order(row, top_k, top_p, min_p):
    order = by_order(row.tolist())[: top_k or None]
    ids = kept(row, top_k=top_k, top_p=top_p, min_p=min_p)
    shortest = longest = len(order)
    if top_p < 1:  # of the probability that top_k left
        shortest, longest = reference_top_p_lengths([row[token_id].item() for token_id in order], top_p)
    least, most = ([math.exp(value) >= min_p * (1 + sign * NEAR) for value in row.tolist()] for sign in (1, -1))
    assert ids == sorted(order[: len(ids)])
    assert sum(least[token_id] for token_id in order[:shortest]) <= len(ids)
    assert len(ids) <= sum(most[token_id] for token_id in order[:longest])
    assert ids


def test_top_p_is_taken_of_what_top_k_left():
    row = make_row([0.0, 0.0, 0.0, 0.0])
    assert kept(row, top_p=0.5) == [0, 1]
    assert kept(row, top_k=2, top_p=0.5) == [0]


@pytest.mark.parametrize(("top_p", "length"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (0.999, 4)])
def test_top_p_reached_exactly_needs_no_further_id(top_p, length):
    assert kept(make_row([-2.0 * 50, 0.0, 0.0, 0.0, 0.0]), top_p=top_p) == list(range(1, length + 1))


def test_ties_at_the_end_of_top_k_go_to_the_lowest_ids():
    row = torch.full((5000,), -1.0)
    row[[4999, 17]] = 0.0
    assert kept(row, top_k=5) == [0, 1, 2, 17, 4999]


def test_a_library_topk_alone_does_not_settle_ties():
    row = torch.full((5000,), -1.0)
    row[[4999, 17]] = 0.0
    assert sorted(torch.topk(row, 5).indices.tolist()) != [0, 1, 2, 17, 4999]


def test_ties_at_the_end_of_top_p_go_to_the_lowest_ids():
    row = torch.full((3000,), -200.0)
    row[[2999, 2000, 1000, 5]] = 0.0
    assert kept(row, top_p=0.5) == [5, 1000]


def test_negative_zero_is_a_tie_with_zero():
    row = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    assert filters.in_order(row).tolist() == [0, 1, 2, 3]
    assert kept(row, top_k=2) == [0, 1]
    assert kept(row, top_p=0.5) == [0, 1]


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 16383, 16384, 16385])
def test_vocabularies_around_the_block_size_lose_no_tail(vocab):
    row = torch.linspace(-1, 0, vocab) if vocab > 1 else torch.zeros(1)  # the best ids are the last
    for k in (1, 2, 60, 300):
        assert kept(row, top_k=k) == list(range(max(0, vocab - k), vocab))
    assert kept(row, top_p=1e-9) == [vocab - 1]


@pytest.mark.parametrize("spread", [1e-4, 0.3, 3.0, 50.0])
def test_top_p_of_a_real_sized_row_agrees_with_a_full_sort(spread):
    row = torch.randn(49152, generator=torch.Generator().manual_seed(0)).mul(spread).bfloat16().float()
    row -= row.amax()
    order = torch.sort(row, descending=True, stable=True).indices
    mass = row.double()[order].exp().cumsum(0)
    for top_p in (0.1, 0.5, 0.9, 0.99):
        ids = filters.top_p_ids(row, top_p)
        assert torch.equal(ids, order[: ids.numel()].sort().values)
        assert mass[ids.numel() - 1] >= mass[-1] * top_p * (1 - NEAR)
        assert ids.numel() == 1 or mass[ids.numel() - 2] < mass[-1] * top_p * (1 + NEAR)


@settings(max_examples=30)
@given(rows, st.integers(1, 400))
def test_value_of_k_is_reached_by_at_least_k_ids(row, k):
    k = min(k, row.numel())
    assert filters.ids_at_least(row, filters.value_of_k(row, k)).numel() >= k


def test_filters_that_are_off_keep_all_ids_without_work():
    row = make_row([0.0, -1.0, -2.0])
    assert filters.kept_ids(row, top_k=0, top_p=1.0, min_p=0.0) is None
    assert filters.kept_ids(row, top_k=-1, top_p=1.0, min_p=0.0) is None
    assert filters.kept_ids(row, top_k=3, top_p=1.0, min_p=0.0) is None


@settings(max_examples=20)
@given(rows, st.integers(0, 50), st.floats(0.01, 1), st.floats(0, 1))
def test_the_row_is_not_changed(row, top_k, top_p, min_p):
    before = row.clone()
    kept(row, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(row, before)
