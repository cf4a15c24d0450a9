"""What the demo says about its numbers: comparing answers bit for bit, and showing the result. Pure functions.

Two answers are the same only if their token ids and every bit of their log-probabilities are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm42 import RequestOutput


@dataclass(frozen=True, slots=True)
class Answer:
    """One output in a form that compares bit for bit.

    `logprobs` holds, for each token, the sorted (token id, log-probability as the bytes of a double) of its entries.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[tuple[int, bytes], ...], ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """One way of running the prompts: the answers to the measured ones, and the cost of all that ran."""

    answers: tuple[Answer, ...]
    num_tokens: int
    seconds: float
    num_windows: int
    num_rollbacks: int
    num_recomputed_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prompts included."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured prompts alone and in the batch, for one kind of request."""

    alone: Phase
    batch: Phase

    @property
    def num_prompts(self) -> int:
        """Number of compared prompts."""
        return len(self.alone.answers)

    @property
    def num_changed(self) -> int:
        """Prompts whose tokens differ between alone and batch."""
        return len(self.differences())

    @property
    def num_logprobs_changed(self) -> int:
        """Prompts of which any bit of the log-probabilities or any token differs between alone and batch."""
        return sum(a.logprobs != b.logprobs or a.token_ids != b.token_ids for a, b in self._pairs())

    @property
    def is_identical(self) -> bool:
        """Whether every answer exists and is the same bit for bit; empty answers prove nothing."""
        pairs = self._pairs()
        return bool(pairs) and all(a.token_ids and a.logprobs and a == b for a, b in pairs)

    def differences(self) -> dict[int, int]:
        """Index of each prompt whose tokens differ -> index of its first different token."""
        found = {i: first_difference(a.token_ids, b.token_ids) for i, (a, b) in enumerate(self._pairs())}
        return {i: position for i, position in found.items() if position is not None}

    def _pairs(self) -> list[tuple[Answer, Answer]]:
        return list(zip(self.alone.answers, self.batch.answers, strict=True))


def answer_of(output: RequestOutput) -> Answer:
    """The first completion of a request."""
    completion = output.outputs[0]
    logprobs = tuple(
        tuple(sorted((token_id, struct.pack("<d", entry.logprob)) for token_id, entry in entries.items()))
        for entries in completion.logprobs or ()
    )
    return Answer(tuple(completion.token_ids), completion.text, logprobs)


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first place where the sequences differ (the shorter one's length if it is a prefix), or None."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def most_visible(differences: dict[int, int]) -> int:
    """The prompt to show: the earliest difference after at least one common token, so that most of the text differs."""
    return min(differences, key=lambda i: (differences[i] == 0, differences[i], i))


def split_texts(a: str, b: str) -> tuple[str, str, str]:
    """The common beginning of two texts and their two different ends; a word is not cut in two."""
    length = first_difference(a, b)
    if length is None or length in {len(a), len(b)}:
        cut = min(len(a), len(b))
    else:
        word = next((i for i in range(length, 0, -1) if a[i - 1].isspace()), 0)
        cut = word or length
    return a[:cut], a[cut:], b[cut:]


def difference_view(prompt: str, comparison: Comparison, index: int) -> Table:
    """The two answers to one prompt above one another: the common part dim, what differs in red and green.

    A mark stands where they part, so that the place is visible without colour too.
    """
    alone, batch = comparison.alone.answers[index], comparison.batch.answers[index]
    position = comparison.differences()[index]
    common, alone_end, batch_end = split_texts(alone.text, batch.text)
    view = Table.grid(padding=(0, 2))
    view.add_row(Text("prompt", style="bold"), Text(prompt))
    view.add_row(Text("alone", style="bold"), Text.assemble((common, "dim"), ("▸", "bold"), (alone_end, "red")))
    view.add_row(Text("in batch", style="bold"), Text.assemble((common, "dim"), ("▸", "bold"), (batch_end, "green")))
    view.add_row("", Text(f"the first different token is number {position + 1}", style="italic"))
    return view


def report_table(title: str, ordinary: Comparison, deterministic: Comparison, batch: int) -> Table:
    """The numbers of both kinds of request side by side."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("ordinary", justify="right")
    table.add_column("deterministic", justify="right")
    for name, one, other in _rows(ordinary, deterministic, batch):
        table.add_row(name, one, other)
    return table


def _rows(ordinary: Comparison, deterministic: Comparison, batch: int) -> list[tuple[str, str, str]]:
    both = (ordinary, deterministic)

    def row(name: str, values: list[str]) -> tuple[str, str, str]:
        return name, values[0], values[1]

    def total(comparison: Comparison, field: str) -> int:
        return int(getattr(comparison.alone, field) + getattr(comparison.batch, field))

    def share(comparison: Comparison) -> str:
        recomputed = total(comparison, "num_recomputed_tokens")
        return f"{recomputed} ({recomputed / total(comparison, 'num_tokens'):.1%})"

    return [
        row("prompts whose text changed", [f"{c.num_changed} of {c.num_prompts}" for c in both]),
        row("prompts whose log-probabilities changed", [f"{c.num_logprobs_changed} of {c.num_prompts}" for c in both]),
        row("verified windows", [str(total(c, "num_windows")) for c in both]),
        row("rollbacks", [str(total(c, "num_rollbacks")) for c in both]),
        row("recomputed tokens (of all output tokens)", [share(c) for c in both]),
        row("output tokens/s, one at a time", [f"{c.alone.tokens_per_s:.1f}" for c in both]),
        row(f"output tokens/s, batch of {batch}", [f"{c.batch.tokens_per_s:.1f}" for c in both]),
    ]
