"""Bias, penalties and masks change exactly the ids concerned, as a plain-Python definition does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.sampling import penalties

VOCAB = 12
rows = st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB)
prefixes = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def check(x, values, changed):
    """`x` equals `values` to float32 rounding, and bitwise wherever `changed` is false."""
    torch.testing.assert_close(x, torch.tensor(values), rtol=1e-5, atol=1e-4)
    untouched = [token_id for token_id in range(len(values)) if token_id not in changed]
    assert torch.equal(x[untouched], torch.tensor(values)[untouched])


@given(rows, prefixes, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_follow_their_definition(row, output, presence, frequency):
    x = torch.tensor(row)
    penalties.penalize_output(x, output, presence, frequency)
    counts = [output.count(token_id) for token_id in range(VOCAB)]
    expected = [v - frequency * count - presence * (count > 0) for v, count in zip(row, counts, strict=True)]
    check(x, expected, set(output))


@given(rows, prefixes, prefixes, st.floats(0.1, 10))
def test_repetition_follows_its_definition_over_prompt_and_output(row, prompt, output, penalty):
    x = torch.tensor(row)
    penalties.penalize_repetition(x, prompt, output, penalty)
    seen = {*prompt, *output}
    expected = [(v / penalty if v > 0 else v * penalty) if i in seen else v for i, v in enumerate(row)]
    check(x, expected, seen)


@given(rows, st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)))
def test_logit_bias_is_added(row, bias):
    x = torch.tensor(row)
    penalties.add_logit_bias(x, bias)
    check(x, [v + bias.get(i, 0.0) for i, v in enumerate(row)], set(bias))


@settings(max_examples=20)
@given(rows, st.sets(st.integers(0, VOCAB - 1)))
def test_masked_ids_are_impossible_and_no_others(row, ids):
    x = torch.tensor(row)
    penalties.mask_ids(x, frozenset(ids))
    check(x, [-math.inf if i in ids else v for i, v in enumerate(row)], ids)


@settings(max_examples=30)
@given(rows, prefixes, st.randoms(use_true_random=False))
def test_the_order_of_the_prefix_does_not_matter(row, output, random):
    shuffled = list(output)
    random.shuffle(shuffled)
    x, y = torch.tensor(row), torch.tensor(row)
    for values, prefix in ((x, output), (y, shuffled)):
        penalties.penalize_repetition(values, prefix, prefix[::2], 1.3)
        penalties.penalize_output(values, prefix, 0.3, 0.7)
    assert torch.equal(x, y)


def test_counts_beyond_float_precision_of_the_parts_are_exact_integers():
    x = torch.zeros(3)
    penalties.penalize_output(x, [1] * 10_000 + [2], 0.0, 0.5)
    assert x.tolist() == [0.0, -5000.0, -0.5]


@pytest.mark.parametrize("outside", [-1, VOCAB, VOCAB + 10**6])
def test_ids_outside_the_vocabulary_are_skipped(outside):
    x = torch.arange(VOCAB, dtype=torch.float32)
    penalties.penalize_repetition(x, [outside], [outside], 2.0)
    penalties.penalize_output(x, [outside], 1.0, 1.0)
    penalties.mask_ids(x, frozenset({outside}))
    penalties.add_logit_bias(x, {max(outside, VOCAB): 5.0})
    assert torch.equal(x, torch.arange(VOCAB, dtype=torch.float32))


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_leave_no_nan_and_no_new_infinity(penalty):
    x = torch.tensor([1e38, -1e38, 0.0, -math.inf, 5.0])
    penalties.penalize_repetition(x, range(5), [], penalty)
    assert x.isfinite().tolist() == [True, True, True, False, True]
    assert x[3] == -math.inf


def test_impossible_ids_stay_impossible():
    x = torch.tensor([-math.inf, 0.0])
    penalties.add_logit_bias(x, {0: 100.0})
    penalties.penalize_output(x, [0], -2.0, -2.0)
    penalties.penalize_repetition(x, [0], [], 0.5)
    assert x.tolist() == [-math.inf, 0.0]
