"""The step loop: plan a pass, execute it, apply what it gave. One thread, no waiting.

Invariant: whatever happens in a pass, every request is afterwards either unharmed or finished with a reason, and the
memory of finished requests is back in the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm42.cache import BlockPool, PrefixCache
from llm42.config import EngineConfig
from llm42.engine.request import FinishReason, Request
from llm42.engine.runner import Runner, SegmentResult
from llm42.engine.scheduler import Pass, PassShapes, Scheduler, Segment
from llm42.engine.stats import Totals
from llm42.engine.tuning import PassCosts
from llm42.protocol import Verdict
from llm42.sampling.sampler import UNUSABLE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one step did and how long it took; for profiles and benchmarks."""

    is_canonical: bool
    prompt_rows: int
    """Rows of requests that prefill (again)."""
    decode_rows: int
    """Rows that each gave one new token: of ordinary requests, drafts, and canonical rows without candidates."""
    window_rows: int
    """Rows that verified candidates, or were run again as a spot check."""
    plan_s: float
    execute_s: float
    """The forward pass and the sampling of its rows."""
    apply_s: float
    """Commits, stop rules, detokenization, bookkeeping."""


class EngineCore:
    """Drives a scheduler and a runner.

    Args:
        config: The engine's configuration.
        pool: The block pool that the runner's KV memory belongs to.
        runner: What executes passes.
        shapes: The row counts of passes.
        costs: What passes cost.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        runner: Runner,
        shapes: PassShapes,
        costs: PassCosts | None = None,
    ) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool) if config.enable_prefix_caching else None
        self.totals = Totals()
        self.scheduler = Scheduler(config, pool, self.cache, shapes, costs, self.totals)
        self.num_spot_checked = 0
        """Directly committed tokens that were verified afterwards."""
        self.num_violations = 0
        """Spot checks that found other bits."""
        self.runner = runner
        self.observer: Callable[[PassRecord], None] | None = None
        """Called after each pass, on the engine's thread."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the sequences of one request, all or none.

        Raises:
            QueueFullError: The queue has no room for them.
        """
        self.scheduler.add(requests)

    def cancel(self, request: Request) -> None:
        """End a request now and return its memory; harmless if it has ended."""
        if not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    def step(self) -> list[Request]:
        """Run one pass; return the requests that have something new to show or have ended."""
        started = time.monotonic()
        work = self.scheduler.plan()
        if work is None:
            return []
        # Before the ledgers move on.
        rows, num_committed, num_windows = _count_rows(work), _num_committed(work), self.totals.windows
        now = time.monotonic()
        for segment in work.segments:
            if segment.request.stats.scheduled is None:
                segment.request.stats.scheduled = now
                self._count_lookup(segment.request)
        try:
            results = self.runner.execute(work)
        except Exception as error:
            logger.exception("a pass failed; its %d requests are ended", len(work.segments))
            return self._fail_pass(work, error)
        executed = time.monotonic()
        num_violations = self.num_violations
        changed = [
            segment.request
            for segment, result in zip(work.segments, results, strict=True)
            if self._apply(segment, result)
        ]
        if self.num_violations > num_violations:
            self._rebuild()
        self.scheduler.costs.observe(work.num_rows, executed - now)
        num_committed = _num_committed(work) - num_committed
        self.totals.count_pass(rows, work.num_rows, is_canonical=work.is_canonical, num_committed=num_committed)
        if self.totals.windows > num_windows:
            self.totals.count_verification(self.totals.windows - num_windows, self.scheduler.policy.group_size)
        if self.observer is not None:
            times = (now - started, executed - now, time.monotonic() - executed)
            self.observer(PassRecord(work.is_canonical, *rows, *times))
        return changed

    def _fail_pass(self, work: Pass, error: Exception) -> list[Request]:
        for segment in work.segments:
            self._finish(segment.request, FinishReason.ERROR, f"the pass failed with {type(error).__name__}: {error}")
        return [segment.request for segment in work.segments]

    def _apply(self, segment: Segment, result: SegmentResult) -> bool:
        """Take a segment's result to its request; return whether its caller has something new to see."""
        request, ledger = segment.request, segment.request.ledger
        if segment.num_checked:
            self._take_spot_check(segment, result)
        if result.error is not None:
            self._finish(request, FinishReason.ERROR, result.error)
            return True
        request.prompt_logprobs.extend(result.prompt_logprobs)
        committed = self._advance(segment, result.generated)
        usable = committed.index(UNUSABLE) if UNUSABLE in committed else len(committed)
        if usable < len(committed):
            ledger.truncate(ledger.num_committed - len(committed) + usable)
        if usable:
            request.accept(usable, result.logprobs)
        if usable < len(committed) and not request.is_finished:
            self._finish(request, FinishReason.ERROR, request.why_no_token())
            return True
        if self.cache is not None:
            self.cache.publish(request.pages, ledger.token_ids, ledger.watermark)
        if request.is_finished:
            self._retire(request)
        else:
            request.pages.trim(ledger.num_tokens + 1)
        return usable > 0

    def _advance(self, segment: Segment, generated: list[int]) -> Sequence[int]:
        """Apply generated tokens to the ledger; return the tokens that were committed."""
        request, ledger = segment.request, segment.request.ledger
        if segment.is_draft:
            if ledger.num_candidates == 0:
                request.drafting_since = self.scheduler.step
            if ledger.deterministic:
                # Any guess is as good as another where the fast path has none.
                ledger.draft(max(generated[0], 0))
                return ()
            ledger.draft(generated[0])
            return generated
        had_candidates = ledger.num_candidates > 0
        verdict = ledger.advance(segment.rows[segment.num_checked :], generated)
        if verdict is None:
            return ()
        if had_candidates:
            self.scheduler.flips.observe(len(generated), is_rollback=verdict.is_rollback)
            self._count_window(request, verdict)
        request.stats.num_windows += had_candidates
        request.stats.num_rollbacks += verdict.is_rollback
        request.stats.num_recomputed_tokens += verdict.num_dropped
        request.ready_since = None
        request.drafting_since = self.scheduler.step if ledger.num_candidates else None
        return verdict.committed

    def _take_spot_check(self, segment: Segment, result: SegmentResult) -> None:
        self.num_spot_checked += segment.num_checked
        if result.violation is None:
            return
        self.num_violations += 1
        logger.error(
            "spot check failed: %s of request %s, in a pass of %d rows of the canonical class %s; what was committed "
            "directly is not proven, and from now on every deterministic token is drafted and verified",
            result.violation,
            segment.request.spec.request_id,
            result.num_rows,
            self.scheduler.shapes.canonical,
        )
        self.scheduler.stop_direct_commits()

    def _rebuild(self) -> None:
        """Drop all KV, which canonical passes of the false class wrote: it is computed again at the one row count."""
        for request in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(request)
        if self.cache is not None:
            self.cache.clear()

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish(reason, error)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.scheduler.remove(request)
        if request.finish_reason is not None:
            self.totals.finished[request.finish_reason.value] += 1

    def _count_lookup(self, request: Request) -> None:
        """Count what the prefix cache was asked for and had, when a request runs for the first time."""
        if self.cache is not None and not request.wants_prompt_logprobs:
            self.totals.prefix_cache_queries += request.ledger.prompt_len
            self.totals.prefix_cache_hits += request.stats.num_cached_tokens

    def _count_window(self, request: Request, verdict: Verdict) -> None:
        self.totals.windows += 1
        self.totals.rollbacks += verdict.is_rollback
        self.totals.recomputed_tokens += verdict.num_dropped
        if request.drafting_since is not None:
            self.totals.commit_lag_steps += self.scheduler.step - request.drafting_since


def _count_rows(work: Pass) -> tuple[int, int, int]:
    """Prompt, decode and window rows of a pass that is about to run."""
    prompt = decode = window = 0
    for segment in work.segments:
        ledger = segment.request.ledger
        if segment.is_draft:
            decode += 1
        elif ledger.is_prefilling:
            prompt += len(segment.rows)
        elif ledger.num_candidates:
            window += len(segment.rows)
        else:
            decode += 1
            window += segment.num_checked
    return prompt, decode, window


def _num_committed(work: Pass) -> int:
    """Committed output tokens of the requests of a pass."""
    return sum(segment.request.ledger.num_committed for segment in work.segments)
