"""Random interleavings of everything that happens to an engine, over the simulated model of `simulated.py`.

The simulation checks its invariants after every operation, so a test here mostly has to make things happen. The second
half proves that these checks can fail: each mutant breaks one rule of protocol.md, and must be caught.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated import EOS, Simulation, SimulatedRunner

from llm42.cache import BlockPool, PageTable, PrefixCache
from llm42.config import EngineConfig
from llm42.engine.core import EngineCore
from llm42.engine.request import Request
from llm42.engine.scheduler import Scheduler
from llm42.errors import QueueFullError
from llm42.protocol import GroupingPolicy, Ledger, Verdict, judge
from llm42.protocol import ledger as ledger_module
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import UNUSABLE

MAX_MODEL_LEN = 24
MAX_TOKENS = 11
SHARED_PREFIX = (1, 2, 3, 1, 2, 2, 1, 1, 3, 2)
"""Prompts start with a part of it, so that the prefix cache has something to find."""


def make_config(**fields):
    """A small engine; `canonical_logit_rows` has no meaning without an lm_head."""
    small = {"window_size": 4, "verify_batch_size": 2, "canonical_rows": 8, "max_num_seqs": 6, "block_size": 2}
    return EngineConfig(model="simulated", canonical_logit_rows=1, **(small | fields))


def make_simulation(config, spare_blocks, seed=0):
    """The smallest pool that holds one request of full length, and a few blocks more."""
    return Simulation(config, -(-MAX_MODEL_LEN // config.block_size) + 1 + spare_blocks, seed)


# The state machine ----------------------------------------------------------------------------------------------------


@st.composite
def configs(draw):
    window = draw(st.integers(2, 8))
    return make_config(
        mode=draw(st.sampled_from(["verify", "verify", "verify", "invariant"])),
        window_size=window,
        verify_batch_size=draw(st.integers(1, 4)),
        canonical_rows=draw(st.integers(max(4, window), 16)),
        max_num_seqs=draw(st.integers(1, 10)),
        max_num_batched_tokens=draw(st.none() | st.integers(1, 8)),
        block_size=draw(st.integers(2, 4)),
        enable_prefix_caching=draw(st.booleans()),
        max_queue_len=draw(st.integers(2, 8)),
    )


@st.composite
def prompts(draw):
    tail = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return [*SHARED_PREFIX[: draw(st.integers(0, len(SHARED_PREFIX)))], *tail]


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.integers(1, MAX_TOKENS))
    return SamplingParams(
        deterministic=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 2])),
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([None, [6], [EOS, 5]])),
        stop=draw(st.sampled_from([None, "abc", ["bb", "ca"]])),
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


class EngineMachine(RuleBasedStateMachine):
    """Submit, step, cancel, preempt and fail in any order; the simulation checks after each."""

    def __init__(self):
        super().__init__()
        self.simulation = None
        self.is_violated = False

    @initialize(config=configs(), spare_blocks=st.sampled_from([0, 2, 8, 60]), seed=st.integers(0, 2**16))
    def start(self, config, spare_blocks, seed):
        self.simulation = make_simulation(config, spare_blocks, seed)

    @rule(prompt=prompts(), params=sampling_params())
    def submit(self, prompt, params):
        waiting = len(self.simulation.core.scheduler.waiting)
        has_room = waiting + params.n <= self.simulation.config.max_queue_len
        if has_room:
            self.simulation.submit(prompt, params)
        else:
            with pytest.raises(QueueFullError, match="max_queue_len"):
                self.simulation.submit(prompt, params)
        assert len(self.simulation.core.scheduler.waiting) == waiting + params.n * has_room

    @precondition(lambda self: self.simulation.core.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count):
        self._checked(lambda: [self.simulation.step() for _ in range(count)])

    @precondition(lambda self: self.simulation.requests)
    @rule(choice=st.integers(0, 2**16))
    def cancel(self, choice):
        self._checked(lambda: self.simulation.cancel(_pick(self.simulation.requests, choice)))

    @precondition(lambda self: self.simulation.core.scheduler.running)
    @rule(choice=st.integers(0, 2**16))
    def preempt(self, choice):
        self._checked(lambda: self.simulation.preempt(_pick(self.simulation.core.scheduler.running, choice)))

    @precondition(lambda self: self.simulation.core.scheduler.running)
    @rule()
    def fail_next_pass(self):
        self.simulation.runner.fail_next = True

    @rule(wrong=st.sampled_from([0.0, 0.01, 0.2, 1.0]), unusable=st.sampled_from([0.0, 0.0, 0.05]))
    def change_adversary(self, wrong, unusable):
        self.simulation.runner.wrong_rate, self.simulation.runner.unusable_rate = wrong, unusable

    def teardown(self):
        if self.simulation is not None and not self.is_violated:
            self.simulation.run()

    def _checked(self, operation):
        self.is_violated = True
        operation()
        self.is_violated = False


def _pick(items, choice):
    return items[choice % len(items)]


class TestAnyInterleaving(EngineMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
class TestAnyInterleavingForLong(EngineMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80)


# Random workloads by seed, where hypothesis would shrink for nothing ----------------------------------------------------


def random_config(random):
    window = random.randint(2, 8)
    return make_config(
        mode=random.choice(["verify", "verify", "verify", "invariant"]),
        window_size=window,
        verify_batch_size=random.randint(1, 4),
        canonical_rows=max(window, random.choice([4, 6, 8, 12, 16])),
        max_num_seqs=random.randint(1, 10),
        max_num_batched_tokens=random.choice([None, None, random.randint(1, 8)]),
        block_size=random.randint(2, 4),
        enable_prefix_caching=random.random() < 0.8,
    )


def random_prompt(random):
    return [*SHARED_PREFIX[: random.randint(0, 10)], *(random.randint(1, 3) for _ in range(random.randint(1, 3)))]


def random_params(random, **fields):
    max_tokens = random.randint(1, MAX_TOKENS)
    drawn = {
        "deterministic": random.random() < 0.6,
        "n": random.choice([1, 1, 2]),
        "seed": random.randint(0, 3),
        "max_tokens": max_tokens,
        "min_tokens": random.randint(0, min(3, max_tokens)),
        "ignore_eos": random.random() < 0.6,
        "stop_token_ids": random.choice([None, None, [6]]),
        "stop": random.choice([None, None, "abc", ["bb", "ca"]]),
        "logprobs": random.choice([None, 0]),
        "prompt_logprobs": random.choice([None, None, 0]),
    }
    return SamplingParams(**(drawn | fields))


def disturbed_run(seed, num_operations=80):
    """A run with arrivals, cancellations, preemptions, a failing pass now and then, and a changing adversary."""
    random = Random(seed)
    simulation = make_simulation(random_config(random), random.choice([0, 2, 8, 60]), seed)
    scheduler = simulation.core.scheduler
    for _ in range(num_operations):
        dice = random.random()
        if dice < 0.15 or not scheduler.has_work:
            simulation.submit(random_prompt(random), random_params(random))
        elif dice < 0.17:
            simulation.cancel(random.choice(simulation.requests))
        elif dice < 0.21 and scheduler.running:
            simulation.preempt(random.choice(scheduler.running))
        elif dice < 0.22:
            simulation.runner.fail_next = True
        elif dice < 0.25:
            simulation.runner.wrong_rate = random.choice([0.0, 0.01, 0.2, 1.0])
            simulation.runner.unusable_rate = random.choice([0.0, 0.0, 0.0, 0.05])
        else:
            simulation.step()
    simulation.run()
    return simulation


def quiet_run(config, *, spare_blocks=8, wrong_rate=0.0, num_requests=10, seed=5):
    """The same deterministic requests for every configuration and adversary."""
    random = Random(seed)
    simulation = make_simulation(config, spare_blocks)
    simulation.runner.wrong_rate = wrong_rate
    for _ in range(num_requests):
        simulation.submit(random_prompt(random), random_params(random, deterministic=True, n=1))
        simulation.step()
    simulation.run()
    return simulation


def crowded_run(seed):
    """Many ordinary requests among prompts and windows, and canonical passes that are too small for all of them."""
    random = Random(seed)
    simulation = make_simulation(make_config(canonical_rows=4, max_num_seqs=12), spare_blocks=200, seed=seed)
    for _ in range(40):
        params = random_params(random, n=1, max_tokens=MAX_TOKENS, min_tokens=3, ignore_eos=True, stop=None)
        simulation.submit(random_prompt(random), params)
        simulation.step()
        simulation.step()
    simulation.run()
    return simulation


SEEDS = range(30)


def test_random_runs_keep_every_invariant_and_reach_what_they_are_for():
    runs = [disturbed_run(seed) for seed in SEEDS]
    requests = [request for run in runs for request in run.requests]
    assert {str(request.finish_reason.value) for request in requests} == {"stop", "length", "abort", "error"}
    assert {type(request.stop_reason) for request in requests} == {type(None), int, str}
    for statistic in ("num_windows", "num_rollbacks", "num_recomputed_tokens", "num_cached_tokens", "num_preemptions"):
        assert sum(getattr(request.stats, statistic) for request in requests) > 20, f"{statistic} is not exercised"
    complete = [request for request in requests if request.finish_reason.value in {"stop", "length"}]
    assert len(complete) > len(requests) / 2
    assert all(request.ledger.committed for request in complete)


def test_ordinary_requests_wait_one_pass_at_most_in_a_crowd():
    assert crowded_run(0).num_left_out > 5, "the simulation checks it, and it must happen"


def test_an_adversary_changes_rollbacks_and_never_outputs():
    runs = {rate: quiet_run(make_config(), wrong_rate=rate) for rate in (0.0, 0.01, 0.2, 1.0)}
    rollbacks = {rate: sum(r.stats.num_rollbacks for r in run.requests) for rate, run in runs.items()}
    assert rollbacks[0.0] == 0 < rollbacks[0.2] < rollbacks[1.0]
    assert all(run.outputs() == runs[0.0].outputs() for run in runs.values())
    assert all(output.token_ids for output in runs[0.0].outputs())


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "invariant"},
        {"window_size": 2},
        {"window_size": 8},
        {"verify_batch_size": 1},
        {"canonical_rows": 4},
        {"canonical_rows": 16},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 2},
        {"block_size": 3},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_the_configuration(fields):
    changed = quiet_run(make_config(**fields), wrong_rate=0.2)
    assert changed.outputs() == quiet_run(make_config()).outputs()


def test_memory_pressure_preempts_and_changes_nothing():
    tight = quiet_run(make_config(), spare_blocks=0, wrong_rate=0.2)
    roomy = quiet_run(make_config(), spare_blocks=100, wrong_rate=0.2)
    assert tight.outputs() == roomy.outputs()
    assert sum(request.stats.num_preemptions for request in roomy.requests) == 0
    assert sum(request.stats.num_preemptions for request in tight.requests) > 0


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a_failing_pass_ends_its_requests_and_nobody_else(num_steps):
    simulation = make_simulation(make_config(max_num_seqs=3), spare_blocks=20)
    for index in range(4):
        simulation.submit([1, 2, 3, index], SamplingParams(max_tokens=9, deterministic=index < 3, ignore_eos=True))
    for _ in range(num_steps):
        simulation.step()
    simulation.runner.fail_next = True
    simulation.step()
    ended = {request for request in simulation.requests if request.finish_reason == "error"}
    assert ended == {segment.request for segment in simulation.runner.last_pass.segments}
    assert all("RuntimeError: simulated failure" in request.error for request in ended)
    late = simulation.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=9, deterministic=True))
    simulation.run()
    others = [request for request in simulation.requests if request not in ended]
    assert set(late) <= set(others)
    assert all(request.finish_reason in {"stop", "length"} for request in others)


def test_unusable_logits_in_a_window_keep_what_came_before_and_end_the_request(monkeypatch):
    simulation = make_simulation(make_config(), spare_blocks=20)
    params = SamplingParams(max_tokens=11, deterministic=True, ignore_eos=True)
    (sick,) = simulation.submit([1, 2, 3], params)
    (well,) = simulation.submit([2, 1, 3], params)
    result = SimulatedRunner._result

    def poisoned(runner, segment):
        made = result(runner, segment)
        if segment.request is sick and segment.request.ledger.num_candidates and not segment.is_draft:
            made.generated[2] = UNUSABLE
        return made

    monkeypatch.setattr(SimulatedRunner, "_result", poisoned)
    simulation.may_fail.add(sick)
    simulation.run()
    assert sick.finish_reason == "error"
    assert "not finite" in sick.error
    assert len(sick.ledger.committed) == 3, "one token of the prompt's pass, two of the window"
    assert well.finish_reason == "length"


# Mutants: the checks above can fail --------------------------------------------------------------------------------------


def accept_a_wrong_candidate(patch):
    def lenient(candidates, generated):
        verdict = judge(candidates, generated)
        if not verdict.is_rollback:
            return verdict
        return replace(verdict, committed=(*verdict.committed[:-1], candidates[verdict.num_matched]))

    patch.setattr(ledger_module, "judge", lenient)


def commit_nothing_on_a_mismatch(patch):
    def harsh(candidates, generated):
        verdict = judge(candidates, generated)
        return replace(verdict, committed=verdict.committed[:-1]) if verdict.is_rollback else verdict

    patch.setattr(ledger_module, "judge", harsh)


def overlook_a_mismatch_on_the_last_candidate(patch):
    def careless(candidates, generated):
        verdict = judge(candidates, generated)
        return Verdict(verdict.committed, verdict.num_matched, max(0, verdict.num_dropped - 1))

    patch.setattr(ledger_module, "judge", careless)


def keep_the_candidates_after_a_mismatch(patch):
    advance = Ledger.advance

    def mutant(ledger, rows, generated):
        candidates = ledger.candidates
        verdict = advance(ledger, rows, generated)
        if verdict is not None and verdict.is_rollback:
            ledger.token_ids.extend(candidates[verdict.num_matched + 1 :])
        return verdict

    patch.setattr(Ledger, "advance", mutant)


def store_the_watermark_apart(patch):
    patch.setattr(Ledger, "watermark", property(lambda ledger: ledger._canonical))


def commit_candidates_at_once(patch):
    draft = Ledger.draft

    def mutant(ledger, token_id):
        draft(ledger, token_id)
        ledger.num_committed = ledger.num_tokens - ledger.prompt_len

    patch.setattr(Ledger, "draft", mutant)


def keep_tokens_after_the_stop(patch):
    patch.setattr(Ledger, "truncate", lambda _ledger, _num_committed: None)


def sample_with_the_newest_prefix(patch):
    sample_row = Request.sample_row
    patch.setattr(Request, "sample_row", lambda request, _position: sample_row(request, request.ledger.num_tokens - 1))


def draft_without_limit(patch):
    patch.setattr(GroupingPolicy, "can_draft", lambda _policy, _state: True)


def trim_without_release(patch):
    def mutant(table, num_positions):
        del table.blocks[table._pool.blocks_for(num_positions) :]

    patch.setattr(PageTable, "trim", mutant)


def release_without_forgetting(patch):
    patch.setattr(PageTable, "free", lambda table: table._pool.release(reversed(table.blocks)))


def share_without_a_reference(patch):
    patch.setattr(BlockPool, "share", lambda _pool, _blocks: None)


def evict_without_telling_the_cache(patch):
    patch.setattr(BlockPool, "_evict", lambda pool: pool._evictable.popitem(last=False)[0])


def publish_above_the_watermark(patch):
    publish = PrefixCache.publish
    patch.setattr(PrefixCache, "publish", lambda cache, table, ids, _watermark: publish(cache, table, ids, len(ids)))


def publish_without_the_parent(patch):
    publish = PrefixCache.publish

    def mutant(cache, table, token_ids, watermark):
        table.cached_parent = 0
        publish(cache, table, token_ids, watermark)

    patch.setattr(PrefixCache, "publish", mutant)


def verify_into_other_slots(patch):
    write = SimulatedRunner._write

    def mutant(runner, segment, written, **flags):
        cells = runner.cells
        if segment.request.ledger.num_candidates and not segment.is_draft:
            runner.cells = dict(cells)
        write(runner, segment, written, **flags)
        runner.cells = cells

    patch.setattr(SimulatedRunner, "_write", mutant)


def preempt_without_freeing(patch):
    preempt = Scheduler.preempt

    def mutant(scheduler, request):
        blocks = list(request.pages.blocks)
        scheduler._pool.share(blocks)
        preempt(scheduler, request)
        request.pages.blocks.extend(blocks)

    patch.setattr(Scheduler, "preempt", mutant)


def make_ordinary_requests_wait(patch):
    is_due = Scheduler._is_canonical_due

    def mutant(scheduler, work):
        scheduler._left_out = False
        return is_due(scheduler, work)

    patch.setattr(Scheduler, "_is_canonical_due", mutant)


def survive_a_failing_pass(patch):
    patch.setattr(EngineCore, "_fail_pass", lambda _core, _work, _error: [])


def stay_silent_about_new_tokens(patch):
    step = EngineCore.step
    patch.setattr(EngineCore, "step", lambda core: [request for request in step(core) if request.is_finished])


MUTANTS = [
    accept_a_wrong_candidate,
    commit_nothing_on_a_mismatch,
    overlook_a_mismatch_on_the_last_candidate,
    keep_the_candidates_after_a_mismatch,
    store_the_watermark_apart,
    commit_candidates_at_once,
    keep_tokens_after_the_stop,
    sample_with_the_newest_prefix,
    draft_without_limit,
    trim_without_release,
    release_without_forgetting,
    share_without_a_reference,
    evict_without_telling_the_cache,
    publish_above_the_watermark,
    publish_without_the_parent,
    verify_into_other_slots,
    preempt_without_freeing,
    make_ordinary_requests_wait,
    survive_a_failing_pass,
    stay_silent_about_new_tokens,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012
        for seed in SEEDS:
            disturbed_run(seed)
        crowded_run(0)
