"""What an engine is doing and has done, for metrics and status pages.

Invariant: only the engine's thread writes, a few plain numbers per pass and without a lock; any thread may take a
snapshot at any time. Numbers of one snapshot may be a pass apart, and none of the totals ever falls.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from llm42.engine.request import FinishReason
from llm42.protocol.shape_class import describe_counts

if TYPE_CHECKING:  # the engine is built of what counts here
    from llm42.engine.engine import Engine

TOKENS_PER_PASS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `Totals.tokens_per_pass`."""

_FILL_MEMORY = 16
"""Passes over which the group fill is averaged."""


@dataclass(slots=True)
class Histogram:
    """How many observed values lie in each bucket, and their sum. One thread writes, any may read."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending; one more bucket holds what is larger."""
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values are not above it; last, how many there are."""
        return list(accumulate(self.counts))

    def copy(self) -> Histogram:
        """The histogram as it is now."""
        return replace(self, counts=self.counts.copy())


@dataclass(slots=True)
class Totals:
    """Counted since the engine started."""

    canonical_passes: int = 0
    fast_passes: int = 0
    prompt_rows: int = 0
    """Prompt tokens computed: without those that the prefix cache had, and with those computed again."""
    decode_rows: int = 0
    """Rows that each gave one new token."""
    window_rows: int = 0
    """Rows that verified candidates, or were run again as a spot check."""
    padding_rows: int = 0
    generated_tokens: int = 0
    """Committed output tokens."""
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, once per sequence."""
    prefix_cache_hits: int = 0
    """How many of these it had."""
    preemptions: int = 0
    verify_passes: int = 0
    """Passes that verified at least one window of candidates."""
    windows: int = 0
    rollbacks: int = 0
    """Windows with a wrong candidate."""
    recomputed_tokens: int = 0
    """Candidates that were dropped, by rollbacks and by preemptions."""
    commit_lag_steps: int = 0
    """Summed over all windows: engine steps from the draft of the oldest candidate until its window was verified."""
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    """Sequences that ended, by reason."""
    tokens_per_pass: Histogram = field(default_factory=lambda: Histogram(TOKENS_PER_PASS))
    """Rows of passes, without padding."""
    group_fill: float = 0.0
    """Windows per verification pass, in parts of G: a mean in which recent passes weigh most."""

    def count_pass(self, rows: tuple[int, int, int], num_rows: int, *, is_canonical: bool, num_committed: int) -> None:
        """Count a pass that is over.

        Args:
            rows: Prompt, decode and window rows.
            num_rows: Rows of the pass, padding included.
            is_canonical: Which kind of pass it was.
            num_committed: The output tokens that it committed.
        """
        prompt, decode, window = rows
        tokens = prompt + decode + window
        self.canonical_passes += is_canonical
        self.fast_passes += not is_canonical
        self.prompt_rows += prompt
        self.decode_rows += decode
        self.window_rows += window
        self.padding_rows += num_rows - tokens
        self.tokens_per_pass.observe(tokens)
        self.generated_tokens += num_committed

    def count_verification(self, num_windows: int, group_size: int) -> None:
        """Count the windows that one pass verified; they are in ``windows`` already."""
        fill = num_windows / group_size
        self.verify_passes += 1
        self.group_fill += (fill - self.group_fill) / min(self.verify_passes, _FILL_MEMORY)

    def copy(self) -> Totals:
        """The totals as they are now."""
        return replace(self, finished=self.finished.copy(), tokens_per_pass=self.tokens_per_pass.copy())


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine."""

    totals: Totals
    running: int
    waiting: int
    max_num_seqs: int
    kv_blocks_used: int
    """Blocks that requests hold; what only the prefix cache remembers can be taken at any time."""
    kv_blocks: int
    """Blocks that requests can hold in all."""
    block_size: int
    has_prefix_cache: bool
    spot_checked_tokens: int
    violations: int
    """Spot checks that found other bits."""
    mode: str
    kernels: str
    window_size: int
    """W, as chosen now."""
    group_size: int
    """G, as chosen now."""
    canonical_rows: str
    """Row counts of canonical passes, as text."""
    logit_rows: str
    """The same of the lm_head."""
    fingerprint: str

    @property
    def kv_cache_usage(self) -> float:
        """The share of KV blocks that requests hold, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks

    def describe(self) -> dict[str, Any]:
        """What a status page shows, as plain data."""
        totals = self.totals
        return {
            "kernels": self.kernels,
            "requests": {
                "running": self.running,
                "waiting": self.waiting,
                "max_running": self.max_num_seqs,
                "finished": sum(totals.finished.values()),
            },
            "tokens": {
                "prompt": totals.prompt_rows,
                "generated": totals.generated_tokens,
                "cache_queries": totals.prefix_cache_queries,
                "cache_hits": totals.prefix_cache_hits,
            },
            "kv_cache": {"usage": self.kv_cache_usage},
            "verification": {
                "passes": totals.verify_passes,
                "windows": totals.windows,
                "rollbacks": totals.rollbacks,
                "recomputed_tokens": totals.recomputed_tokens,
                "spot_checks": self.spot_checked_tokens,
                "violations": self.violations,
            },
        }


def engine_stats(engine: Engine) -> EngineStats:
    """Take a snapshot, from any thread."""
    core = engine.core
    scheduler, pool, policy = core.scheduler, core.pool, core.scheduler.policy
    return EngineStats(
        totals=core.totals.copy(),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        max_num_seqs=engine.config.max_num_seqs,
        kv_blocks_used=pool.num_usable - pool.num_free,
        kv_blocks=pool.num_usable,
        block_size=pool.block_size,
        has_prefix_cache=core.cache is not None,
        spot_checked_tokens=core.num_spot_checked,
        violations=core.num_violations,
        mode=engine.config.mode,
        kernels=engine.decoder.kernels.name,
        window_size=policy.window_size,
        group_size=policy.group_size,
        canonical_rows=describe_counts(scheduler.shapes.canonical.row_counts),
        logit_rows=describe_counts(engine.atlas.logit_row_counts),
        fingerprint=engine.system_fingerprint,
    )
