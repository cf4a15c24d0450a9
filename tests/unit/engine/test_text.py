"""The text of an output: stop strings, what may be shown before the end, and that commit granularity never matters."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.cache import BlockPool
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.text import OutputText
from llm42.sampling.params import SamplingParams

PIECES = [b"", b"a", b"b", b"ab", b"ba", b"abc", b"\xc3", b"\xa9", "é".encode()]
"""Token id -> its bytes: stop strings cross tokens, and characters do, too (6 and 7 are the halves of 8)."""
EOS = 0
STOPS = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3)
TOKENS = st.lists(st.integers(1, len(PIECES) - 1), max_size=12)


class ByteTokenizer:
    """A tokenizer as far as `OutputText` knows one: its streams hold incomplete characters back."""

    def new_stream(self, *, skip_special_tokens):
        assert skip_special_tokens
        return ByteStream()


class ByteStream:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id):
        return self._decoder.decode(PIECES[token_id])

    def flush(self):
        return self._decoder.decode(b"", final=True)


def ids(*pieces):
    """Token ids by their text."""
    return [PIECES.index(piece.encode()) for piece in pieces]


def make_text(**fields):
    return OutputText(ByteTokenizer(), SamplingParams(**fields))


def push_all(text, tokens, min_tokens=0):
    """Push until a stop string is complete; returns it and the texts that were visible on the way."""
    seen = []
    for index, token in enumerate(tokens):
        stop = text.push(token, may_stop=index >= min_tokens)
        if stop is not None:
            return stop, seen
        seen.append(text.visible)
    text.finish()
    return None, seen


def reference(tokens, stops, min_tokens, *, keep_stop):
    """The stop string and final text, from the whole text: the first token that completes a match ends it."""
    stream = ByteStream()
    lengths, whole = [], ""
    for token in tokens:
        whole += stream.step(token)
        lengths.append(len(whole))
    matches = []
    for stop in stops:
        for start in range(len(whole)):
            if whole.startswith(stop, start):
                completed_by = next(k for k, length in enumerate(lengths) if length >= start + len(stop))
                if completed_by >= min_tokens:
                    matches.append((completed_by, start, -len(stop), stop))
    if not matches:
        return None, whole + stream.flush()
    _, start, _, stop = min(matches)
    return stop, whole[: start + (len(stop) if keep_stop else 0)]


@settings(max_examples=300)
@given(TOKENS, STOPS, st.integers(0, 4), st.booleans())
def test_stop_string_and_final_text_are_those_of_the_whole_text(tokens, stops, min_tokens, keep_stop):
    text = make_text(stop=stops, include_stop_str_in_output=keep_stop)
    found, _ = push_all(text, tokens, min_tokens)
    assert (found, text.visible) == reference(tokens, stops, min_tokens, keep_stop=keep_stop)


@settings(max_examples=300)
@given(TOKENS, STOPS, st.integers(0, 4), st.booleans())
def test_what_is_visible_is_always_a_prefix_of_the_final_text_and_never_shrinks(tokens, stops, min_tokens, keep_stop):
    text = make_text(stop=stops, include_stop_str_in_output=keep_stop)
    _, seen = push_all(text, tokens, min_tokens)
    for earlier, later in pairwise([*seen, text.visible]):
        assert later.startswith(earlier)


def test_without_holding_back_the_beginning_of_a_stop_string_would_be_shown_and_taken_back():
    text = make_text(stop="bab")
    text._held_back = 0
    _, seen = push_all(text, ids("a", "b", "ab"))
    assert not text.visible.startswith(seen[-1])


@given(TOKENS, STOPS)
def test_no_more_is_held_back_than_the_beginning_of_a_stop_string(tokens, stops):
    text, stream, shown = make_text(stop=stops), ByteStream(), ""
    for token in tokens:
        if text.push(token, may_stop=True) is not None:
            return
        shown += stream.step(token)
        assert len(shown) - len(text.visible) <= max((len(stop) - 1 for stop in stops), default=0)


def test_text_without_stop_strings_is_visible_at_once():
    text = make_text()
    text.push(*ids("ab"), may_stop=True)
    assert text.visible == "ab"


def test_a_stop_string_across_tokens_is_found_and_cut_out_with_nothing_of_it_ever_shown():
    text = make_text(stop="bab")
    found, seen = push_all(text, ids("a", "b", "ab", "a"))
    assert (found, text.visible) == ("bab", "a")
    assert "ab" not in seen


def test_a_stop_string_inside_one_token_cuts_the_token():
    text = make_text(stop="b")
    assert push_all(text, ids("abc"))[0] == "b"
    assert text.visible == "a"


def test_a_stop_string_can_be_kept():
    text = make_text(stop="b", include_stop_str_in_output=True)
    push_all(text, ids("abc"))
    assert text.visible == "ab"


def test_of_two_stop_strings_the_earlier_wins_and_of_two_at_one_place_the_longer():
    for stops in (["bc", "ab"], ["ab", "bc"]):
        text = make_text(stop=stops)
        assert push_all(text, ids("abc"))[0] == "ab"
    for stops in (["a", "ab"], ["ab", "a"]):
        text = make_text(stop=stops)
        assert push_all(text, ids("abc"))[0] == "ab"


def test_a_stop_string_that_is_complete_before_min_tokens_does_not_count():
    text = make_text(stop="ab")
    assert push_all(text, ids("ab", "b", "ab"), min_tokens=2)[0] == "ab"
    assert text.visible == "abb"


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_it_counts():
    text = make_text(stop="ab")
    assert push_all(text, ids("b", "a", "b"), min_tokens=2)[0] == "ab"
    assert text.visible == "b"


def test_a_character_split_over_tokens_is_shown_when_it_is_whole():
    text = make_text()
    text.push(6, may_stop=True)
    assert text.visible == ""
    text.push(7, may_stop=True)
    assert text.visible == "é"


def test_a_character_split_over_tokens_completes_a_stop_string():
    text = make_text(stop="aé")
    assert push_all(text, [*ids("b", "a"), 6, 7])[0] == "aé"
    assert text.visible == "b"


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    text = make_text()
    push_all(text, [*ids("a"), 6])
    assert text.visible == "a\N{REPLACEMENT CHARACTER}"


def test_the_beginning_of_a_stop_string_is_shown_when_the_output_ends_with_it():
    text = make_text(stop="abc")
    push_all(text, ids("b", "ab"))
    assert text.visible == "bab"


@pytest.mark.parametrize(("keep_stop", "shown"), [(False, "b"), (True, "bab")])
def test_a_stop_token_is_shown_only_where_stop_strings_are(keep_stop, shown):
    text = make_text(include_stop_str_in_output=keep_stop)
    text.push(*ids("b"), may_stop=True)
    text.push_stop_token(*ids("ab"))
    text.finish()
    assert text.visible == shown


def test_finishing_twice_adds_nothing():
    text = make_text()
    push_all(text, [6])
    text.finish()
    assert text.visible == "\N{REPLACEMENT CHARACTER}"


# Commit granularity ---------------------------------------------------------------------------------------------------


def run_request(params, tokens, window_sizes):
    """A request whose tokens are committed in windows of these sizes; returns it and the texts seen on the way."""
    spec = SequenceSpec("request", 0, (1, 2), params, 0, max_tokens=len(tokens), eos_token_ids=frozenset({EOS}))
    request = Request(spec, BlockPool(2, 2), OutputText(ByteTokenizer(), params))
    ledger, seen = request.ledger, []
    ledger.advance(range(2), tokens[:1])
    request.accept(1, ())
    sizes = iter(window_sizes)
    while not request.is_finished:
        seen.append(request.text.visible)
        rest = tokens[ledger.num_committed :]
        size = min(next(sizes, 1), len(rest))
        for candidate in rest[: size - 1]:
            ledger.draft(candidate)
        verdict = ledger.advance(ledger.next_rows(size), rest[:size])
        request.accept(len(verdict.committed), ())
    return request, seen


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    STOPS,
    st.integers(0, 4),
    st.lists(st.integers(1, 6), max_size=12),
    st.sampled_from([None, [3], [EOS, 5]]),
    st.booleans(),
)
def test_how_many_tokens_are_committed_at_a_time_never_matters(tokens, stops, min_tokens, sizes, stop_ids, ignore_eos):
    params = SamplingParams(
        deterministic=True,
        stop=stops,
        min_tokens=min(min_tokens, len(tokens)),
        max_tokens=len(tokens),
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
    )
    in_windows, seen = run_request(params, tokens, sizes)
    one_by_one, _ = run_request(params, tokens, [])
    assert in_windows.ledger.committed == one_by_one.ledger.committed == tokens[: in_windows.ledger.num_committed]
    assert in_windows.ledger.num_committed >= 1
    assert in_windows.ledger.num_candidates == 0
    for name in ("finish_reason", "stop_reason"):
        assert getattr(in_windows, name) == getattr(one_by_one, name)
    assert in_windows.text.visible == one_by_one.text.visible
    assert all(in_windows.text.visible.startswith(text) for text in seen)


def test_tokens_committed_after_the_one_that_ends_the_output_are_taken_back():
    params = SamplingParams(deterministic=True, max_tokens=6)
    request, _ = run_request(params, [*ids("a", "b"), EOS, *ids("a", "b", "a")], [5])
    assert request.ledger.committed == [*ids("a", "b"), EOS]
    assert (request.finish_reason, request.stop_reason, request.text.visible) == ("stop", None, "ab")
