"""A run counts what really happened: tokens, times, passes, and outputs that are not what they were."""

from __future__ import annotations

import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.bench import measure
from llm42.bench.measure import References, Timeline, percentile, result_of, run_requests
from llm42.bench.memory import peak_rss_mib
from llm42.bench.workloads import BenchRequest, WorkloadSpec
from llm42.engine.core import PassRecord
from llm42.errors import RequestError

LENGTHS = (3, 9, 5, 1, 6, 2)


@pytest.fixture(scope="module")
def requests(tiny):
    synthetic = WorkloadSpec(name="synthetic", num_prompts=len(LENGTHS), input_len=12).make(tiny).requests
    return [BenchRequest(request.prompt_token_ids, length) for request, length in zip(synthetic, LENGTHS, strict=True)]


def record(prompt=0, decode=0, window=0, times=(0.0, 1.0, 0.0), canonical=False):
    return PassRecord(canonical, prompt, decode, window, *times)


def most_together(timelines):
    """The most requests that were in the engine at one time."""
    events = [(t.submitted, 1) for t in timelines] + [(t.arrivals[-1], -1) for t in timelines]
    together, most = 0, 0
    for _, change in sorted(events):
        together += change
        most = max(most, together)
    return most


@pytest.mark.parametrize("in_batches", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_request_gives_the_tokens_that_were_asked_for_and_the_figures_count_them(
    engine, requests, in_batches, deterministic
):
    flags = [deterministic] * len(requests)
    trace = run_requests(engine, requests, flags, 3, in_batches=in_batches)
    assert [timeline.request.ledger.num_committed for timeline in trace.timelines] == list(LENGTHS)
    result = result_of(trace, engine.system_fingerprint, References())
    assert result.num_requests == len(LENGTHS)
    assert result.output_tokens == sum(LENGTHS)
    assert result.prompt_tokens == 12 * len(LENGTHS)
    assert result.output_tok_s == pytest.approx(sum(LENGTHS) / trace.wall_s)
    assert result.total_tok_s == pytest.approx((sum(LENGTHS) + 12 * len(LENGTHS)) / trace.wall_s)
    assert result.num_passes == len(trace.passes) > 0
    assert result.prefill_share + result.decode_share + result.verify_share == pytest.approx(1)
    assert (result.num_windows > 0) is deterministic
    assert (result.recomputed_share is None) is not deterministic
    assert (result.ordinary_ttft_ms_p50 is None) is deterministic
    assert (result.deterministic_ttft_ms_p50 is None) is not deterministic


@pytest.mark.parametrize("in_batches", [True, False])
def test_no_more_requests_run_together_than_the_concurrency(engine, requests, in_batches):
    for concurrency in (1, 2, 4):
        trace = run_requests(engine, requests, [False] * len(requests), concurrency, in_batches=in_batches)
        assert most_together(trace.timelines) == concurrency


def test_batches_wait_for_one_another_and_clients_do_not(engine, requests):
    def starts_early(*, in_batches):
        timelines = run_requests(engine, requests, [False] * len(requests), 2, in_batches=in_batches).timelines
        return timelines[2].submitted < max(timeline.arrivals[-1] for timeline in timelines[:2])

    assert not starts_early(in_batches=True)
    assert starts_early(in_batches=False)


def test_an_ordinary_token_arrives_alone_and_no_later_than_the_run_ends(engine, requests):
    trace = run_requests(engine, requests, [False] * len(requests), 4, in_batches=True)
    for timeline in trace.timelines:
        assert len(timeline.arrivals) == timeline.request.ledger.num_committed
        assert timeline.time_to_first_token_s > 0
        assert timeline.arrivals == sorted(timeline.arrivals)
        assert timeline.arrivals[-1] - timeline.submitted <= trace.wall_s


def test_a_run_leaves_the_engine_idle_and_unobserved(engine, requests):
    run_requests(engine, requests, [True] * len(requests), 3, in_batches=True)
    core = engine.core
    assert not core.has_work
    assert core.observer is None
    assert core.pool.num_free == core.pool.num_usable


def test_a_failed_request_is_an_error_and_not_a_figure(engine, requests, monkeypatch):
    def fail(_work):
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.core.runner, "execute", fail)
    with pytest.raises(RequestError, match="out of order"):
        run_requests(engine, requests, [False] * len(requests), 3, in_batches=True)
    assert not engine.core.has_work


def test_an_output_that_is_not_the_first_ones_is_counted_for_its_kind_only():
    def timeline(output, *, prompt=(1, 2), deterministic=True):
        spec = SimpleNamespace(params=SimpleNamespace(deterministic=deterministic), prompt_token_ids=prompt)
        return Timeline(SimpleNamespace(spec=spec, ledger=SimpleNamespace(committed=output)))

    references = References()
    first = [timeline([5, 6]), timeline([7], prompt=(3,)), timeline([9], deterministic=False)]
    other = [timeline([5, 8]), timeline([7], prompt=(3,)), timeline([9], deterministic=False)]
    for timelines, changed in ((first, 0), (first, 0), (other, 1), (first, 0)):
        assert references.num_changed("fp", timelines, deterministic=True) == changed
        assert references.num_changed("fp", timelines, deterministic=False) == 0
    # Another contract promises nothing about this one's bits.
    assert references.num_changed("other", other, deterministic=True) == 0


def test_step_time_is_shared_by_rows_and_what_is_outside_the_pass_is_bookkeeping():
    passes = [record(prompt=3, decode=1, times=(0.0, 4.0, 0.0)), record(decode=1, window=1, times=(0.5, 1.0, 0.5))]
    assert measure._shares(passes) == pytest.approx((3 / 6, 2 / 6, 1 / 6, 1 / 6))


@given(st.lists(st.floats(0, 1e6), min_size=2))
def test_percentiles_agree_with_the_standard_librarys(values):
    quantiles = statistics.quantiles(values, n=100, method="inclusive")
    for q in (1, 50, 90, 99):
        assert percentile(values, q) == pytest.approx(quantiles[q - 1])
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


def test_percentiles_of_one_value_are_that_value():
    assert {percentile([3.5], q) for q in (0, 50, 99, 100)} == {3.5}


@pytest.mark.skipif(peak_rss_mib() is None, reason="this system does not tell peak memory")
def test_peak_memory_grows_with_a_large_block():
    """In a process of its own: what other tests have used must not hide the block."""
    code = (
        "from llm42.bench.memory import peak_rss_mib, reset_peak\n"
        "reset_peak()\n"
        "before = peak_rss_mib()\n"
        "block = bytearray(64 << 20)\n"
        "block[::4096] = b'x' * len(block[::4096])  # touched, so that it is resident\n"
        "print(peak_rss_mib() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 60
