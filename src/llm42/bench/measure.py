"""One timed run of requests through an engine, and what it shows.

The clock starts with the first request's entry into the engine and stops with the last token. Times of tokens are
those at which a step made them visible, so they include everything the engine does, and nothing of a front end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from llm42.bench.memory import peak_rss_mib, reset_peak
from llm42.bench.workloads import BenchRequest, Workload
from llm42.engine.core import PassRecord
from llm42.engine.engine import Engine
from llm42.engine.request import Request
from llm42.errors import RequestError
from llm42.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run measured. A latency is None where no request, or no request of that kind, has one."""

    wall_s: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    total_tok_s: float
    """Prompt and output tokens per second."""
    num_passes: int
    canonical_share: float
    """Share of passes that were canonical."""
    step_ms_p50: float
    step_ms_p90: float
    step_ms_p99: float
    prefill_share: float
    """Share of step time, each pass's time divided among its rows: here the rows of prompts."""
    decode_share: float
    """Rows that each gave a new token."""
    verify_share: float
    """Rows that verified candidates."""
    bookkeeping_share: float
    """Share of step time outside the pass itself: planning, commits, stop rules, detokenization."""
    ordinary_ttft_ms_p50: float | None
    """Time to first token, from the entry into the engine, of requests without the deterministic flag."""
    ordinary_ttft_ms_p99: float | None
    ordinary_gap_ms_p50: float | None
    """Time between two arrivals of new tokens of one ordinary request; a step brings it one token."""
    ordinary_gap_ms_p99: float | None
    ordinary_request_tok_s: float | None
    """Output tokens per second of one ordinary request, from entry to end: median over requests."""
    deterministic_ttft_ms_p50: float | None
    deterministic_ttft_ms_p99: float | None
    deterministic_gap_ms_p50: float | None
    """As above; a verified window brings several tokens at once, so gaps are rarer and longer."""
    deterministic_gap_ms_p99: float | None
    deterministic_request_tok_s: float | None
    num_windows: int
    num_rollbacks: int
    num_recomputed_tokens: int
    recomputed_share: float | None
    """Dropped candidates per output token of deterministic requests; None without any."""
    num_preemptions: int
    peak_rss_mib: float | None
    """High-water mark of the process's resident memory during the run; since its start where that cannot be had."""
    ordinary_changed: int
    """Ordinary outputs whose token ids are not those of the first ordinary run of the same prompt."""
    deterministic_changed: int
    """The same for deterministic outputs, under one fingerprint: anything but 0 is a broken promise."""


@dataclass(slots=True)
class Timeline:
    """One request, and when its tokens became visible, in seconds of `time.perf_counter`."""

    request: Request
    submitted: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """The time of each step that brought it new tokens."""

    @property
    def time_to_first_token_s(self) -> float:
        """From entering the engine to the first token."""
        return self.arrivals[0] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        """Between one arrival and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def tok_s(self) -> float:
        """Output tokens per second from entering the engine to the last token."""
        return self.request.ledger.num_committed / max(self.arrivals[-1] - self.submitted, 1e-9)


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything a run left behind: requests in the order of the workload, and passes in the order of time."""

    timelines: list[Timeline]
    passes: list[PassRecord]
    wall_s: float
    peak_rss_mib: float | None


class References:
    """The first output of each prompt, ordinary and deterministic, to which later ones are compared."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, bool, tuple[int, ...]], list[int]] = {}

    def num_changed(self, fingerprint: str, timelines: Sequence[Timeline], *, deterministic: bool) -> int:
        """How many outputs of that kind differ from the first one of the same prompt under the same contract."""
        changed = 0
        for timeline in timelines:
            spec = timeline.request.spec
            if spec.params.deterministic == deterministic:
                output = timeline.request.ledger.committed
                changed += output != self._outputs.setdefault(
                    (fingerprint, deterministic, spec.prompt_token_ids), output
                )
        return changed


def run_requests(
    engine: Engine,
    requests: Sequence[BenchRequest],
    deterministic: Sequence[bool],
    concurrency: int,
    *,
    in_batches: bool,
) -> Trace:
    """Generate for all requests, at most ``concurrency`` of them in the engine at once.

    Args:
        engine: An idle engine that may run so many requests together.
        requests: What to generate, in this order.
        deterministic: Which of them ask for determinism.
        concurrency: Requests in the engine at once.
        in_batches: See `Workload`.

    Raises:
        ValueError: The engine refuses a request; nothing was generated.
        RequestError: A request failed while running.
    """
    timelines = [Timeline(_make_request(engine, *pair)) for pair in zip(requests, deterministic, strict=True)]
    core, passes = engine.core, list[PassRecord]()
    engine.pin_threads()
    core.observer = passes.append
    reset_peak()
    started = time.perf_counter()
    try:
        _drive(engine, deque(timelines), concurrency, in_batches=in_batches)
    finally:
        core.observer = None
        for timeline in timelines:
            core.cancel(timeline.request)
    wall_s = time.perf_counter() - started
    for timeline in timelines:
        if timeline.request.error is not None or not timeline.arrivals:
            raise RequestError(f"a request of the benchmark failed: {timeline.request.error or 'it gave no token'}")
    return Trace(timelines, passes, wall_s, peak_rss_mib())


def run_workload(
    engine: Engine, workload: Workload, num_requests: int, deterministic: Sequence[bool], concurrency: int
) -> Trace:
    """The first ``num_requests`` requests of a workload through an engine; see `run_requests`."""
    requests = workload.requests[:num_requests]
    return run_requests(engine, requests, deterministic, concurrency, in_batches=workload.in_batches)


def result_of(trace: Trace, fingerprint: str, references: References) -> RunResult:
    """The figures of a run; its outputs are compared with the references, or become them."""
    timelines, passes = trace.timelines, trace.passes
    ordinary = [timeline for timeline in timelines if not timeline.request.params.deterministic]
    deterministic = [timeline for timeline in timelines if timeline.request.params.deterministic]
    prompt_tokens = sum(timeline.request.ledger.prompt_len for timeline in timelines)
    output_tokens = sum(timeline.request.ledger.num_committed for timeline in timelines)
    num_verified = sum(timeline.request.ledger.num_committed for timeline in deterministic)
    stats = [timeline.request.stats for timeline in timelines]
    recomputed = sum(stat.num_recomputed_tokens for stat in stats)
    steps = [_step_s(record) for record in passes]
    p50, p90, p99 = (1e3 * percentile(steps, q) for q in (50, 90, 99))
    prefill, decode, verify, bookkeeping = _shares(passes)
    return RunResult(
        wall_s=trace.wall_s,
        num_requests=len(timelines),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / trace.wall_s,
        total_tok_s=(prompt_tokens + output_tokens) / trace.wall_s,
        num_passes=len(passes),
        canonical_share=sum(record.is_canonical for record in passes) / len(passes),
        step_ms_p50=p50,
        step_ms_p90=p90,
        step_ms_p99=p99,
        prefill_share=prefill,
        decode_share=decode,
        verify_share=verify,
        bookkeeping_share=bookkeeping,
        **_latencies("ordinary", ordinary),
        **_latencies("deterministic", deterministic),
        num_windows=sum(stat.num_windows for stat in stats),
        num_rollbacks=sum(stat.num_rollbacks for stat in stats),
        num_recomputed_tokens=recomputed,
        recomputed_share=recomputed / num_verified if num_verified else None,
        num_preemptions=sum(stat.num_preemptions for stat in stats),
        peak_rss_mib=trace.peak_rss_mib,
        ordinary_changed=references.num_changed(fingerprint, timelines, deterministic=False),
        deterministic_changed=references.num_changed(fingerprint, timelines, deterministic=True),
    )


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 to 100, by linear interpolation; ``values`` must not be empty."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def _make_request(engine: Engine, request: BenchRequest, deterministic: bool) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, seed=0, deterministic=deterministic
    )
    return engine.make_requests({"prompt_token_ids": request.prompt_token_ids}, params).sequences[0]


def _drive(engine: Engine, queue: deque[Timeline], concurrency: int, *, in_batches: bool) -> None:
    core, running = engine.core, dict[int, Timeline]()
    while queue or core.has_work:
        while queue and len(running) < concurrency:
            timeline = queue.popleft()
            timeline.submitted = time.perf_counter()
            core.add([timeline.request])
            running[id(timeline.request)] = timeline
        while core.has_work:
            changed = core.step()
            now = time.perf_counter()
            for request in changed:
                running[id(request)].arrivals.append(now)
                if request.is_finished:
                    del running[id(request)]
            if not in_batches and len(running) < concurrency:
                break


def _step_s(record: PassRecord) -> float:
    return record.plan_s + record.execute_s + record.apply_s


def _shares(passes: Sequence[PassRecord]) -> tuple[float, float, float, float]:
    """Shares of step time: of prompt, decode and window rows, and of what is not the pass itself."""
    by_kind, bookkeeping, total = [0.0, 0.0, 0.0], 0.0, 0.0
    for record in passes:
        rows = (record.prompt_rows, record.decode_rows, record.window_rows)
        step_s = _step_s(record)
        for kind, count in enumerate(rows):
            by_kind[kind] += step_s * count / max(1, sum(rows))
        bookkeeping += record.plan_s + record.apply_s
        total += step_s
    prefill, decode, verify = (seconds / total for seconds in by_kind)
    return prefill, decode, verify, bookkeeping / total


def _latencies(kind: str, timelines: Sequence[Timeline]) -> dict[str, float | None]:
    first_tokens = [timeline.time_to_first_token_s for timeline in timelines]
    gaps = [gap for timeline in timelines for gap in timeline.gaps_s]
    rates = [timeline.tok_s for timeline in timelines]

    def at(values: list[float], q: float, factor: float = 1e3) -> float | None:
        return factor * percentile(values, q) if values else None

    return {
        f"{kind}_ttft_ms_p50": at(first_tokens, 50),
        f"{kind}_ttft_ms_p99": at(first_tokens, 99),
        f"{kind}_gap_ms_p50": at(gaps, 50),
        f"{kind}_gap_ms_p99": at(gaps, 99),
        f"{kind}_request_tok_s": at(rates, 50, 1.0),
    }
