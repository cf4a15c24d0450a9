"""Random interleavings of everything that happens to an engine, over the simulated model of `simulated.py`.

The simulation checks its invariants after every operation, so a test here mostly has to make things happen;
`test_engine_mutants.py` proves that the checks can fail.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llm42.errors import QueueFullError
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import UNUSABLE
from simulated import EOS, SimulatedRunner
from simulation import (
    MAX_TOKENS,
    SEEDS,
    SHARED_PREFIX,
    crowded_run,
    disturbed_run,
    make_config,
    make_simulation,
    quiet_run,
)

# The state machine ----------------------------------------------------------------------------------------------------


@st.composite
def configs(draw):
    window = draw(st.integers(2, 8))
    return make_config(
        mode=draw(st.sampled_from(["verify", "verify", "auto", "auto", "invariant"])),
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

    @initialize(
        config=configs(),
        spare_blocks=st.sampled_from([0, 2, 8, 60]),
        seed=st.integers(0, 2**16),
        row_counts=st.none() | st.lists(st.integers(1, 20), min_size=1, max_size=6),
    )
    def start(self, config, spare_blocks, seed, row_counts):
        self.simulation = make_simulation(config, spare_blocks, seed, row_counts)

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
    settings = settings(max_examples=1000, stateful_step_count=60)


# Fixed workloads ------------------------------------------------------------------------------------------------------


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


def test_a_segment_that_cannot_be_scored_ends_its_request_alone(monkeypatch):
    simulation = make_simulation(make_config(), spare_blocks=20)
    (sick,) = simulation.submit([1, 2, 3], SamplingParams(max_tokens=5, prompt_logprobs=0))
    (well,) = simulation.submit([2, 1, 3], SamplingParams(max_tokens=5, prompt_logprobs=0, deterministic=True))
    result = SimulatedRunner._result

    def failing(runner, segment):
        made = result(runner, segment)
        if segment.request is sick:
            made.error = "prompt_logprobs at position 1: simulated"
        return made

    monkeypatch.setattr(SimulatedRunner, "_result", failing)
    simulation.core.step()
    assert (sick.finish_reason, sick.error) == ("error", "prompt_logprobs at position 1: simulated")
    assert sick.pages.blocks == []
    assert well.ledger.num_committed == 1
