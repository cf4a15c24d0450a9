"""Offline throughput: modes x shares of deterministic requests x concurrencies, interleaved and repeated.

Machines drift, so every configuration runs once before any runs again, and those that are compared run side by side:
shares next to one another, at each concurrency of each mode. One engine is loaded at a time, so that the memory of one
is not another's; it serves all cases of its mode in that round. Prefix caching is off, since every case sends the same
prompts.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from llm42 import __version__
from llm42.bench.measure import References, RunResult, result_of, run_requests, run_workload
from llm42.bench.workloads import BenchRequest, Workload, spread
from llm42.config import EngineConfig
from llm42.engine.engine import Engine

_WARM_UP_LEN, _WARM_UP_TOKENS = 16, 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration that is measured."""

    mode: str
    deterministic: float
    """Share of the requests that ask for determinism, 0 to 1."""
    concurrency: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.deterministic:.0%} deterministic, concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Raises:
        ValueError: A field is out of range; the message names the field, its value and what is allowed.
    """

    model: str
    modes: tuple[str, ...] = (EngineConfig.mode,)
    deterministic: tuple[float, ...] = (0.0, 1.0)
    concurrency: tuple[int, ...] = (1, 8, 32, 64)
    repeats: int = 3
    max_batches: int | None = 4
    """The most batches of prompts of one run, so that low concurrencies do not take most of the time: the rate is the
    same. None: all prompts, always."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `EngineConfig`."""

    def __post_init__(self) -> None:
        for name in ("modes", "deterministic", "concurrency"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} is {values}; give at least one value, and each once")
        for share in self.deterministic:
            if not 0 <= share <= 1:
                raise ValueError(f"deterministic is {share}; it is a share of the requests, 0 to 1")
        for name, least in (("concurrency", min(self.concurrency)), ("repeats", self.repeats)):
            if least < 1:
                raise ValueError(f"{name} is {least}; give 1 or more")
        if self.max_batches is not None and self.max_batches < 1:
            raise ValueError(f"max_batches is {self.max_batches}; give 1 or more, or None for all prompts")
        for mode in self.modes:
            self.config(mode)
        if not self.cases:
            raise ValueError("deterministic has no 0, and the mode `off` accepts ordinary requests only; add 0")

    @property
    def cases(self) -> tuple[Case, ...]:
        """All configurations, in the order of one round; the mode `off` has no deterministic requests."""
        return tuple(
            Case(mode, share, concurrency)
            for mode in self.modes
            for concurrency in self.concurrency
            for share in self.deterministic
            if mode != "off" or share == 0
        )

    def config(self, mode: str) -> EngineConfig:
        """The configuration of the engine that serves a mode's cases."""
        most = max(self.concurrency)
        return EngineConfig(
            **{
                "max_num_seqs": max(EngineConfig.max_num_seqs, most),
                "max_queue_len": max(EngineConfig.max_queue_len, most),
                "enable_prefix_caching": False,
                **self.fields,
                "model": self.model,
                "mode": mode,
            }
        )

    def num_requests(self, workload: Workload, concurrency: int) -> int:
        """How many of the workload's requests a run at a concurrency sends."""
        limit = len(workload.requests) if self.max_batches is None else self.max_batches * concurrency
        return min(len(workload.requests), limit)


def run_throughput(
    plan: Plan,
    workload: Workload,
    say: Say = lambda _: None,
    on_round: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all cases of a plan.

    Args:
        plan: What to measure.
        workload: What to run.
        say: Called with a line of progress.
        on_round: Called after each round with the report so far.

    Returns:
        The report, plain data: what was run, and per case its runs and the median, minimum and maximum of each figure.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: A request does not fit the model, or is refused.
        RequestError: A request failed.
    """
    bench = Bench(plan, workload, say)
    for index in range(plan.repeats):
        started = time.perf_counter()
        for mode in plan.modes:
            bench.run_mode(mode, f"round {index + 1}/{plan.repeats}")
        left = (plan.repeats - index - 1) * (time.perf_counter() - started)
        say(f"round {index + 1}/{plan.repeats} done" + (f"; about {left:.0f} s to go" if left else ""))
        on_round(bench.report())
    return bench.report()


class Bench:
    """The runs of a plan so far."""

    def __init__(self, plan: Plan, workload: Workload, say: Say) -> None:
        self.plan = plan
        self.workload = workload
        self.say = say
        self.results: dict[Case, list[RunResult]] = {case: [] for case in plan.cases}
        self.engines: dict[str, dict[str, Any]] = {}
        self._references = References()

    def run_mode(self, mode: str, name: str) -> None:
        """Load the mode's engine, warm it up, run each of its cases once, and drop the engine."""
        started = time.perf_counter()
        engine = Engine(self.plan.config(mode))
        load_s = time.perf_counter() - started
        try:
            self._note(mode, engine, load_s)
            self._warm_up(engine)
            for case in self.plan.cases:
                if case.mode == mode:
                    result = self._run(engine, case)
                    self.results[case].append(result)
                    self.say(f"{name}  {case}: {result.output_tok_s:.1f} output tok/s ({result.wall_s:.1f} s)")
        finally:
            del engine
            gc.collect()

    def report(self) -> dict[str, Any]:
        """All that is known so far, as plain data."""
        return {
            "llm42": __version__,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": _machine(),
            "model": self.plan.model,
            "workload": self.workload.describe(),
            "engines": self.engines,
            "cases": [
                {
                    **asdict(case),
                    "runs": [asdict(run) for run in runs],
                    "summary": summarize(runs),
                    "vs_ordinary": self._vs_ordinary(case),
                }
                for case, runs in self.results.items()
                if runs
            ],
        }

    def _run(self, engine: Engine, case: Case) -> RunResult:
        count = self.plan.num_requests(self.workload, case.concurrency)
        deterministic = spread(case.deterministic, count)
        trace = run_workload(engine, self.workload, count, deterministic, case.concurrency)
        return result_of(trace, engine.system_fingerprint, self._references)

    def _warm_up(self, engine: Engine) -> None:
        """Meet each batch size once, briefly: libraries prepare their kernels at a shape's first use."""
        verifies = any(case.deterministic for case in self.plan.cases if case.mode == engine.config.mode)
        for concurrency in self.plan.concurrency:
            requests = [
                BenchRequest(request.prompt_token_ids[:_WARM_UP_LEN], min(request.max_tokens, _WARM_UP_TOKENS))
                for request in self.workload.requests[:concurrency]
            ]
            flags = spread(0.5 if verifies else 0.0, len(requests))
            run_requests(engine, requests, flags, concurrency, in_batches=True)

    def _note(self, mode: str, engine: Engine, load_s: float) -> None:
        known = self.engines.setdefault(mode, {"load_s": []})
        known["load_s"].append(load_s)
        known["fingerprint"] = engine.system_fingerprint
        known["num_threads"] = engine.num_threads
        known["kernels"] = engine.decoder.kernels.versions()
        known["config"] = engine.config.describe()

    def _vs_ordinary(self, case: Case) -> dict[str, float] | None:
        """Output tok/s relative to no deterministic requests at all, round by round."""
        baseline = self.results.get(Case(case.mode, 0.0, case.concurrency))
        if not baseline or case.deterministic == 0:
            return None
        pairs = zip(self.results[case], baseline, strict=False)  # a round may be half done
        return _summary([run.output_tok_s / other.output_tok_s for run, other in pairs])


def summarize(runs: Sequence[RunResult]) -> dict[str, dict[str, float] | None]:
    """Median, minimum and maximum over the runs of each figure that all of them have; None for the others."""
    summaries: dict[str, dict[str, float] | None] = {}
    for entry in fields(RunResult):
        values = [getattr(run, entry.name) for run in runs]
        summaries[entry.name] = None if None in values else _summary(values)
    return summaries


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor_name() -> str:
    """What the system calls its processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
