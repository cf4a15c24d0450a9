"""When to verify: which requests are ready, and when a group of windows is launched.

Only latency and throughput depend on these rules; outputs do not, because window boundaries do not change bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowState:
    """What grouping may know of one deterministic request that decodes."""

    num_candidates: int
    is_finished: bool
    """Whether the newest candidate would end the request, so that drafting on is pointless."""
    steps_drafting: int
    """Engine steps since its oldest candidate was drafted; 0 without a candidate."""
    steps_ready: int
    """Engine steps since it became ready; 0 while it is not."""


@dataclass(frozen=True, slots=True)
class GroupingPolicy:
    """The rules, with all times in engine steps.

    Args:
        window_size: W, the most rows of one window.
        group_size: G, the most windows of one pass.
    """

    window_size: int
    group_size: int

    @property
    def max_candidates(self) -> int:
        """No request has more outstanding candidates than this."""
        return 2 * self.window_size

    @property
    def max_steps_drafting(self) -> int:
        """A request with candidates is ready after this many steps, however few they are."""
        return 2 * self.window_size

    @property
    def max_steps_ready(self) -> int:
        """A ready request waits at most this long for its group to fill."""
        return max(1, self.window_size // 4)

    def can_draft(self, state: WindowState) -> bool:
        """Whether one more candidate may be drafted."""
        return not state.is_finished and state.num_candidates < self.max_candidates

    def is_ready(self, state: WindowState) -> bool:
        """Whether the request's window is worth a verification."""
        return state.num_candidates > 0 and (
            state.num_candidates >= self.window_size - 1
            or state.is_finished
            or state.steps_drafting >= self.max_steps_drafting
        )

    def should_launch(self, states: Sequence[WindowState], max_rows: int) -> bool:
        """Whether to verify now, given all decoding deterministic requests and the rows a pass has."""
        ready = [state for state in states if self.is_ready(state)]
        if not ready:
            return False
        rows = sum(min(self.window_size, state.num_candidates + 1) for state in ready)
        return (
            len(ready) >= min(self.group_size, len(states))
            or rows >= max_rows
            or max(state.steps_ready for state in ready) >= self.max_steps_ready
        )
