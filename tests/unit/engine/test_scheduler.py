"""The scheduler: who has a row in which pass. The tokens do not matter here, so one constant plays the model."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from llm42.cache import BlockPool, PrefixCache
from llm42.config import EngineConfig
from llm42.engine.core import EngineCore
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.runner import SegmentResult
from llm42.engine.scheduler import PassShapes, Scheduler
from llm42.engine.text import OutputText
from llm42.errors import QueueFullError
from llm42.protocol import GroupingPolicy, ShapeClass
from llm42.sampling.params import SamplingParams
from simulated import PieceTokenizer

TOKEN = 1


class ConstantRunner:
    """Generates one token over and over: every candidate matches. Remembers the passes."""

    def __init__(self):
        self.passes = []

    def execute(self, work):
        self.passes.append(work)
        results = []
        for segment in work.segments:
            first = segment.rows.start if segment.is_draft else segment.request.ledger.first_sampled(segment.rows)
            results.append(SegmentResult([TOKEN] * (segment.rows.stop - first)))
        return results


class Engine:
    """A core with room for everything, unless a test says otherwise."""

    def __init__(self, *, num_blocks=20_000, **fields):
        defaults = {
            "mode": "verify",
            "window_size": 4,
            "verify_batch_size": 8,
            "canonical_rows": 16,
            "block_size": 2,
            "enable_prefix_caching": False,
        }
        self.config = EngineConfig(model="constant", canonical_logit_rows=1, **(defaults | fields))
        self.runner = ConstantRunner()
        shapes = PassShapes.choose(self.config, ShapeClass([self.config.canonical_rows]))
        self.core = EngineCore(self.config, BlockPool(num_blocks, self.config.block_size), self.runner, shapes)
        self.scheduler = self.core.scheduler
        self._names = count()

    def request(self, prompt=(1, 2, 3), *, max_tokens=60, priority=0, **fields):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
        spec = SequenceSpec(str(next(self._names)), 0, tuple(prompt), params, 0, max_tokens, frozenset(), priority)
        return Request(spec, self.core.pool, OutputText(PieceTokenizer(), params))

    def submit(self, prompt=(1, 2, 3), **fields):
        request = self.request(prompt, **fields)
        self.core.add([request])
        return request

    def step(self):
        """Run a pass; return it as {request: segment}, with its kind."""
        self.core.step()
        work = self.runner.passes[-1]
        return {segment.request: segment for segment in work.segments}, work.is_canonical

    def decoding(self, requests):
        return [request for request in requests if not (request.is_finished or request.ledger.is_prefilling)]

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"unfinished after {max_steps} steps")


def windows(segments):
    """Segments that verified candidates: by their rows, because the ledgers have moved on."""
    return [segment for segment in segments if not segment.is_draft and len(segment.rows) > 1]


# What kind of pass ----------------------------------------------------------------------------------------------------


def test_nothing_is_planned_for_nobody():
    engine = Engine()
    assert engine.scheduler.plan() is None
    assert not engine.core.has_work


def test_prompts_run_in_canonical_passes_and_ordinary_decoding_in_fast_ones():
    engine = Engine()
    ordinary = engine.submit(max_tokens=3)
    kinds = []
    while engine.core.has_work:
        segments, is_canonical = engine.step()
        assert list(segments) == [ordinary]
        kinds.append(is_canonical)
    assert kinds == [True, False, False]


def test_a_deterministic_request_is_drafted_and_then_verified_at_once_when_nothing_else_can_run():
    engine = Engine(window_size=8)
    request = engine.submit(max_tokens=4, deterministic=True)
    passes = []
    while engine.core.has_work:
        segments, is_canonical = engine.step()
        passes.append((is_canonical, segments[request].rows))
    drafts = [(False, range(3, 4)), (False, range(4, 5)), (False, range(5, 6))]
    assert passes == [(True, range(3)), *drafts, (True, range(3, 7))]


@pytest.mark.parametrize("deterministic", [False, True])
def test_invariant_mode_never_plans_a_fast_pass_or_a_draft(deterministic):
    engine = Engine(mode="invariant", canonical_rows=4, max_num_seqs=8)
    requests = [engine.submit(max_tokens=5, deterministic=deterministic or index % 2 == 0) for index in range(8)]
    engine.run()
    assert all(work.is_canonical for work in engine.runner.passes)
    assert not any(segment.is_draft for work in engine.runner.passes for segment in work.segments)
    assert all(len(request.ledger.committed) == 5 for request in requests)


def test_off_mode_serves_ordinary_requests():
    engine = Engine(mode="off")
    request = engine.submit(max_tokens=5)
    engine.run()
    assert request.ledger.num_committed == 5


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 5, None])
@pytest.mark.parametrize("mode", ["verify", "invariant"])
def test_no_pass_is_empty_and_none_has_more_rows_than_its_budget(max_num_batched_tokens, mode):
    engine = Engine(mode=mode, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=6)
    for index in range(12):
        engine.submit(range(1, 2 + 3 * index), max_tokens=8, deterministic=index % 3 > 0)
        engine.step()
    engine.run()
    for work in engine.runner.passes:
        limit = engine.scheduler.shapes.canonical_budget if work.is_canonical else engine.scheduler.shapes.pass_rows
        assert 1 <= sum(len(segment.rows) for segment in work.segments) <= limit
    assert limit == engine.config.canonical_rows or max_num_batched_tokens is not None


def test_a_window_has_at_most_w_rows_and_a_prompt_chunk_may_have_more():
    engine = Engine(window_size=4, verify_batch_size=8, canonical_rows=16)
    long = engine.submit(range(1, 15), deterministic=True)
    verifying = [engine.submit(deterministic=True) for _ in range(3)]
    chunk = engine.step()[0][long]
    assert len(chunk.rows) > 4
    for _ in range(60):
        if not engine.core.has_work:
            break
        segments, _ = engine.step()
        assert all(len(segments[request].rows) <= 4 for request in verifying if request in segments)


def test_windows_of_a_group_wait_for_each_other_and_run_in_one_pass():
    engine = Engine(window_size=4, verify_batch_size=3, canonical_rows=16)
    requests = [engine.submit(deterministic=True) for _ in range(3)]
    for _ in range(20):
        segments, is_canonical = engine.step()
        if is_canonical and windows(segments.values()):
            break
    assert [segment.request for segment in windows(segments.values())] == requests


def test_more_than_g_windows_run_only_in_rows_that_no_ordinary_request_wants():
    engine = Engine(window_size=4, verify_batch_size=1, canonical_rows=16, max_num_seqs=32)
    deterministic = [engine.submit(deterministic=True, max_tokens=200) for _ in range(4)]
    ordinary = [engine.submit(max_tokens=200) for _ in range(20)]
    num_crowded = 0
    for _ in range(150):
        candidates = {request: request.ledger.num_candidates for request in deterministic}
        decoding = set(engine.decoding(ordinary))
        segments, is_canonical = engine.step()
        if is_canonical and not decoding <= set(segments):
            verified = [segment for segment in segments.values() if not segment.is_draft]
            verified = [segment.request for segment in verified if candidates.get(segment.request)]
            assert len(verified) <= 1
            num_crowded += len(verified)
    assert num_crowded > 0


@pytest.mark.parametrize("num_steps", range(3, 12))
def test_a_window_that_fills_free_rows_has_w_of_them_at_most(num_steps):
    """G is one, and candidates run on past W while ordinary requests hold the rows; then these leave all at once."""
    engine = Engine(window_size=4, verify_batch_size=1, canonical_rows=16, max_num_seqs=32)
    deterministic = [engine.submit(deterministic=True) for _ in range(4)]
    ordinary = [engine.submit() for _ in range(14)]
    for _ in range(num_steps):
        engine.step()
    for request in ordinary:
        engine.core.cancel(request)
    for _ in range(20):
        segments, _ = engine.step()
        rows = [len(segments[request].rows) for request in deterministic if request in segments]
        assert max(rows, default=0) <= 4


def test_no_more_requests_run_than_max_num_seqs():
    engine = Engine(max_num_seqs=3)
    for _ in range(5):
        engine.submit(max_tokens=4)
    most = 0
    while engine.core.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3


# The neighbours -------------------------------------------------------------------------------------------------------


def test_nobody_is_paused_by_a_verification_that_leaves_rows_free():
    engine = Engine(window_size=4, verify_batch_size=1, canonical_rows=16)
    verifying = engine.submit(deterministic=True)
    others = [engine.submit(deterministic=index % 2 > 0) for index in range(6)]
    num_verifications = 0
    for _ in range(50):
        decoding = engine.decoding(others)
        segments, is_canonical = engine.step()
        num_verifications += is_canonical and verifying in segments and len(segments[verifying].rows) > 1
        assert set(decoding) <= set(segments)
    assert num_verifications > 5


@pytest.mark.parametrize("canonical_rows", [4, 5, 8])
def test_an_ordinary_request_waits_one_pass_at_most_for_verification_and_prompts(canonical_rows):
    engine = Engine(canonical_rows=canonical_rows, verify_batch_size=2, max_num_seqs=40)
    ordinary = [engine.submit(max_tokens=100) for _ in range(12)]
    left_out, num_left_out = set(), 0
    for index in range(100):
        engine.submit(range(1, 12), max_tokens=9, deterministic=index % 2 > 0)
        decoding = set(engine.decoding(ordinary))
        segments, is_canonical = engine.step()
        waiting = decoding - set(segments)
        assert not waiting & left_out
        assert is_canonical or not waiting
        left_out = waiting
        num_left_out += len(waiting)
    assert num_left_out > 0, "else nothing was tested"


def test_with_fewer_rows_than_requests_everyone_has_a_turn():
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=12)
    requests = [engine.submit(max_tokens=100) for _ in range(12)]
    while not all(engine.decoding([request]) for request in requests):
        engine.step()
    for _ in range(50):
        segments, _ = engine.step()
        assert len(segments) == 4
        assert min(request.last_step for request in requests) > engine.scheduler.step - 3


def test_a_prompt_goes_on_beside_deterministic_requests_that_always_have_a_window_ready():
    engine = Engine(window_size=4, verify_batch_size=2, canonical_rows=8, max_num_seqs=40)
    for _ in range(16):
        engine.submit(deterministic=True, max_tokens=400)
    for _ in range(60):
        engine.step()
    late = engine.submit(range(1, 20))
    for _ in range(12):
        engine.step()
    assert late.ledger.num_committed > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_is_not_starved_by_windows_and_decode_rows(deterministic):
    engine = Engine(window_size=4, verify_batch_size=2, canonical_rows=8, max_num_seqs=40)
    for index in range(16):
        engine.submit(max_tokens=400, deterministic=index % 2 > 0)
    for _ in range(60):
        engine.step()
    late = engine.submit(deterministic=deterministic)
    for _ in range(20):
        engine.step()
    assert late.ledger.num_committed > 0


def test_a_prompt_is_chunked_and_ordinary_requests_decode_beside_its_chunks():
    engine = Engine(canonical_rows=8)
    ordinary = [engine.submit() for _ in range(3)]
    while not all(map(engine.decoding, [[request] for request in ordinary])):
        engine.step()
    late = engine.submit(range(1, 31))
    chunks = []
    while late.ledger.is_prefilling:
        segments, is_canonical = engine.step()
        assert is_canonical
        assert set(ordinary) <= set(segments)
        chunks.append(segments[late].rows)
    assert chunks[0].start == 0
    assert chunks[-1].stop == 30
    assert all(earlier.stop == later.start for earlier, later in pairwise(chunks))
    assert len(chunks) > 3


def test_prompts_go_on_however_many_ordinary_requests_decode():
    engine = Engine(canonical_rows=4, max_num_seqs=30)
    for _ in range(20):
        engine.submit(max_tokens=1000)
    for _ in range(80):
        engine.step()
    late = engine.submit(range(1, 9))
    for _ in range(12):
        engine.step()
    assert late.ledger.num_committed > 0


# Deadlines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window_size", "steps_ready"), [(4, 1), (8, 2), (16, 4)])
def test_a_ready_window_is_launched_by_its_deadline_when_its_group_does_not_fill(window_size, steps_ready):
    engine = Engine(window_size=window_size, verify_batch_size=2, canonical_rows=2 * window_size)
    early = engine.submit(deterministic=True)
    for _ in range(window_size // 2):
        engine.step()
    # Its prompt leaves one row of the canonical pass, so that `early` drafts on beside it and keeps its lead.
    late = engine.submit(range(2 * window_size - 1), deterministic=True)
    while early.ledger.num_candidates < window_size - 1:
        engine.step()
        assert early.ledger.num_committed == 1
    assert 0 < late.ledger.num_candidates < window_size - 1 - steps_ready
    for _ in range(steps_ready):
        assert engine.step()[1] is False
    segments, is_canonical = engine.step()
    assert is_canonical
    assert len(segments[early].rows) == window_size
    assert GroupingPolicy(window_size, 2).max_steps_ready == steps_ready


def test_a_window_is_launched_without_waiting_when_the_group_is_one():
    engine = Engine(window_size=8, verify_batch_size=1, canonical_rows=64)
    requests = [engine.submit(deterministic=True), engine.submit([1], deterministic=True)]
    for _ in range(9):
        segments, is_canonical = engine.step()
    assert is_canonical, "one pass for the prompts, seven drafts, and then"
    assert len(segments[requests[0]].rows) == 8


def test_a_finished_candidate_is_verified_by_its_deadline_too():
    engine = Engine(window_size=16, verify_batch_size=4, canonical_rows=64)
    short = engine.submit(deterministic=True, max_tokens=3)
    for _ in range(4):
        engine.submit(deterministic=True)
    for _ in range(3):
        engine.step()
    assert short.ledger.num_candidates == 2
    for _ in range(GroupingPolicy(16, 4).max_steps_ready + 1):
        engine.step()
    assert short.is_finished


# The queue ------------------------------------------------------------------------------------------------------------


def test_the_queue_takes_all_sequences_of_a_request_or_none():
    engine = Engine(max_queue_len=3)
    engine.core.add([engine.request(), engine.request()])
    with pytest.raises(QueueFullError, match="max_queue_len is 3 and 2 requests wait: no room for 2 more"):
        engine.core.add([engine.request(), engine.request()])
    assert len(engine.scheduler.waiting) == 2
    engine.core.add([engine.request()])
    with pytest.raises(QueueFullError, match="raise max_queue_len"):
        engine.core.add([engine.request()])


def test_running_requests_do_not_count_as_waiting():
    engine = Engine(max_queue_len=2)
    for _ in range(3):
        engine.core.add([engine.request(), engine.request()])
        engine.step()
    assert len(engine.scheduler.running) == 6


def test_a_preempted_request_returns_to_a_full_queue():
    engine = Engine(max_queue_len=1, max_num_seqs=1)
    running = engine.submit()
    engine.step()
    engine.submit()
    engine.scheduler.preempt(running)
    assert engine.scheduler.waiting[0] is running
    engine.run()


def test_requests_start_in_order_of_arrival():
    engine = Engine(max_num_seqs=2)
    requests = [engine.submit(max_tokens=3) for _ in range(6)]
    started = []
    while engine.core.has_work:
        for request in engine.step()[0]:
            if request not in started:
                started.append(request)
    assert started == requests


# Memory ---------------------------------------------------------------------------------------------------------------


def test_lower_priorities_start_first_and_equal_ones_in_order_of_arrival():
    engine = Engine(max_num_seqs=1)
    requests = [engine.submit(max_tokens=1, priority=priority) for priority in (1, 0, 1, -5, 0)]
    started = []
    while engine.core.has_work:
        segments, _ = engine.step()
        started.extend(requests.index(request) for request in segments)
    assert started == [3, 1, 4, 0, 2]


def test_memory_pressure_preempts_the_least_urgent_first_and_it_returns_before_its_equals():
    engine = Engine(num_blocks=1 + 40, max_num_seqs=3)
    urgent = [engine.submit(max_tokens=50, priority=priority) for priority in (5, 0)]
    waiting = engine.submit(max_tokens=2, priority=5)
    engine.run()
    assert urgent[0].stats.num_preemptions > 0
    assert urgent[1].stats.num_preemptions == 0
    assert all(request.is_finished for request in (*urgent, waiting))


def test_memory_pressure_preempts_the_newest_first_and_never_the_oldest():
    engine = Engine(num_blocks=1 + 16)
    requests = [engine.submit(max_tokens=20, deterministic=index % 2 > 0) for index in range(3)]
    order = []
    while engine.core.has_work:
        before = [request.stats.num_preemptions for request in requests]
        running = list(engine.scheduler.running)
        engine.step()
        after = [request.stats.num_preemptions for request in requests]
        preempted = [request for request, old, new in zip(requests, before, after, strict=True) if new > old]
        assert preempted in ([], running[len(running) - len(preempted) :])
        if preempted:
            assert list(engine.scheduler.waiting)[: len(preempted)] == preempted, "they are the first to come back"
        order.extend(preempted)
    assert order
    assert requests[0].stats.num_preemptions == 0
    assert all(request.ledger.num_committed == 20 for request in requests)


def test_a_request_is_not_admitted_only_to_be_preempted_at_once():
    engine = Engine(num_blocks=1 + 5)
    first = engine.submit(max_tokens=5)
    engine.step()
    second = engine.submit(max_tokens=3)
    assert engine.core.pool.num_free - 1 == engine.core.pool.blocks_for(4), "the first takes one; no other is to spare"
    engine.run()
    assert first.ledger.num_committed == 5
    assert second.ledger.num_committed == 3
    assert second.stats.num_preemptions == 0


def test_a_request_that_fills_the_whole_pool_runs_alone_without_preemption():
    engine = Engine(num_blocks=1 + 10)
    requests = [engine.submit(range(1, 11), max_tokens=10, deterministic=flag) for flag in (True, False)]
    engine.run()
    assert [request.ledger.num_committed for request in requests] == [10, 10]
    assert requests[0].stats.num_preemptions == 0


def test_every_planned_row_and_the_row_that_verifies_its_token_have_memory():
    engine = Engine(num_blocks=1 + 14)
    for index in range(5):
        engine.submit(range(1, 2 + index), max_tokens=9, deterministic=index % 2 > 0)
    while engine.core.has_work:
        work = engine.scheduler.plan()
        for segment in work.segments:
            request = segment.request
            needed = min(segment.rows.stop + 1, request.max_positions) if segment.is_draft else segment.rows.stop
            assert request.pages.capacity >= needed
        for segment, result in zip(work.segments, engine.runner.execute(work), strict=True):
            engine.core._apply(segment, result)


def test_preemption_drops_candidates_and_counts_them():
    engine = Engine(window_size=8)
    request = engine.submit(deterministic=True)
    for _ in range(4):
        engine.step()
    assert request.ledger.num_candidates == 3
    engine.scheduler.preempt(request)
    assert request.ledger.num_candidates == 0
    assert request.pages.blocks == []
    assert (request.stats.num_preemptions, request.stats.num_recomputed_tokens) == (1, 3)
    assert (request.drafting_since, request.ready_since) == (None, None)


def test_removing_a_request_returns_its_memory_and_twice_is_harmless():
    engine = Engine()
    running, waiting = engine.submit(), engine.request()
    engine.step()
    engine.core.add([waiting])
    for request in (running, waiting, running, waiting):
        engine.scheduler.remove(request)
    assert not engine.core.has_work
    assert engine.core.pool.num_free == engine.core.pool.num_usable


# The prefix cache -----------------------------------------------------------------------------------------------------


def test_a_hit_is_not_computed_again_and_its_last_token_always_is():
    engine = Engine(enable_prefix_caching=True)
    engine.submit(range(1, 9), max_tokens=1)
    engine.run()
    longer, equal = engine.submit(range(1, 12), max_tokens=1), engine.submit(range(1, 9), max_tokens=1)
    segments, _ = engine.step()
    assert segments[longer].rows == range(8, 11)
    assert segments[equal].rows == range(6, 8), "two positions a block, and the last position must be computed"
    assert (longer.stats.num_cached_tokens, equal.stats.num_cached_tokens) == (8, 6)


def test_a_request_that_wants_prompt_logprobs_computes_its_whole_prompt():
    engine = Engine(enable_prefix_caching=True)
    engine.submit(range(1, 9), max_tokens=1)
    engine.run()
    request = engine.submit(range(1, 9), max_tokens=1, prompt_logprobs=0)
    work = engine.scheduler.plan()
    assert work.segments[0].rows == range(8)
    assert request.stats.num_cached_tokens == 0


def test_a_preempted_request_finds_what_it_published():
    engine = Engine(enable_prefix_caching=True)
    request = engine.submit(range(1, 9), deterministic=True)
    for _ in range(12):
        engine.step()
    num_stable = request.ledger.num_stable
    engine.scheduler.preempt(request)
    segments, _ = engine.step()
    assert segments[request].rows.start >= num_stable - 3
    assert request.stats.num_cached_tokens == 0, "what it computed itself is no hit of its prompt"


def test_a_scheduler_without_a_cache_starts_every_prompt_at_its_beginning():
    pool = BlockPool(50, 2)
    config = EngineConfig(model="constant")
    scheduler = Scheduler(config, pool, None, PassShapes.choose(config, ShapeClass([64])))
    engine = Engine()
    scheduler.add([Request(engine.request().spec, pool, OutputText(PieceTokenizer(), SamplingParams()))])
    assert scheduler.plan().segments[0].rows == range(3)
    assert len(PrefixCache(pool)) == 0
