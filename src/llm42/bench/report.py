"""Tables of a throughput report. Everything they show is read from the report, so its JSON says at least as much."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from llm42.bench.serving import summarize_serving

Cells = Callable[[Mapping[str, Any]], str]
_NONE = "-"
_BAR = 40


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Speed and memory, then times and verification: a row per case, in the report's order."""
    workload = report["workload"]
    about = f"{report['model']}, workload {workload['name']}, {report['machine']['processor']}"
    return [
        _table(
            f"Speed: {about}",
            "Median (min-max) of the runs. prefill/decode/verify: shares of step time, by rows; vs ordinary: output "
            "tok/s relative to 0 % deterministic, round by round.",
            _SPEED,
            report,
        ),
        _table(
            f"Times and verification: {about}",
            "Medians of the runs; times in ms, P50/P99 within a run. overhead: step time outside the pass itself. "
            "first token, gap, and tok/s of one request: of ordinary requests, or of deterministic ones where all are. "
            "changed: outputs unlike the first run's, ordinary/deterministic.",
            _TIMES,
            report,
        ),
    ]


def steps_table(report: Mapping[str, Any]) -> Table:
    """Milliseconds of decode steps with a bar each, and their ratio to the time of reading the weights."""
    stream = statistics.median(report["stream_ms"])
    table = Table(
        title=f"Decode step; reading {report['weight_bytes'] / 1e6:.0f} MB of weights once takes {stream:.1f} ms",
        caption="Median (min-max) of the rounds.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("rows", "context", "ms", "of reading weights", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    medians = [statistics.median(step["ms"]) for step in report["steps"]]
    for step, median in zip(report["steps"], medians, strict=True):
        times = {"median": median, "min": min(step["ms"]), "max": max(step["ms"])}
        bar = "█" * max(1, round(_BAR * median / max(medians)))
        table.add_row(str(step["rows"]), str(step["context"]), spread_text(times, 1), f"{median / stream:.2f}", bar)
    return table


def serving_table(report: Mapping[str, Any]) -> Table:
    """Throughput and time to first token through a server, beside the same requests without one."""
    table = Table(
        title="The server against the engine alone",
        caption="Medians of the rounds, of ratios and differences round by round. first token: at the client.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("clients", "way", "output tok/s", "vs offline", "first token ms", "added ms"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in summarize_serving(report):
        # Of an answer in one piece, the first token comes with the last.
        first, added = (
            (_NONE, _NONE) if row["way"] == "whole" else (f"{row['ttft_ms']:.1f}", f"{row['added_ttft_ms']:.1f}")
        )
        cells = (f"{row['tok_s']:.1f}", f"{row['vs_offline']:.2f}", first, added)
        table.add_row(str(row["concurrency"]), row["way"], *cells)
    return table


def spread_text(summary: Mapping[str, float] | None, digits: int | None = None) -> str:
    """Median and range, as ``12.0 (11.5-12.6)``; the range only where there is one.

    By default one digit after the point, and none from 100 on.
    """
    if summary is None:
        return _NONE
    if digits is None:
        digits = 0 if summary["median"] >= 100 else 1
    middle = f"{summary['median']:.{digits}f}"
    if summary["min"] == summary["max"]:
        return middle
    return f"{middle} ({summary['min']:.{digits}f}-{summary['max']:.{digits}f})"


def _table(title: str, caption: str, columns: Mapping[str, Cells], report: Mapping[str, Any]) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        # A narrow terminal folds a cell; a figure that is cut off would be another figure.
        table.add_column(name, justify="left" if name == "mode" else "right", overflow="fold")
    previous = None
    for case in report["cases"]:
        if previous is not None and (case["mode"], case["concurrency"]) != previous:
            table.add_section()
        previous = (case["mode"], case["concurrency"])
        table.add_row(*(cells(case) for cells in columns.values()))
    return table


def _median(case: Mapping[str, Any], name: str, digits: int = 0, factor: float = 1.0) -> str:
    summary = case["summary"][name]
    return _NONE if summary is None else f"{summary['median'] * factor:.{digits}f}"


def _medians(case: Mapping[str, Any], *names: str, digits: int = 0, factor: float = 1.0) -> str:
    parts = [_median(case, name, digits, factor) for name in names]
    return _NONE if all(part == _NONE for part in parts) else "/".join(parts)


def _of_a_kind(case: Mapping[str, Any], *names: str) -> str:
    """Figures of the ordinary requests, or of the deterministic ones where there are no others."""
    kind = "deterministic" if case["deterministic"] == 1 else "ordinary"
    return _medians(case, *(f"{kind}_{name}" for name in names), digits=1)


_CASE: dict[str, Cells] = {
    "mode": lambda case: str(case["mode"]),
    "det. %": lambda case: f"{100 * case['deterministic']:g}",
    "conc.": lambda case: str(case["concurrency"]),
}
_SPEED: dict[str, Cells] = {
    **_CASE,
    "output tok/s": lambda case: spread_text(case["summary"]["output_tok_s"]),
    "vs ordinary": lambda case: spread_text(case["vs_ordinary"], 2),
    "total tok/s": lambda case: spread_text(case["summary"]["total_tok_s"]),
    "prefill / decode / verify %": lambda case: _medians(
        case, "prefill_share", "decode_share", "verify_share", factor=100.0
    ),
    "peak RSS MiB": lambda case: _median(case, "peak_rss_mib"),
}
_TIMES: dict[str, Cells] = {
    **_CASE,
    "step": lambda case: _medians(case, "step_ms_p50", "step_ms_p99", digits=1),
    "overhead %": lambda case: _median(case, "bookkeeping_share", 1, 100.0),
    "first token": lambda case: _of_a_kind(case, "ttft_ms_p50", "ttft_ms_p99"),
    "gap": lambda case: _of_a_kind(case, "gap_ms_p50", "gap_ms_p99"),
    "tok/s of one": lambda case: _of_a_kind(case, "request_tok_s"),
    "rollbacks": lambda case: _median(case, "num_rollbacks"),
    "recomputed %": lambda case: _median(case, "recomputed_share", 1, 100.0),
    "changed": lambda case: f"{_worst(case, 'ordinary_changed')}/{_worst(case, 'deterministic_changed')}",
}


def _worst(case: Mapping[str, Any], name: str) -> int:
    """The largest of the runs: one changed output in one of them must not hide behind a median."""
    return int(case["summary"][name]["max"])
