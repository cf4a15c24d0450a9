"""Spot checks: directly committed rows are run again now and then, and a difference ends direct commits for good.

Over the simulated model for who is checked and when, over a tiny model for bits.
"""

from __future__ import annotations

import logging

import pytest
import torch

from harness import bits, make_engine
from llm42.engine import calibration
from llm42.engine.collect import OutputCollector
from llm42.engine.scheduler import is_direct
from llm42.kernels.atlas import BUCKETS, Atlas
from llm42.protocol import ShapeClass
from llm42.sampling.params import SamplingParams
from simulated import SimulatedRunner
from simulation import make_config, make_simulation
from tiny_models import VOCAB_SIZE, write_tiny_model

# Who is checked, and when ---------------------------------------------------------------------------------------------


class Observed:
    """A simulation in auto mode that remembers the direct rows and the spot checks of its passes."""

    def __init__(self, *, row_counts=range(1, 17), interval=4, num_requests=4, max_tokens=40, **fields):
        self.simulation = make_simulation(make_config(mode="auto", **fields), 300, row_counts=row_counts)
        self.core, self.runner = self.simulation.core, self.simulation.runner
        self.scheduler = self.core.scheduler
        self.scheduler.spot_check_interval = interval
        self.num_direct = 0
        self.checks, self.passes = [], []
        self._check_pass, self.runner.on_pass = self.runner.on_pass, self._remember
        for index in range(num_requests):
            params = SamplingParams(max_tokens=max_tokens, deterministic=True, ignore_eos=True, logprobs=0)
            self.simulation.submit([1, 2, 3, index % 4, index // 4], params)

    def _remember(self, work):
        self._check_pass(work)
        self.passes.append((work, self.scheduler.commits_directly))
        for segment in work.segments:
            self.num_direct += is_direct(segment)
            if segment.num_checked:
                published = segment.request.pages.num_published * self.simulation.pool.block_size
                self.checks.append((segment, published))

    def run(self):
        self.simulation.run()
        return self


@pytest.mark.parametrize("interval", [1, 3, 8, 50])
def test_one_in_so_many_directly_committed_tokens_is_checked(interval):
    ran = Observed(interval=interval, block_size=16).run()
    assert ran.num_direct > 100
    assert ran.core.num_spot_checked == sum(segment.num_checked for segment, _ in ran.checks)
    assert ran.num_direct / interval - 16 <= ran.core.num_spot_checked <= ran.num_direct / interval
    assert ran.core.num_spot_checked > 0
    assert ran.core.num_violations == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_neither_the_prompt_nor_a_published_block_is_written_again(block_size, enable_prefix_caching):
    """(The simulated runner checks the latter for every row that is written.)"""
    ran = Observed(interval=1, block_size=block_size, enable_prefix_caching=enable_prefix_caching).run()
    assert ran.checks
    for segment, published in ran.checks:
        assert segment.rows.start >= max(segment.request.ledger.prompt_len, published)
        assert len(segment.rows) == segment.num_checked + 1
    assert any(published for _, published in ran.checks) == enable_prefix_caching


@pytest.mark.parametrize("mode", ["verify", "invariant"])
def test_no_other_mode_makes_spot_checks(mode):
    simulation = make_simulation(make_config(mode=mode), 300, row_counts=range(1, 17))
    simulation.core.scheduler.spot_check_interval = 1
    (request,) = simulation.submit([1, 2, 3], SamplingParams(max_tokens=40, deterministic=True, ignore_eos=True))
    simulation.run()
    assert len(request.ledger.committed) == 40
    assert simulation.core.num_spot_checked == 0


def test_ordinary_requests_are_not_checked():
    simulation = make_simulation(make_config(mode="auto"), 300, row_counts=range(1, 17))
    simulation.core.scheduler.spot_check_interval = 1
    simulation.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    simulation.run()
    assert simulation.core.num_spot_checked == 0


def test_a_check_takes_free_rows_only():
    ran = Observed(row_counts=[4], canonical_rows=4, num_requests=4, interval=1).run()
    full = [work for work, _ in ran.passes if work.is_canonical and len(work.segments) == 4]
    assert len(full) > 20
    assert not any(segment.num_checked for work in full for segment in work.segments)


# A violation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_violation_is_counted_once_and_ends_direct_commits(num_requests):
    observed = Observed(row_counts=[1, 2, 3, 6, 12], num_requests=num_requests)
    observed.runner.violation_rate = 1.0
    observed.run()
    assert observed.runner.num_violations == observed.core.num_violations == 1
    assert len(observed.checks) == 1
    after = [work for work, commits_directly in observed.passes if not commits_directly]
    assert {work.num_rows for work in after if work.is_canonical} == {12}
    assert any(not work.is_canonical for work in after), "from then on tokens are drafted"
    assert sum(request.stats.num_windows for request in observed.simulation.requests) > 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_after_a_violation_all_kv_is_computed_again(enable_prefix_caching):
    observed = Observed(row_counts=[1, 2, 3, 6, 12], enable_prefix_caching=enable_prefix_caching)
    cache, requests = observed.core.cache, observed.simulation.requests
    while not observed.checks:
        observed.runner.violation_rate = 1.0
        before = len(cache) if enable_prefix_caching else 0
        observed.simulation.step()
    assert observed.core.num_violations == 1
    assert (before > 0) == enable_prefix_caching
    assert not enable_prefix_caching or len(cache) == 0
    assert observed.scheduler.running == []
    assert list(observed.scheduler.waiting) == requests, "in the order in which they came"
    assert observed.core.pool.num_free == observed.core.pool.num_usable
    observed.run()
    assert [request.stats.num_preemptions for request in requests] == [1] * len(requests)


def test_without_a_violation_direct_commits_go_on():
    observed = Observed(row_counts=[1, 2, 3, 6, 12]).run()
    assert observed.checks
    assert all(commits_directly for _, commits_directly in observed.passes)
    assert sum(request.stats.num_windows for request in observed.simulation.requests) == 0


@pytest.mark.parametrize("num_ordinary", [0, 9])
def test_direct_commits_can_end_at_any_step_with_candidates_outstanding_or_not(num_ordinary):
    most_candidates = 0
    for num_steps in range(12):
        observed = Observed(row_counts=[1, 2, 3, 6, 8], num_requests=3, max_num_seqs=20)
        for index in range(num_ordinary):
            observed.simulation.submit([1, 2, index], SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(num_steps):
            observed.simulation.step()
        requests = observed.simulation.requests
        most_candidates = max(most_candidates, *(request.ledger.num_candidates for request in requests))
        observed.scheduler.stop_direct_commits()
        observed.run()
        assert all(request.finish_reason == "length" for request in requests)
    assert (most_candidates > 0) == (num_ordinary > 0), "only a crowd is drafted for"


def test_ending_direct_commits_twice_is_as_good_as_once():
    scheduler = Observed(row_counts=[1, 2, 64, 200]).scheduler
    scheduler.stop_direct_commits()
    once = scheduler.shapes
    assert once.canonical == ShapeClass([64])
    scheduler.stop_direct_commits()
    assert scheduler.shapes == once
    assert not scheduler.commits_directly


def test_a_violation_counts_even_if_the_request_fails_in_the_same_pass(monkeypatch):
    observed = Observed()
    result = SimulatedRunner._result

    def failing(runner, segment):
        made = result(runner, segment)
        if segment.num_checked:
            made.error, made.violation = "cannot be scored", "other tokens"
        return made

    monkeypatch.setattr(SimulatedRunner, "_result", failing)
    while not observed.checks:
        observed.core.step()
    assert observed.core.num_violations == 1
    assert not observed.scheduler.commits_directly
    assert [request.error for request in observed.simulation.requests].count("cannot be scored") == 1


# Bits -----------------------------------------------------------------------------------------------------------------

NUM_REQUESTS, MAX_TOKENS = 5, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("spot-check"))


class Direct:
    """A tiny model whose requests decode in passes of eight rows, three of them free, and are committed directly."""

    def __init__(self, model, *, interval=1, **fields):
        # Logits in groups of four: the rows of a spot check and the new row may lie in different ones.
        rows = {"canonical_rows": 8, "canonical_logit_rows": 4, "max_num_seqs": NUM_REQUESTS}
        self.engine = make_engine(model, mode="auto", kernels="portable", **{**rows, **fields})
        self.core, self.scheduler = self.engine.core, self.engine.core.scheduler
        self.scheduler.spot_check_interval = interval
        self.groups = [
            self.engine.make_requests(
                {"prompt_token_ids": [7 * index + 3, 5, 11]},
                SamplingParams(
                    temperature=0.8 * (index % 2),
                    seed=index,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                    deterministic=True,
                    logprobs=3,
                ),
            )
            for index in range(NUM_REQUESTS)
        ]
        for group in self.groups:
            self.core.add(group.sequences)

    def step(self, count):
        for _ in range(count):
            self.core.step()
        return self

    def run(self):
        while self.core.has_work:
            self.core.step()
        return [bits(OutputCollector(group, self.engine.tokenizer).take()) for group in self.groups]

    def slot(self, request, position):
        block_size = self.core.pool.block_size
        return request.pages.blocks[position // block_size] * block_size + position % block_size

    def damage(self, damage):
        """Call a function of the segment just before the next spot check, once."""
        execute = self.core.runner.execute

        def damaged(work):
            for segment in work.segments:
                if segment.num_checked:
                    damage(segment)
                    self.core.runner.execute = execute
            return execute(work)

        self.core.runner.execute = damaged

    def flip_bit(self, request, position, *, layer=1, bit=0):
        """Change one bit of a key, as a cosmic ray or another order of additions would."""
        kv, slots = self.core.runner._kv, torch.tensor([self.slot(request, position)])
        values = kv.read(slots).contiguous()
        values[layer, 0, 0, 0].view(torch.int16)[3] ^= 1 << bit
        kv.write(slots, values)


@pytest.fixture(scope="module")
def unchecked(model):
    """What the requests give without any spot check."""
    direct = Direct(model, interval=10**9)
    outputs = direct.run()
    assert direct.core.num_spot_checked == 0
    return outputs


def test_spot_checks_that_share_a_pass_change_no_token_and_no_logprob(model, unchecked):
    direct = Direct(model)
    assert direct.run() == unchecked
    assert direct.core.num_spot_checked > 20
    assert direct.core.num_violations == 0
    assert all(len(output.logprobs) == len(output.token_ids) == MAX_TOKENS for output in unchecked)


def test_the_runner_hands_out_the_new_rows_result_only(model):
    direct = Direct(model)
    execute, checked = direct.core.runner.execute, []

    def remember(work):
        results = execute(work)
        for segment, result in zip(work.segments, results, strict=True):
            if segment.num_checked:
                # Copies: the engine goes on with these.
                checked.append((segment.num_checked, list(result.generated), list(result.logprobs), result.num_rows))
        return results

    direct.core.runner.execute = remember
    direct.run()
    assert max(num_checked for num_checked, *_ in checked) >= 3
    for _, generated, logprobs, num_rows in checked:
        assert len(generated) == 1
        assert [score.token_id for score in logprobs] == generated
        assert num_rows == 8


@pytest.mark.parametrize("bit", [0, 7, 14])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_flipped_bit_of_a_checked_row_is_found_reported_and_repaired(model, unchecked, caplog, layer, bit):
    direct = Direct(model).step(6)
    assert direct.core.num_spot_checked > 0
    assert direct.core.num_violations == 0
    direct.damage(lambda segment: direct.flip_bit(segment.request, segment.rows.start, layer=layer, bit=bit))
    with caplog.at_level(logging.ERROR):
        outputs = direct.run()
    assert direct.core.num_violations == 1
    (record,) = caplog.records
    assert "spot check failed: other KV at positions" in record.message
    assert "of 8 rows of the canonical class ShapeClass(8)" in record.message
    assert not direct.scheduler.commits_directly
    assert outputs == unchecked, "the row's KV was computed again before anybody read it"


def test_a_flip_below_the_checked_rows_is_found_by_what_they_compute_from_it(model):
    direct = Direct(model)
    direct.damage(lambda segment: direct.flip_bit(segment.request, 0, layer=0, bit=9))
    outputs = direct.run()
    assert direct.core.num_violations == 1
    assert all(len(output.token_ids) == MAX_TOKENS for output in outputs), "generation goes on"


def test_a_wrong_token_is_found(model, caplog):
    direct = Direct(model)

    def replace_newest(segment):
        tokens = segment.request.ledger.token_ids
        tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE

    direct.damage(replace_newest)
    direct.run()
    assert direct.core.num_violations == 1
    assert "spot check failed: other tokens at positions" in caplog.text


def test_a_flip_is_not_found_where_nothing_is_checked(model):
    """The partner: without spot checks nobody looks."""
    direct = Direct(model, interval=10**9).step(6)
    request = direct.scheduler.running[0]
    direct.flip_bit(request, request.ledger.watermark - 1)
    direct.run()
    assert direct.core.num_violations == 0


def test_after_a_violation_logits_too_come_from_passes_of_one_row_count(model, monkeypatch):
    known = Atlas({}, (8,), (1, 2, 4), {})
    monkeypatch.setattr(calibration, "_atlas", lambda *_: known)
    direct = Direct(model)
    logits, counts = direct.engine.decoder.logits, []

    def count(hidden):
        counts.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(direct.engine.decoder, "logits", count)
    direct.step(6)
    assert set(counts) > {4}
    direct.damage(lambda segment: direct.flip_bit(segment.request, segment.rows.start))
    while not direct.core.num_violations:
        direct.core.step()
    execute, kinds = direct.core.runner.execute, []

    def canonical_only(work):
        before = len(counts)
        results = execute(work)
        if work.is_canonical:
            kinds.extend(counts[before:])
        return results

    direct.core.runner.execute = canonical_only
    direct.run()
    assert set(kinds) == {4}


@pytest.mark.parametrize("is_known", [False, True])
def test_what_was_cached_under_a_false_class_is_not_used_after_the_violation(model, monkeypatch, is_known):
    """No two row counts of these kernels agree: KV of another pass than the one of 64 rows would show."""
    monkeypatch.setattr(calibration, "_atlas", lambda *_: Atlas({}, BUCKETS, (16,), {}))
    monkeypatch.setattr(calibration, "self_test", lambda *_: None)
    fields = {"kernels": "jitter", "mode": "auto", "canonical_rows": None}
    engine, prompt = make_engine(model, **fields), range(3, 43)
    if is_known:
        generate(engine, prompt)
    engine.core.scheduler.spot_check_interval = 2
    generate(engine, range(500, 490, -1))
    assert engine.core.num_violations == 1
    monkeypatch.undo()
    fallback = make_engine(model, **{**fields, "mode": "invariant", "canonical_rows": 64})
    assert generate(engine, prompt) == generate(fallback, prompt)
    assert generate(engine, prompt) == generate(fallback, prompt), "and from the cache"


def generate(engine, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True, deterministic=True)
    group = engine.make_requests({"prompt_token_ids": list(prompt)}, params)
    engine.core.add(group.sequences)
    while engine.core.has_work:
        engine.core.step()
    output = bits(OutputCollector(group, engine.tokenizer).take())
    assert len(output.token_ids) == 12
    return output
