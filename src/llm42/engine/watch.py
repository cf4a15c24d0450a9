"""Watching what happens to the tokens of one request: drafted, committed, rolled back.

Invariant: events are derived from the ledger alone, by comparing it with what it was at the last look; nothing in the
engine knows that it is watched.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm42.engine.request import Request


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What changed for one output between two looks."""

    choice: int
    """Index of the output among the n of its request."""
    position: int
    """Committed output tokens before this event."""
    committed: tuple[int, ...]
    """Token ids committed since the last event."""
    candidates: tuple[int, ...]
    """All candidates that are outstanding now."""
    rolled_back: tuple[int, ...]
    """Candidates of the last event that were dropped."""
    finished: bool
    """Whether the output has ended; no event follows."""


class TokenWatch:
    """Compares one sequence with what it was when last looked at."""

    def __init__(self, sequence: Request) -> None:
        self.sequence = sequence
        self._num_committed = 0
        self._tokens: list[int] = []
        self._has_ended = False

    def look(self) -> TokenEvent | None:
        """What changed since the last look; None if nothing did."""
        ledger = self.sequence.ledger
        tokens = ledger.token_ids[ledger.prompt_len :]
        num_before, before = self._num_committed, self._tokens
        num_kept = num_before
        while num_kept < min(len(before), len(tokens)) and before[num_kept] == tokens[num_kept]:
            num_kept += 1
        if self._has_ended or (
            num_kept == len(before) == len(tokens)
            and ledger.num_committed == num_before
            and not self.sequence.is_finished
        ):
            return None
        self._num_committed, self._tokens = ledger.num_committed, tokens
        self._has_ended = self.sequence.is_finished
        return TokenEvent(
            choice=self.sequence.spec.index,
            position=num_before,
            committed=tuple(tokens[num_before : ledger.num_committed]),
            candidates=tuple(tokens[ledger.num_committed :]),
            rolled_back=tuple(before[num_kept:]),
            finished=self._has_ended,
        )
