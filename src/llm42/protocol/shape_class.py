"""A shape class: the row counts at which every kernel gives a row the same bits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

VERIFICATION_ROWS = 64
"""Rows of a pass that verifies several windows: enough for matrix units, and few enough for neighbours to wait."""


class ShapeClass:
    """Row counts of canonical passes.

    Args:
        row_counts: At least one positive count, in any order.
    """

    __slots__ = ("row_counts",)

    def __init__(self, row_counts: Iterable[int]) -> None:
        self.row_counts = tuple(sorted(set(row_counts)))
        if not self.row_counts or self.row_counts[0] < 1:
            raise ValueError(f"a shape class needs positive row counts, not {self.row_counts}")

    @property
    def largest(self) -> int:
        """The most rows that a pass of this class has."""
        return self.row_counts[-1]

    @property
    def usual(self) -> int:
        """The count where one is to serve for everything: the smallest that holds a verification, or the largest."""
        return self.pad(min(VERIFICATION_ROWS, self.largest))

    def pad(self, rows: int) -> int:
        """The smallest count of the class that holds ``rows``.

        Raises:
            ValueError: It has none.
        """
        index = bisect_left(self.row_counts, rows)
        if index == len(self.row_counts):
            raise ValueError(f"{rows} rows do not fit a class whose largest count is {self.largest}")
        return self.row_counts[index]

    def __contains__(self, rows: int) -> bool:
        return rows in self.row_counts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeClass) and self.row_counts == other.row_counts

    def __hash__(self) -> int:
        return hash(self.row_counts)

    def __repr__(self) -> str:
        return f"ShapeClass({describe_counts(self.row_counts)})"


def describe_counts(counts: Iterable[int]) -> str:
    """Counts as runs of equal steps: ``1-16, 18-64 by 2``."""
    runs: list[list[int]] = []
    for count in sorted(counts):
        last = runs[-1] if runs else []
        if len(last) == 1 or (len(last) > 1 and count - last[-1] == last[1] - last[0]):
            last.append(count)
        elif len(last) == 2:
            # Two counts are no run yet: the second may begin one.
            runs.append([last.pop(), count])
        else:
            runs.append([count])
    parts: list[str] = []
    for run in runs:
        step = run[1] - run[0] if len(run) > 1 else 1
        if len(run) < 3:
            parts.extend(str(count) for count in run)
        else:
            parts.append(f"{run[0]}-{run[-1]}" + (f" by {step}" if step > 1 else ""))
    return ", ".join(parts)
