"""What a watcher of tokens is told, from the ledger alone."""

from __future__ import annotations

from types import SimpleNamespace

from llm42.engine.watch import TokenWatch
from llm42.protocol import Ledger


def watched():
    """A deterministic sequence with one committed token, and its watch."""
    ledger = Ledger([9, 9], deterministic=True)
    ledger.advance(range(2), [5])
    sequence = SimpleNamespace(ledger=ledger, is_finished=False, spec=SimpleNamespace(index=0))
    return sequence, TokenWatch(sequence)


def test_the_first_look_tells_everything_and_the_next_nothing():
    _, watch = watched()
    event = watch.look()
    assert (event.position, event.committed, event.candidates, event.rolled_back) == (0, (5,), (), ())
    assert watch.look() is None


def test_candidates_are_told_whole_and_a_match_commits_them():
    sequence, watch = watched()
    watch.look()
    for token in (6, 7):
        sequence.ledger.draft(token)
    event = watch.look()
    assert (event.committed, event.candidates) == ((), (6, 7))
    sequence.ledger.advance(range(2, 5), [6, 7, 8])
    event = watch.look()
    assert (event.position, event.committed, event.candidates, event.rolled_back) == (1, (6, 7, 8), (), ())


def test_a_mismatch_tells_which_candidates_were_rolled_back():
    sequence, watch = watched()
    for token in (6, 7, 8):
        sequence.ledger.draft(token)
    watch.look()
    sequence.ledger.advance(range(2, 6), [6, 1, 2, 3])
    event = watch.look()
    assert (event.committed, event.candidates, event.rolled_back) == ((6, 1), (), (7, 8))


def test_a_rollback_to_as_many_tokens_is_not_missed():
    sequence, watch = watched()
    sequence.ledger.draft(6)
    watch.look()
    sequence.ledger.advance(range(2, 3), [7])
    event = watch.look()
    assert (event.committed, event.rolled_back) == ((7,), (6,))


def test_the_end_is_told_once_with_what_it_dropped():
    sequence, watch = watched()
    for token in (6, 7):
        sequence.ledger.draft(token)
    watch.look()
    sequence.ledger.truncate(1)
    sequence.is_finished = True
    event = watch.look()
    assert event.finished
    assert (event.candidates, event.rolled_back) == ((), (6, 7))
    assert watch.look() is None
