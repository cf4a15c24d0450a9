"""The ledger, against a slow reference that replays the text of protocol.md and keeps everything apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.protocol import Ledger

TOKENS = st.integers(0, 2)
"""So few that candidates match by chance."""


def decoding(committed=(7,), candidates=(), prompt=(1, 2, 3)):
    """A deterministic request whose prompt is computed, with these outputs."""
    ledger = Ledger(prompt, deterministic=True)
    ledger.advance(range(len(prompt)), committed[:1])
    for token in committed[1:]:
        ledger.advance(ledger.next_rows(1), [token])
    for token in candidates:
        ledger.draft(token)
    return ledger


def verify(ledger, generated, window_size=32):
    """One verification window; the verifier would go on with ``generated``."""
    rows = ledger.next_rows(window_size)
    return ledger.advance(rows, generated[: len(rows)])


class Reference:
    """The protocol's words: three lists, and for each position who wrote its KV."""

    def __init__(self, prompt):
        self.prompt, self.committed, self.candidates = list(prompt), [], []
        self.kv = []

    @property
    def tokens(self):
        return self.prompt + self.committed + self.candidates

    @property
    def watermark(self):
        return [*self.kv, "fast"].index("fast")

    def write(self, start, stop, writer):
        self.kv[start:stop] = [writer] * (stop - start)

    def roll_back(self):
        """KV slots past the watermark go: P + committed - 1 positions remain."""
        del self.kv[len(self.prompt) + len(self.committed) - 1 + len(self.candidates) :]

    def draft(self, token):
        self.write(len(self.tokens) - 1, len(self.tokens), "fast")
        self.candidates.append(token)

    def chunk(self, length):
        """A prompt chunk, or one of a preempted request: a window whose tokens need no check."""
        start = self.watermark
        self.write(start, start + length, "canonical")

    def verify(self, window_size, generate):
        n = len(self.candidates)
        r = min(window_size, n + 1)
        g = [generate(i) for i in range(r)]
        start = len(self.prompt) + len(self.committed) - 1
        self.write(start, start + r, "canonical")
        m = 0
        while m < min(r, n) and g[m] == self.candidates[m]:
            m += 1
        self.committed += self.candidates[:m]
        is_mismatch = m < min(r, n)
        self.candidates = [] if is_mismatch else self.candidates[m:]
        if m < r:
            self.committed.append(g[m])
        self.roll_back()
        return g

    def preempt(self):
        dropped, self.candidates, self.kv = len(self.candidates), [], []
        return dropped


def assert_equal(ledger, reference):
    assert ledger.token_ids == reference.tokens
    assert ledger.committed == reference.committed
    assert ledger.candidates == reference.candidates
    assert ledger.watermark == reference.watermark
    assert ledger.num_computed == len(reference.kv)
    assert ledger.num_stable == len(reference.prompt) + len(reference.committed)
    is_decoding = len(reference.committed) > 0 and len(reference.kv) >= ledger.num_stable - 1
    assert ledger.is_prefilling != is_decoding


@settings(max_examples=200)
@given(st.lists(TOKENS, min_size=1, max_size=5), st.data())
def test_any_history_equals_the_protocol_replayed(prompt, data):
    ledger, reference = Ledger(prompt, deterministic=True), Reference(prompt)
    for _ in range(data.draw(st.integers(0, 25))):
        operation = data.draw(st.sampled_from(["draft", "draft", "draft", "window", "window", "preempt"]))
        if operation == "preempt":
            assert ledger.preempt() == reference.preempt()
        elif ledger.is_prefilling:
            rows = ledger.next_rows(data.draw(st.integers(1, 4)))
            if rows.stop < ledger.num_tokens:
                assert ledger.advance(rows, []) is None
                reference.chunk(len(rows))
            else:
                reference.chunk(len(rows) - 1)
                generated = reference.verify(1, lambda _row: data.draw(TOKENS))
                ledger.advance(rows, generated)
        elif operation == "draft":
            token = data.draw(TOKENS)
            ledger.draft(token)
            reference.draft(token)
        else:
            window_size = data.draw(st.integers(1, 6))
            rows = ledger.next_rows(window_size)
            generated = reference.verify(window_size, lambda _row: data.draw(TOKENS))
            assert len(rows) == len(generated)
            before = ledger.num_committed
            verdict = ledger.advance(rows, generated)
            assert ledger.num_committed == before + len(verdict.committed) >= before + 1
        assert_equal(ledger, reference)


def test_a_window_starts_with_the_last_committed_token_and_ends_at_w_rows():
    ledger = decoding(committed=(7, 8), candidates=(4, 5, 6))
    assert ledger.next_rows(32) == range(4, 8)
    assert [ledger.token_ids[position] for position in ledger.next_rows(32)] == [8, 4, 5, 6]


def test_a_window_longer_than_w_is_truncated_at_its_end_not_at_its_start():
    ledger = decoding(candidates=(4, 5, 6, 7, 8))
    assert [ledger.token_ids[position] for position in ledger.next_rows(3)] == [7, 4, 5]


def test_candidates_beyond_a_matching_window_stay_candidates():
    ledger = decoding(candidates=(4, 5, 6, 7, 8))
    verify(ledger, [4, 5, 6], window_size=3)
    assert ledger.committed == [7, 4, 5, 6]
    assert ledger.candidates == [7, 8]
    assert [ledger.token_ids[position] for position in ledger.next_rows(3)] == [6, 7, 8]


def test_candidates_beyond_a_mismatching_window_go():
    ledger = decoding(candidates=(4, 5, 6, 7, 8))
    verify(ledger, [4, 9, 6], window_size=3)
    assert ledger.token_ids == [1, 2, 3, 7, 4, 9]


def test_a_full_match_commits_a_bonus_token_that_is_the_next_input():
    ledger = decoding(candidates=(4, 5))
    verify(ledger, [4, 5, 6])
    assert ledger.committed == [7, 4, 5, 6]
    assert [ledger.token_ids[position] for position in ledger.next_rows(32)] == [6]


def test_the_rejected_token_is_not_the_next_input_when_the_last_compared_position_mismatches():
    ledger = decoding(candidates=(4, 5))
    verify(ledger, [4, 9, 0])
    assert ledger.token_ids[-1] == 9
    assert [ledger.token_ids[position] for position in ledger.next_rows(32)] == [9]
    ledger.draft(6)
    assert ledger.token_ids == [1, 2, 3, 7, 4, 9, 6]


def test_the_next_input_is_the_correction_when_the_mismatch_is_on_the_last_row_of_a_truncated_window():
    ledger = decoding(candidates=(4, 5, 6))
    verify(ledger, [4, 9], window_size=2)
    assert ledger.token_ids == [1, 2, 3, 7, 4, 9]
    assert ledger.next_rows(2) == range(5, 6)


def test_kv_written_for_rejected_candidates_is_never_below_the_watermark():
    """The window's KV reaches past the correction, and what lies there belongs to other tokens."""
    ledger = decoding(candidates=(4, 5, 6, 7))
    verify(ledger, [9, 0, 0, 0, 0])
    assert ledger.committed == [7, 9]
    assert ledger.watermark == 4
    for token in (1, 1, 1):
        ledger.draft(token)
        assert ledger.watermark == 4, "drafting on must not bring the stale KV back"
        assert ledger.num_computed == ledger.num_tokens - 1


def test_the_watermark_is_prompt_plus_committed_minus_one_whatever_the_verdict():
    for generated in ([4, 5, 6], [4, 9, 0], [9, 0, 0]):
        ledger = decoding(candidates=(4, 5))
        verify(ledger, generated)
        assert ledger.watermark == ledger.prompt_len + ledger.num_committed - 1


def test_the_watermark_counts_canonical_positions_while_the_prompt_is_computed():
    ledger = Ledger([1, 2, 3, 4], deterministic=True)
    assert ledger.watermark == 0
    assert ledger.advance(ledger.next_rows(3), []) is None
    assert ledger.watermark == 3
    assert ledger.next_rows(3) == range(3, 4)
    ledger.advance(range(3, 4), [9])
    assert ledger.watermark == 4
    assert ledger.committed == [9]


def test_a_finished_candidate_that_is_rolled_back_leaves_no_length_behind():
    """The stale finish length: EOS (0) was drafted, the verifier disagrees, and generation goes on."""
    ledger = decoding(candidates=(4, 0))
    verify(ledger, [4, 5, 6])
    assert ledger.committed == [7, 4, 5]
    assert ledger.num_candidates == 0
    ledger.draft(6)
    verify(ledger, [6, 8])
    assert ledger.committed == [7, 4, 5, 6, 8]


def test_a_window_after_a_rollback_equals_one_that_never_saw_the_candidates():
    rolled_back, fresh = decoding(candidates=(4, 5, 6)), decoding(committed=(7, 9))
    verify(rolled_back, [9, 0, 0, 0])
    for name in ("token_ids", "committed", "watermark", "num_computed", "is_prefilling"):
        assert getattr(rolled_back, name) == getattr(fresh, name)
    assert rolled_back.next_rows(8) == fresh.next_rows(8)


def test_a_stop_in_a_window_keeps_what_precedes_it_and_no_candidate():
    ledger = decoding(candidates=(4, 0, 6, 8))
    verify(ledger, [4, 0, 6], window_size=3)
    ledger.truncate(3)
    assert ledger.committed == [7, 4, 0]
    assert ledger.candidates == []
    assert ledger.watermark == 5


def test_a_chunk_of_a_prompt_is_a_window_without_samples():
    ledger = Ledger([1, 2, 3], deterministic=True)
    assert ledger.first_sampled(range(2)) == 2
    assert ledger.first_sampled(range(3)) == 2
    assert ledger.first_sampled(range(2, 3)) == 2


def test_every_row_of_a_verification_window_is_sampled():
    ledger = decoding(candidates=(4, 5))
    rows = ledger.next_rows(32)
    assert ledger.first_sampled(rows) == rows.start


def test_preemption_keeps_committed_tokens_and_rebuilds_their_kv_canonically():
    ledger = decoding(committed=(7, 8), candidates=(4, 5))
    assert ledger.preempt() == 2
    assert ledger.committed == [7, 8]
    assert ledger.watermark == ledger.num_computed == 0
    assert ledger.is_prefilling
    assert ledger.advance(ledger.next_rows(2), []) is None
    rows = ledger.next_rows(32)
    assert rows == range(2, 5)
    assert ledger.first_sampled(rows) == 4, "only the last committed token has an unknown successor"
    ledger.advance(rows, [9])
    assert ledger.committed == [7, 8, 9]
    assert not ledger.is_prefilling


def test_a_prefix_cache_hit_is_canonical_kv():
    ledger = Ledger([1, 2, 3, 4, 5], deterministic=True)
    ledger.restore(4)
    assert ledger.watermark == ledger.num_computed == 4
    assert ledger.next_rows(8) == range(4, 5)


def test_a_hit_on_the_whole_prompt_still_leaves_the_last_row_to_compute():
    ledger = Ledger([1, 2, 3, 4], deterministic=True)
    ledger.restore(4)
    assert ledger.next_rows(8) == range(3, 4)


def test_an_ordinary_draft_is_final_and_its_kv_is_not_canonical():
    ledger = Ledger([1, 2, 3], deterministic=False)
    ledger.advance(range(3), [7])
    ledger.draft(8)
    assert ledger.committed == [7, 8]
    assert ledger.num_candidates == 0
    assert ledger.watermark == 3
    assert ledger.num_computed == 4
    assert not ledger.is_prefilling


def test_drafting_before_the_prompt_is_computed_is_refused():
    ledger = Ledger([1, 2], deterministic=True)
    with pytest.raises(ValueError, match="before its prompt is computed"):
        ledger.draft(5)
    ledger.advance(range(1), [])
    with pytest.raises(ValueError, match="before its prompt is computed"):
        ledger.draft(5)


def test_drafting_before_a_preempted_request_is_rebuilt_is_refused():
    ledger = decoding(committed=(7, 8))
    ledger.preempt()
    with pytest.raises(ValueError, match="before its prompt is computed"):
        ledger.draft(5)


@pytest.mark.parametrize("rows", [range(2, 4), range(4, 5), range(3, 3), range(3, 9)])
def test_rows_that_do_not_continue_the_watermark_are_refused(rows):
    ledger = decoding(candidates=(4, 5))
    with pytest.raises(ValueError, match="do not continue the watermark 3 of 6 tokens"):
        ledger.advance(rows, [0] * len(rows))


@pytest.mark.parametrize("generated", [[], [4], [4, 5], [4, 5, 6, 7]])
def test_a_wrong_number_of_generated_tokens_is_refused(generated):
    ledger = decoding(candidates=(4, 5))
    with pytest.raises(ValueError, match=rf"{len(generated)} generated tokens for rows range\(3, 6\)"):
        ledger.advance(range(3, 6), generated)


@pytest.mark.parametrize("num_committed", [-1, 3])
def test_keeping_more_than_there_is_is_refused(num_committed):
    with pytest.raises(ValueError, match=f"cannot keep {num_committed} of 2"):
        decoding(committed=(7, 8)).truncate(num_committed)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Ledger([], deterministic=True)


def test_the_ledger_does_not_share_the_callers_prompt():
    prompt = [1, 2]
    ledger = Ledger(prompt, deterministic=True)
    ledger.advance(range(2), [3])
    assert prompt == [1, 2]
