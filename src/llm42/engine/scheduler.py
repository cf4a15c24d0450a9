"""The scheduler: who waits, who runs, and what the next pass carries.

Invariants: memory for a row, and for the row that verifies its token, is reserved before it is planned, so verification
cannot fail for memory; an ordinary request that a canonical pass had no room for is in the next pass, which is fast.
Nothing here can change the bits of a deterministic request; only when they come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from llm42.cache import BlockPool, OutOfBlocksError, PrefixCache
from llm42.config import EngineConfig
from llm42.engine.request import Request
from llm42.engine.stats import Totals
from llm42.engine.tuning import FlipRate, PassCosts, choose_policy
from llm42.errors import QueueFullError
from llm42.protocol import GroupingPolicy, ShapeClass

_RETUNE_STEPS = 32
_PROMPT_ROWS = 64
_DIRECT_ROWS_PER_CHECKED = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one request in a pass."""

    request: Request
    rows: range
    """Positions of the rows."""
    is_draft: bool
    """A single decode row whose token is a candidate (or, of an ordinary request, final); else a canonical window."""
    num_checked: int = 0
    """Leading rows of a window below the watermark, which are run again as a spot check."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass to run."""

    segments: tuple[Segment, ...]
    is_canonical: bool
    num_rows: int
    """Rows of the pass, padding included."""


@dataclass(frozen=True, slots=True)
class PassShapes:
    """The row counts of passes."""

    canonical: ShapeClass
    pass_rows: int
    """The most rows that a pass carries; the rest of a canonical pass is padding."""

    @classmethod
    def choose(cls, config: EngineConfig, canonical: ShapeClass, affordable_rows: int | None = None) -> PassShapes:
        """The shapes for a configuration.

        Args:
            config: The configuration.
            canonical: The canonical class.
            affordable_rows: How many rows a pass may have before neighbours wait too long for their next token.
        """
        # Whoever decodes has a row in every pass, and prompts get on beside them.
        default = max(affordable_rows or canonical.largest, config.max_num_seqs + _PROMPT_ROWS)
        return cls(canonical, config.max_num_batched_tokens or default)

    @property
    def canonical_budget(self) -> int:
        """The most rows that a canonical pass carries."""
        return min(self.canonical.largest, self.pass_rows)


class Scheduler:
    """Plans passes over the requests it was given.

    Args:
        config: Mode, sizes and limits.
        pool: The blocks.
        cache: The prefix cache, or None.
        shapes: The row counts of passes.
        costs: What passes cost, for the choice of W and G.
        totals: Where preemptions are counted.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        cache: PrefixCache | None,
        shapes: PassShapes,
        costs: PassCosts | None = None,
        totals: Totals | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._cache = cache
        self.shapes = shapes
        self.costs = PassCosts() if costs is None else costs
        self._totals = Totals() if totals is None else totals
        self.flips = FlipRate()
        self.commits_directly = config.mode == "auto"
        """Whether decode rows of deterministic requests may be committed at once; ends with a failed spot check."""
        self.spot_check_interval = 128
        """One in so many directly committed tokens is verified afterwards."""
        self._check_debt = 0
        self._left_out = False
        self.step = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of arrival."""
        self.policy = self._choose_policy()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests that arrive together, all or none.

        Raises:
            QueueFullError: They do not fit the queue.
        """
        requests = list(requests)
        if len(self.waiting) + len(requests) > self._config.max_queue_len:
            raise QueueFullError(
                f"max_queue_len is {self._config.max_queue_len} and {len(self.waiting)} requests wait: "
                f"no room for {len(requests)} more; retry later or raise max_queue_len"
            )
        for request in requests:
            self._queue(request, behind_equals=True)

    def remove(self, request: Request) -> None:
        """Forget a request and return its memory; harmless if it is gone already."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.pages.free()

    def plan(self) -> Pass | None:
        """The next pass; None if nothing can run, which means that nothing is left."""
        self.step += 1
        self._reserve()
        self._admit()
        if self.step % _RETUNE_STEPS == 1:
            self.policy = self._choose_policy()
        is_invariant = self._config.mode == "invariant"
        work = _Work.sort(self.running, self.policy, self.step, is_invariant=is_invariant)
        if self._is_canonical_due(work):
            segments = self._fill_canonical(work)
            planned = {id(segment.request) for segment in segments}
            self._left_out = any(id(request) not in planned for request in work.ordinary)
            result = Pass(tuple(segments), is_canonical=True, num_rows=self._pad(segments))
        else:
            rows = sorted(work.ordinary + work.drafting, key=lambda request: request.last_step)
            self._left_out = False
            drafts = tuple(_decode_row(request) for request in rows[: self.shapes.pass_rows])
            result = Pass(drafts, is_canonical=False, num_rows=len(drafts))
        for segment in result.segments:
            segment.request.last_step = self.step
        return result if result.segments else None

    def preempt(self, request: Request) -> None:
        """Take a running request's memory; it is rebuilt by canonical passes when its turn comes again."""
        self.running.remove(request)
        request.pages.free()
        num_dropped = request.ledger.preempt()
        request.stats.num_recomputed_tokens += num_dropped
        request.stats.num_preemptions += 1
        self._totals.recomputed_tokens += num_dropped
        self._totals.preemptions += 1
        request.drafting_since = request.ready_since = None
        self._queue(request, behind_equals=False)

    def _queue(self, request: Request, *, behind_equals: bool) -> None:
        """Put a request into the waiting queue: lower priorities first, in order of arrival among equals."""
        bisect = bisect_right if behind_equals else bisect_left
        self.waiting.insert(bisect(self.waiting, request.spec.priority, key=_priority), request)

    def _choose_policy(self) -> GroupingPolicy:
        decoding = [request.ledger for request in self.running if not request.ledger.is_prefilling]
        num_deterministic = sum(ledger.deterministic for ledger in decoding)
        return choose_policy(
            self.costs,
            self.flips,
            num_deterministic=num_deterministic,
            num_ordinary=len(decoding) - num_deterministic,
            max_rows=self.shapes.canonical_budget,
            canonical=self.shapes.canonical,
            window_size=self._config.window_size,
            group_size=self._config.verify_batch_size,
        )

    def stop_direct_commits(self) -> None:
        """From now on draft and verify everything, at one row count: the class has proven not to be one."""
        self.commits_directly = False
        self.shapes = PassShapes(ShapeClass([self.shapes.canonical.usual]), self.shapes.pass_rows)
        self.policy = self._choose_policy()

    def _reserve(self) -> None:
        """Slots for the next row of everyone who decodes, and for the row that verifies its token."""
        for request in list(self.running):
            if request not in self.running or request.ledger.is_prefilling:
                continue
            needed = min(request.ledger.num_tokens + 1, request.max_positions)
            while request in self.running:
                try:
                    request.pages.grow(needed)
                    break
                except OutOfBlocksError:
                    # The least urgent one; among equals the one that arrived last.
                    self.preempt(max(reversed(self.running), key=_priority))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            ledger = request.ledger
            blocks: list[int] = []
            parent = 0
            if self._cache is not None and not request.wants_prompt_logprobs:
                blocks, parent = self._cache.match(ledger.token_ids[: ledger.num_tokens - 1])
            total = self._pool.blocks_for(min(ledger.num_tokens + 1, request.max_positions))
            available = self._pool.num_free - sum(self._pool.references(block) == 0 for block in blocks)
            # One spare block for each running request: who is admitted should not be preempted at once.
            if total - len(blocks) + len(self.running) > available and self.running:
                return
            self.waiting.popleft()
            request.pages.adopt(blocks, parent)
            request.pages.grow(total * self._pool.block_size)
            ledger.restore(len(blocks) * self._pool.block_size)
            if ledger.num_committed == 0:
                request.stats.num_cached_tokens = ledger.num_computed
            self.running.append(request)

    def _is_canonical_due(self, work: _Work) -> bool:
        if self._config.mode == "invariant":
            return True
        if self._left_out and work.ordinary:
            return False
        if work.prefilling or not (work.ordinary or work.drafting):
            return True
        if self.commits_directly and self._is_direct_cheaper(work):
            return True
        states = [request.window_state(self.step) for request in work.decoding]
        return self.policy.should_launch(states, self.shapes.canonical_budget)

    def _is_direct_cheaper(self, work: _Work) -> bool:
        """Whether padding a decode pass to the class costs less than verifying its deterministic rows later."""
        rows = len(work.ordinary) + len(work.decoding)
        if not work.decoding or rows > self.shapes.canonical_budget:
            return False
        padding = self.shapes.canonical.pad(rows) - rows
        share = self.costs.overhead_rows / (self.policy.window_size * self.policy.group_size)
        return padding <= len(work.decoding) * (1.0 + share)

    def _fill_canonical(self, work: _Work) -> list[Segment]:
        """Due windows and prompts first, as far as decode rows leave them room; then these; then whatever fits."""
        budget = self.shapes.canonical_budget
        fill = _Fill(budget)
        ready = work.ready[: self.policy.group_size]
        reserved = min(len(work.ordinary) + len(work.decoding) - len(ready), budget // 2)
        # Prompts and windows share what is left evenly; an odd row goes to the windows once they are overdue.
        is_overdue = any(
            request.window_state(self.step).steps_ready >= self.policy.max_steps_ready for request in ready
        )
        for_windows = (budget - reserved + is_overdue) // 2 if ready else 0
        for request in work.prefilling:
            fill.add_window(request, fill.free - reserved - for_windows)
        for request in ready:
            fill.add_window(request, min(self.policy.window_size, fill.free - reserved))
        for request in sorted(work.ordinary, key=lambda request: request.last_step):
            if self._config.mode == "invariant":
                fill.add_window(request, min(1, fill.free))
            elif fill.free:
                fill.add(_decode_row(request))
        for request in work.prefilling:
            fill.extend_window(request)
        others = sorted(
            (request for request in work.decoding if not fill.has(request)), key=lambda request: request.last_step
        )
        for index, request in enumerate(others):
            window = min(self.policy.window_size, request.ledger.num_candidates + 1)
            if fill.free - window >= len(others) - index - 1 or request not in work.drafting:
                fill.add_window(request, min(window, fill.free))
            elif fill.free:
                fill.add(_decode_row(request))
        if self.commits_directly:
            self._add_spot_check(fill)
        return fill.segments

    def _pad(self, segments: list[Segment]) -> int:
        """Rows of a canonical pass; with a spot check it has another count than it would have without, if it can."""
        canonical = self.shapes.canonical
        rows = sum(len(segment.rows) for segment in segments)
        num_checked = sum(segment.num_checked for segment in segments)
        num_rows = canonical.pad(rows or 1)
        if num_checked and num_rows == canonical.pad(rows - num_checked) and num_rows < canonical.largest:
            return canonical.pad(num_rows + 1)
        return num_rows

    def _add_spot_check(self, fill: _Fill) -> None:
        """Run directly committed rows of a request again, when enough tokens were committed since the last time."""
        direct = [segment for segment in fill.segments if is_direct(segment)]
        self._check_debt += len(direct)
        # A large pass waits until several tokens are due: a pass of another size now and then costs less than many.
        due = max(1, len(direct) // _DIRECT_ROWS_PER_CHECKED)
        if not fill.free or self._check_debt < due * self.spot_check_interval:
            return
        # Everybody has a turn. Published blocks stay as they are: others read them.
        turn = self.step % len(direct) if direct else 0
        for segment in direct[turn:] + direct[:turn]:
            request = segment.request
            first = max(request.pages.num_published * self._pool.block_size, request.ledger.prompt_len)
            count = min(request.ledger.watermark - first, fill.free, self._check_debt // self.spot_check_interval)
            if count > 0:
                rows = range(segment.rows.start - count, segment.rows.stop)
                fill.replace(Segment(request, rows, is_draft=False, num_checked=count))
                self._check_debt -= count * self.spot_check_interval
                return


@dataclass(slots=True)
class _Work:
    """The running requests by what they need next."""

    prefilling: list[Request]
    ordinary: list[Request]
    """Ordinary requests that decode."""
    decoding: list[Request]
    """Deterministic requests that decode; the next two are subsets."""
    ready: list[Request]
    drafting: list[Request]

    @classmethod
    def sort(cls, running: list[Request], policy: GroupingPolicy, step: int, *, is_invariant: bool) -> _Work:
        work = cls([], [], [], [], [])
        for request in running:
            if request.ledger.is_prefilling:
                work.prefilling.append(request)
            elif not request.ledger.deterministic:
                work.ordinary.append(request)
            else:
                work.decoding.append(request)
                state = request.window_state(step)
                if policy.is_ready(state):
                    work.ready.append(request)
                    if request.ready_since is None:
                        request.ready_since = step
                if policy.can_draft(state) and not is_invariant:
                    work.drafting.append(request)
        work.ready.sort(key=lambda request: request.ready_since or step)
        return work


class _Fill:
    """The segments of a canonical pass while it fills."""

    def __init__(self, budget: int) -> None:
        self.free = budget
        self._segments: dict[int, Segment] = {}

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def has(self, request: Request) -> bool:
        return id(request) in self._segments

    def add(self, segment: Segment) -> None:
        self._segments[id(segment.request)] = segment
        self.free -= len(segment.rows)

    def add_window(self, request: Request, limit: int) -> None:
        if limit > 0:
            self.add(Segment(request, request.ledger.next_rows(limit), is_draft=False))

    def replace(self, segment: Segment) -> None:
        """Put another segment of the same request in the place of its first."""
        self.free += len(self._segments[id(segment.request)].rows)
        self.add(segment)

    def extend_window(self, request: Request) -> None:
        """Give a request's window the rows that are still free."""
        segment = self._segments.pop(id(request), None)
        taken = 0 if segment is None else len(segment.rows)
        self.free += taken
        self.add_window(request, self.free)


def is_direct(segment: Segment) -> bool:
    """Whether a segment commits the next token of a deterministic request that decodes, without a candidate."""
    ledger = segment.request.ledger
    is_decoding = ledger.deterministic and not (ledger.is_prefilling or segment.is_draft)
    return is_decoding and ledger.num_candidates == 0


def _priority(request: Request) -> int:
    return request.spec.priority


def _decode_row(request: Request) -> Segment:
    position = request.ledger.num_tokens - 1
    return Segment(request, range(position, position + 1), is_draft=True)
