"""The verdict on a window, against the text of protocol.md ("Verification pass")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.protocol import Verdict, judge

TOKENS = st.integers(0, 2)
"""So few that candidates match by chance."""


@st.composite
def windows(draw):
    """Candidates and what the verifier generated for 1..n + 1 rows."""
    candidates = draw(st.lists(TOKENS, max_size=6))
    num_rows = draw(st.integers(1, len(candidates) + 1))
    return candidates, draw(st.lists(TOKENS, min_size=num_rows, max_size=num_rows))


def replay(candidates, generated):
    """The protocol's sentences, one by one."""
    n, r = len(candidates), len(generated)
    m = max(m for m in range(min(r, n) + 1) if candidates[:m] == generated[:m])
    committed = candidates[:m] + ([generated[m]] if m < r else [])
    dropped = n - m if m < min(r, n) else 0
    return committed, m, dropped


@given(windows())
def test_a_verdict_is_what_the_protocol_says(window):
    verdict = judge(*window)
    assert (list(verdict.committed), verdict.num_matched, verdict.num_dropped) == replay(*window)


@given(windows())
def test_at_least_one_token_is_committed_and_all_are_the_verifiers_own(window):
    _, generated = window
    committed = list(judge(*window).committed)
    assert len(committed) >= 1
    assert committed == generated[: len(committed)]


@given(windows())
def test_rollback_happens_exactly_on_a_mismatch(window):
    candidates, generated = window
    is_mismatch = any(candidate != token for candidate, token in zip(candidates, generated, strict=False))
    assert judge(*window).is_rollback == is_mismatch


def test_a_full_match_gives_the_verifiers_next_token_as_a_bonus():
    assert judge([1, 2, 3], [1, 2, 3, 9]) == Verdict((1, 2, 3, 9), num_matched=3, num_dropped=0)


def test_a_full_match_without_a_row_to_spare_gives_no_bonus():
    assert judge([1, 2, 3], [1, 2, 3]) == Verdict((1, 2, 3), num_matched=3, num_dropped=0)


def test_a_window_shorter_than_its_candidates_leaves_the_rest_unjudged():
    assert judge([1, 2, 3, 4], [1, 2]) == Verdict((1, 2), num_matched=2, num_dropped=0)


def test_a_mismatch_commits_the_correction_and_drops_all_later_candidates():
    assert judge([1, 2, 3, 4], [1, 9, 3, 4, 5]) == Verdict((1, 9), num_matched=1, num_dropped=3)


def test_a_mismatch_drops_candidates_beyond_the_window_too():
    assert judge([1, 2, 3, 4, 5], [1, 9]) == Verdict((1, 9), num_matched=1, num_dropped=4)


def test_a_mismatch_on_the_last_compared_position_is_a_rollback_to_the_verifiers_token():
    assert judge([1, 2, 3], [1, 2, 9]) == Verdict((1, 2, 9), num_matched=2, num_dropped=1)
    assert judge([1, 2, 3], [1, 2, 9, 7]) == Verdict((1, 2, 9), num_matched=2, num_dropped=1)


def test_a_token_after_a_mismatch_is_worthless_even_where_it_equals_its_candidate():
    assert judge([1, 2, 3], [9, 2, 3, 4]).committed == (9,)


def test_a_decode_row_is_a_window_without_candidates():
    assert judge([], [5]) == Verdict((5,), num_matched=0, num_dropped=0)


@pytest.mark.parametrize(("candidates", "generated"), [([], []), ([1], []), ([], [1, 2]), ([1, 2], [1, 2, 3, 4])])
def test_a_window_that_does_not_fit_its_candidates_is_refused(candidates, generated):
    with pytest.raises(ValueError, match=rf"1\.\.{len(candidates) + 1} rows, not {len(generated)}"):
        judge(candidates, generated)


def test_judging_changes_neither_argument():
    candidates, generated = [1, 2], [1, 3]
    judge(candidates, generated)
    assert (candidates, generated) == ([1, 2], [1, 3])
