"""Tables from result files: speeds, ratios to the better peer, and how many outputs changed. Needs rich only."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

OURS = "llm42"
"""Engines whose name begins so are compared with the others, the peers."""
_NONE = "-"


@dataclass(slots=True)
class Rounds:
    """The results of one engine, one per round, and why there are no more, if it failed."""

    engine: str
    results: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is llm42 in one of its settings."""
        return self.engine.startswith(OURS)

    @property
    def label(self) -> str:
        """The name in a table, which says so where rounds are missing."""
        return self.engine if self.failure is None else f"{self.engine} (FAILED)"

    def rates(self, run: str, what: str = "output_tokens") -> list[float]:
        """Tokens per second of a run, round by round."""
        runs = [result["runs"][run] for result in self.results if run in result["runs"]]
        return [one[what] / one["wall_s"] for one in runs]

    def facts(self, name: str) -> list[float]:
        """A number that each result has once, where it is known."""
        return [result[name] for result in self.results if result[name] is not None]

    def runs(self) -> list[str]:
        """Names of all runs, in the order in which they were measured."""
        return list(dict.fromkeys(name for result in self.results for name in result["runs"]))


def load_rounds(directory: Path) -> list[Rounds]:
    """All results of a directory, in the order in which the engines were asked for."""
    plan = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    found = []
    for engine in plan["engines"]:
        files = sorted(directory.glob(f"{engine}-round[0-9]*.json"), key=lambda path: (len(path.name), path.name))
        results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        found.append(Rounds(engine, results, plan["failures"].get(engine)))
    return found


def changed_between_levels(rounds: Rounds) -> tuple[int, int]:
    """Prompts whose output is not the same at every concurrency, and prompts that were run at more than one."""
    outputs: dict[int, list[list[int]]] = {}
    for name in rounds.runs():
        if _is_level(name):
            for index, output in enumerate(_longest(rounds, name)):
                outputs.setdefault(index, []).append(output)
    compared = [found for found in outputs.values() if len(found) > 1]
    return sum(any(output != found[0] for output in found) for found in compared), len(compared)


def changed_between_rounds(rounds: Rounds) -> tuple[int, int]:
    """Outputs of later rounds, in a fresh process, that differ from the first round's of the same run; and how many."""
    changed = compared = 0
    for name in rounds.runs():
        seen: dict[int, list[int]] = {}
        for result in rounds.results:
            for index, output in enumerate(result["outputs"].get(name, [])):
                compared += index in seen
                changed += seen.setdefault(index, output) != output
    return changed, compared


def tables(all_rounds: Sequence[Rounds]) -> list[Table]:
    """Output tok/s by concurrency, then prefill, start, memory and outputs; with ratios to the better peer."""
    names = list(dict.fromkeys(name for rounds in all_rounds for name in rounds.runs()))
    speed = [name for name in names if _is_level(name) or name == "mixed"]
    prefill = [name for name in names if name.startswith("prefill")]
    return [_speed_table(all_rounds, speed), _facts_table(all_rounds, prefill)]


def failures(all_rounds: Iterable[Rounds]) -> list[str]:
    """What to print below the tables."""
    return [f"{rounds.engine}: {rounds.failure}" for rounds in all_rounds if rounds.failure is not None]


def ratio(ours: Rounds, all_rounds: Iterable[Rounds], run: str, what: str = "output_tokens") -> float | None:
    """Our median of a run divided by the better peer's median; None where one of them is missing."""
    peers = [statistics.median(rates) for peer in all_rounds if not peer.is_ours and (rates := peer.rates(run, what))]
    rates = ours.rates(run, what)
    return statistics.median(rates) / max(peers) if rates and peers else None


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median and range, as ``12 (11-13)``."""
    if not values:
        return _NONE
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _speed_table(all_rounds: Sequence[Rounds], names: Sequence[str]) -> Table:
    table = Table(
        title="Output tok/s, prefill included",
        caption="Median (min-max) of the rounds. cN: batches of N.",
        title_justify="left",
        caption_justify="left",
        title_style="bold",
    )
    for name in ("engine", "rounds", *names):
        table.add_column(name, justify="left" if name == "engine" else "right", overflow="fold")
    for rounds in all_rounds:
        table.add_row(rounds.label, str(len(rounds.results)), *(spread(rounds.rates(name)) for name in names))
    _add_ratios(table, all_rounds, [(name, "output_tokens") for name in names], skipped=1)
    return table


def _facts_table(all_rounds: Sequence[Rounds], prefill: Sequence[str]) -> Table:
    table = Table(
        title="Prefill tok/s, start, memory, and greedy outputs that changed",
        caption="changed, levels: prompts whose output depends on the concurrency; again: outputs that another process "
        "did not repeat.",
        title_justify="left",
        caption_justify="left",
        title_style="bold",
    )
    for name in ("engine", *(_prefill_label(name) for name in prefill), "first token s", "peak RSS MiB"):
        table.add_column(name, justify="left" if name == "engine" else "right", overflow="fold")
    for name in ("changed, levels", "again", "version"):
        table.add_column(name, justify="left" if name == "version" else "right", overflow="fold")
    for rounds in all_rounds:
        table.add_row(
            rounds.label,
            *(spread(rounds.rates(name, "prompt_tokens")) for name in prefill),
            spread(rounds.facts("startup_s"), 1),
            spread(rounds.facts("peak_rss_mib")),
            _share(*changed_between_levels(rounds)),
            _share(*changed_between_rounds(rounds)),
            rounds.results[0]["version"].partition("-")[0] if rounds.results else _NONE,
        )
    _add_ratios(table, all_rounds, [(name, "prompt_tokens") for name in prefill], skipped=0)
    return table


def _add_ratios(table: Table, all_rounds: Sequence[Rounds], runs: Sequence[tuple[str, str]], skipped: int) -> None:
    """A row for each of our engines, below a line; ``skipped`` columns stand before the first ratio."""
    table.add_section()
    for ours in all_rounds:
        values = [ratio(ours, all_rounds, name, what) for name, what in runs]
        if ours.is_ours and any(value is not None for value in values):
            cells = (_NONE if value is None else f"{value:.2f}" for value in values)
            table.add_row(f"{ours.engine} / better peer", *[""] * skipped, *cells)


def _longest(rounds: Rounds, run: str) -> list[list[int]]:
    """The outputs of the round that ran most prompts; the first one of equals."""
    return max((result["outputs"].get(run, []) for result in rounds.results), key=len)


def _is_level(run: str) -> bool:
    return run[:1] == "c" and run[1:].isdigit()


def _prefill_label(run: str) -> str:
    return "long prompts" if run == "prefill_long" else f"prefill {run.removeprefix('prefill_')}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else _NONE
