"""The engine's totals are what its requests and passes say, whatever disturbs the run; snapshots never go back."""

from __future__ import annotations

import threading
from dataclasses import fields
from itertools import pairwise
from random import Random

import pytest

from harness import make_engine
from llm42.engine.stats import Histogram, Totals, engine_stats
from llm42.sampling.params import SamplingParams
from simulation import make_config, make_simulation, random_config, random_params, random_prompt
from tiny_models import VOCAB_SIZE, write_tiny_model


def busy_run(seed):
    """Arrivals, cancellations, failing passes, wrong drafts, and too little memory; with an observer beside."""
    random = Random(seed)
    row_counts = random.choice([None, range(1, 17), [4, 8, 16]])
    simulation = make_simulation(random_config(random), random.choice([0, 2, 8]), seed, row_counts)
    simulation.runner.wrong_rate = random.choice([0.0, 0.2, 1.0])
    simulation.runner.violation_rate = random.choice([0.0, 0.2])
    simulation.runner.unusable_rate = random.choice([0.0, 0.05])
    records, planned = [], []
    simulation.core.observer = lambda record: (records.append(record), planned.append(simulation.runner.last_pass))
    for _ in range(60):
        dice = random.random()
        if dice < 0.25:
            simulation.submit(random_prompt(random), random_params(random))
        elif dice < 0.28 and simulation.requests:
            simulation.cancel(random.choice(simulation.requests))
        elif dice < 0.30:
            simulation.runner.fail_next = True
        else:
            simulation.step()
    simulation.run()
    return simulation, records, planned


SEEDS = range(12)


@pytest.fixture(scope="module")
def runs():
    return [busy_run(seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_totals_are_the_sums_over_all_requests(runs, seed):
    simulation, _, _ = runs[seed]
    totals, requests = simulation.core.totals, simulation.requests
    stats = [request.stats for request in requests]
    assert totals.generated_tokens == sum(request.ledger.num_committed for request in requests)
    assert totals.windows == sum(stat.num_windows for stat in stats)
    assert totals.rollbacks == sum(stat.num_rollbacks for stat in stats)
    assert totals.recomputed_tokens == sum(stat.num_recomputed_tokens for stat in stats)
    assert totals.preemptions == sum(stat.num_preemptions for stat in stats)
    reasons = [request.finish_reason.value for request in requests]
    assert totals.finished == {reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")}


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_those_of_the_passes_that_did_not_fail(runs, seed):
    simulation, records, planned = runs[seed]
    totals = simulation.core.totals
    assert totals.canonical_passes == sum(record.is_canonical for record in records)
    assert totals.fast_passes == sum(not record.is_canonical for record in records)
    for kind in ("prompt_rows", "decode_rows", "window_rows"):
        assert getattr(totals, kind) == sum(getattr(record, kind) for record in records)
    rows = totals.prompt_rows + totals.decode_rows + totals.window_rows
    assert (
        rows == sum(len(segment.rows) for work in planned for segment in work.segments) == totals.tokens_per_pass.total
    )
    assert rows + totals.padding_rows == sum(work.num_rows for work in planned)
    assert totals.tokens_per_pass.cumulative[-1] == len(records)


def test_the_runs_have_everything_that_is_counted(runs):
    for name in ("preemptions", "rollbacks", "recomputed_tokens", "prefix_cache_hits", "fast_passes", "padding_rows"):
        assert sum(getattr(simulation.core.totals, name) for simulation, _, _ in runs) > 0, name
    for reason in ("stop", "length", "abort", "error"):
        assert sum(simulation.core.totals.finished[reason] for simulation, _, _ in runs) > 0, reason


def test_a_run_without_an_observer_counts_the_same():
    def totals(observer):
        simulation = make_simulation(make_config(mode="verify"), 8)
        simulation.core.observer = observer
        for index in range(5):
            simulation.submit([1, 2, index], SamplingParams(max_tokens=9, deterministic=True, ignore_eos=True))
        simulation.run()
        counted = simulation.core.totals
        return {f.name: getattr(counted, f.name) for f in fields(counted) if f.name != "tokens_per_pass"}

    assert totals(None) == totals(lambda _record: None)


def test_the_prefix_cache_is_asked_once_per_sequence_and_not_where_the_prompt_is_scored():
    simulation = make_simulation(make_config(mode="verify", block_size=2), 40)
    for fields_ in ({}, {}, {"prompt_logprobs": 0}):
        simulation.submit([1, 2, 3, 1, 2], SamplingParams(max_tokens=3, ignore_eos=True, **fields_))
        simulation.run()
    totals = simulation.core.totals
    assert (totals.prefix_cache_queries, totals.prefix_cache_hits) == (10, 4)
    assert totals.prompt_rows == 5 + 1 + 5


@pytest.mark.parametrize("window_size", [2, 4, 7])
def test_a_candidate_of_a_lonely_request_waits_for_the_rest_of_its_window(window_size):
    simulation = make_simulation(make_config(mode="verify", window_size=window_size, verify_batch_size=1), 200)
    # The prompt gives the first token, and each window, of W - 1 candidates, gives W.
    params = SamplingParams(max_tokens=1 + 3 * window_size, deterministic=True, ignore_eos=True)
    simulation.submit([1, 2, 3], params)
    simulation.run()
    totals = simulation.core.totals
    assert totals.windows == totals.verify_passes == 3
    assert totals.commit_lag_steps == 3 * (window_size - 1)
    assert totals.group_fill == 1.0


def test_the_group_fill_is_windows_per_pass_in_parts_of_g():
    simulation = make_simulation(make_config(mode="verify", verify_batch_size=4, canonical_rows=16), 200)
    for _ in range(2):
        simulation.submit([1, 2, 3], SamplingParams(max_tokens=9, deterministic=True, ignore_eos=True))
    simulation.run()
    totals = simulation.core.totals
    assert totals.windows == 2 * totals.verify_passes > 0
    assert totals.group_fill == pytest.approx(0.5)


def test_a_histogram_counts_what_is_not_above_each_bound():
    histogram = Histogram((1, 2.5, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        histogram.observe(value)
    before = histogram.copy()
    histogram.observe(100)
    assert (before.cumulative, before.total) == ([2, 3, 4, 5], 24.0)
    assert histogram.cumulative[-1] == 6


# Snapshots ------------------------------------------------------------------------------------------------------------


def test_snapshots_from_another_thread_never_go_back(tmp_path):
    engine = make_engine(write_tiny_model(tmp_path / "model", "llama"), mode="verify", window_size=4)
    snapshots, is_over = [engine_stats(engine)], threading.Event()

    def watch():
        while not is_over.wait(0.002):
            snapshots.append(engine_stats(engine))

    params = SamplingParams(n=4, max_tokens=24, deterministic=True, ignore_eos=True, seed=1)
    group = engine.make_requests({"prompt_token_ids": [index % VOCAB_SIZE for index in range(5, 45)]}, params)
    engine.core.add(group.sequences)
    watcher = threading.Thread(target=watch)
    watcher.start()
    engine.pin_threads()
    while engine.core.has_work:
        engine.core.step()
    is_over.set()
    watcher.join()
    snapshots.append(engine_stats(engine))
    names = [f.name for f in fields(snapshots[0].totals) if f.type == "int"]
    for before, after in pairwise(snapshots):
        assert all(getattr(before.totals, name) <= getattr(after.totals, name) for name in names)
    assert any(snapshot.running and 0.0 < snapshot.kv_cache_usage < 1.0 for snapshot in snapshots)
    first, last = snapshots[0], snapshots[-1]
    assert (first.waiting, first.running, first.totals.generated_tokens) == (0, 0, 0)
    assert first.totals == Totals(), "a snapshot stays as it was"
    assert (last.waiting, last.running, last.kv_cache_usage) == (0, 0, 0.0)
    assert last.totals.generated_tokens == 4 * 24
    assert last.totals.finished["length"] == 4


def test_a_snapshot_names_what_the_engine_is(tmp_path):
    engine = make_engine(write_tiny_model(tmp_path / "model", "llama"), window_size=4, verify_batch_size=3)
    stats = engine_stats(engine)
    assert (stats.mode, stats.window_size, stats.group_size) == ("verify", 4, 3)
    assert (stats.canonical_rows, stats.logit_rows) == ("64", "16")
    assert stats.fingerprint == engine.system_fingerprint
    assert stats.kernels == engine.decoder.kernels.name
    assert stats.kv_blocks == engine.core.pool.num_usable
    assert stats.describe()["requests"] == {"running": 0, "waiting": 0, "max_running": 64, "finished": 0}
