"""The demo's prompts: what makes the comparison fair."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.cli.demo_prompts import PROMPTS, filler_prompts, measured_prompts, scatter


def test_all_prompts_of_a_batch_are_different():
    prompts = [*PROMPTS, *filler_prompts(500)]
    assert len(set(prompts)) == len(PROMPTS) + 500


def test_fillers_have_varied_lengths():
    lengths = {len(text.split()) for text in filler_prompts(48)}
    assert min(lengths) <= 5
    assert max(lengths) >= 50
    assert len(lengths) >= 10


@pytest.mark.parametrize("count", [0, -1, len(PROMPTS) + 1])
def test_a_number_of_prompts_that_does_not_exist_is_refused_by_name(count):
    with pytest.raises(ValueError, match=rf"prompts is {count};"):
        measured_prompts(count)


@given(st.integers(1, 16), st.integers(0, 100))
def test_scatter_keeps_every_item_once_and_says_where_the_measured_ones_are(num_measured, num_fillers):
    measured = [f"m{i}" for i in range(num_measured)]
    fillers = [f"f{i}" for i in range(num_fillers)]
    batch, positions = scatter(measured, fillers)
    assert sorted(batch) == sorted(measured + fillers)
    assert [batch[i] for i in positions] == measured
    assert [text for text in batch if text.startswith("f")] == fillers


def test_scatter_puts_measured_items_apart():
    _, positions = scatter(list(range(16)), list(range(48)))
    assert {b - a for a, b in itertools.pairwise(positions)} == {4}
