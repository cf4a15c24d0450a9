"""What passes cost, and which window and group sizes follow from it.

Invariant: only times are decided here. Window boundaries and row counts within the class change no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm42.protocol import GroupingPolicy, ShapeClass

_DECAY = 0.98
_WINDOWS = (2, 4, 8, 16, 32, 64)
_PRIOR_ROWS = 500.0
_PRIOR_FLIPS = 0.5


class PassCosts:
    """Time of a pass as ``overhead + rows * per_row``, by least squares over recent passes.

    Args:
        prior: Pairs of row count and seconds to start from.
    """

    def __init__(self, prior: dict[int, float] | None = None) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        for rows, seconds in (prior or {1: 1.0, 64: 4.0}).items():
            self.observe(rows, seconds)

    def observe(self, rows: int, seconds: float) -> None:
        """Take a pass into account."""
        for name, value in (
            ("_weight", 1.0),
            ("_rows", rows),
            ("_seconds", seconds),
            ("_squares", rows * rows),
            ("_products", rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * _DECAY + value)

    @property
    def overhead_rows(self) -> float:
        """How many more rows cost as much as having a pass at all."""
        variance = self._squares * self._weight - self._rows * self._rows
        covariance = self._products * self._weight - self._rows * self._seconds
        if variance <= 1e-9 * self._squares * self._weight or covariance <= 0.0:
            return 16.0
        per_row = covariance / variance
        return min(256.0, max(0.0, (self._seconds - per_row * self._rows) / self._weight / per_row))


@dataclass(slots=True)
class FlipRate:
    """How often a verified candidate was wrong, with a prior of one in a thousand."""

    verified: float = _PRIOR_ROWS
    wrong: float = _PRIOR_FLIPS

    def observe(self, verified: int, *, is_rollback: bool) -> None:
        """Take a verified window into account."""
        self.verified += verified
        self.wrong += is_rollback

    @property
    def value(self) -> float:
        """Flips per verified candidate."""
        return self.wrong / self.verified


def choose_policy(
    costs: PassCosts,
    flips: FlipRate,
    *,
    num_deterministic: int,
    num_ordinary: int,
    max_rows: int,
    window_size: int | None,
    group_size: int | None,
    canonical: ShapeClass | None = None,
) -> GroupingPolicy:
    """The window and group size with the most tokens per time, for a load as it is now.

    The cycle that is compared: W - 1 fast passes in which everybody drafts, then verification of all windows, as many
    in one pass as fit beside the ordinary requests' rows, and padded to the class. A window commits its tokens up to
    the first flip, and the correction. (A verification commits a token of its own, so without padding nothing is
    gained by large windows: their rows are run twice.)

    Args:
        costs: Measured costs of passes.
        flips: Measured rate of wrong candidates.
        num_deterministic: Deterministic requests that decode.
        num_ordinary: Ordinary requests that decode.
        max_rows: Rows of a canonical pass, at most.
        window_size: W, if it is set by hand.
        group_size: G, if it is set by hand.
        canonical: The row counts that canonical passes are padded to; by default to none.
    """
    sizes = [size for size in _WINDOWS if size <= max(2, max_rows)] if window_size is None else [window_size]
    overhead = costs.overhead_rows
    drafting = max(1, num_deterministic)
    best = (0.0, sizes[0], 1)
    for size in sizes:
        room = max(1, (max_rows - min(num_ordinary, max_rows // 2)) // size)
        group = min(drafting, room) if group_size is None else group_size
        passes = -(-drafting // min(group, room))
        windows = min(max_rows, -(-drafting // passes) * size)
        riders = min(num_ordinary, max_rows - windows)
        rows = windows + riders if canonical is None else canonical.pad(windows + riders)
        time = (size - 1 + passes) * overhead + (size - 1) * (drafting + num_ordinary) + passes * rows
        committed = sum((1.0 - flips.value) ** matched for matched in range(size))
        tokens = drafting * committed + (size - 1) * num_ordinary + passes * riders
        best = max(best, (tokens / time, size, group))
    return GroupingPolicy(best[1], best[2])
