"""Prometheus metrics: the engine's totals as they are at a scrape, and histograms of what clients got.

The names are vLLM's with another prefix, so that its users know them; docs/metrics.md lists all. Invariant: nothing
here runs on the engine's thread, and a token costs the event loop no more than a clock reading and a bisection.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from llm42.engine.stats import EngineStats, Histogram
from llm42.outputs import RequestMetrics, RequestOutput
from llm42.sampling.params import SamplingParams

_PREFIX = "llm42:"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_N = (1, 2, 5, 10, 20)


class ServerMetrics(Collector):
    """All metrics of one server.

    Args:
        stats: Takes a snapshot of the engine; called at each scrape, in whatever thread scrapes.
        model_name: The label ``model_name`` of all metrics of the model.
        max_model_len: Where the buckets of token counts end.
    """

    def __init__(self, stats: Callable[[], EngineStats], model_name: str, max_model_len: int) -> None:
        self._stats = stats
        self._model_name = model_name
        tokens = _one_two_five(max_model_len)
        self.time_to_first_token = Histogram(_FIRST_TOKEN)
        self.inter_token_latency = Histogram(_PER_TOKEN)
        self.time_per_output_token = Histogram(_PER_TOKEN)
        self.latency = Histogram(_REQUEST)
        self.queue_time = Histogram(_REQUEST)
        self.prefill_time = Histogram(_REQUEST)
        self.decode_time = Histogram(_REQUEST)
        self.inference_time = Histogram(_REQUEST)
        self.prompt_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.num_outputs = Histogram(_N)
        self._http_requests: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def request(self, params: SamplingParams) -> RequestMeter:
        """Meter a request that arrives now."""
        return RequestMeter(self, params)

    def count_http_request(self, method: str, handler: str, status: int) -> None:
        """Count an answer.

        Args:
            method: GET, POST, ...
            handler: The route's template, not the path: a label must not have as many values as clients please.
            status: The status code.
        """
        self._http_requests[method, handler, str(status)] += 1

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The body and the content type for a scraper that sends this ``Accept`` header."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self._registry), _TEXT
        # All names are plain ones, and the client's negotiation would write `_` for `:` in OpenMetrics samples.
        body = openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return body, _OPENMETRICS

    def collect(self) -> Iterator[Metric]:
        """Everything but process metrics, as it is now."""
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._infos(stats)
        yield self._histogram("iteration_tokens_total", "Rows of engine passes.", stats.totals.tokens_per_pass)
        yield from self._histograms()
        http = CounterMetricFamily(f"{_PREFIX}http_requests", "Answers.", labels=["method", "handler", "status"])
        for labels, count in self._http_requests.copy().items():
            http.add_metric(labels, count)
        yield http

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, documentation, value in (
            ("num_requests_running", "Sequences that run.", stats.running),
            ("num_requests_waiting", "Sequences that wait.", stats.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 is all.", stats.kv_cache_usage),
            ("window_size", "W: rows of one verification window, at most.", stats.window_size),
            ("group_size", "G: windows that launch a verification pass.", stats.group_size),
            ("verify_group_fill", "Windows per verification pass, in parts of G.", stats.totals.group_fill),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", documentation, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        totals = stats.totals
        for name, documentation, value in (
            ("prompt_tokens", "Prompt tokens computed.", totals.prompt_rows),
            ("generation_tokens", "Output tokens committed.", totals.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens that the prefix cache had.", totals.prefix_cache_hits),
            ("num_preemptions", "Preempted sequences.", totals.preemptions),
            ("verify_passes", "Passes that verified candidates.", totals.verify_passes),
            ("verify_windows", "Windows of candidates verified.", totals.windows),
            ("rollbacks", "Windows with a wrong candidate.", totals.rollbacks),
            ("recomputed_tokens", "Candidates dropped.", totals.recomputed_tokens),
            ("spot_checked_tokens", "Directly committed tokens run again.", stats.spot_checked_tokens),
            ("spot_check_violations", "Spot checks that found other bits.", stats.violations),
        ):
            counter = CounterMetricFamily(f"{_PREFIX}{name}", documentation, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        passes = {"canonical": totals.canonical_passes, "fast": totals.fast_passes}
        rows = {
            "prompt": totals.prompt_rows,
            "decode": totals.decode_rows,
            "window": totals.window_rows,
            "padding": totals.padding_rows,
        }
        for name, documentation, label, counts in (
            ("request_success", "Sequences that ended.", "finished_reason", totals.finished),
            ("passes", "Passes of the engine.", "kind", passes),
            ("rows", "Rows of passes.", "kind", rows),
        ):
            counter = CounterMetricFamily(f"{_PREFIX}{name}", documentation, labels=["model_name", label])
            for label_value, count in counts.items():
                counter.add_metric([self._model_name, label_value], count)
            yield counter
        lag = SummaryMetricFamily(
            f"{_PREFIX}commit_lag_steps",
            "Engine steps from the draft of a window's oldest candidate to its verification.",
            labels=["model_name"],
        )
        lag.add_metric([self._model_name], totals.windows, totals.commit_lag_steps)
        yield lag

    def _infos(self, stats: EngineStats) -> Iterator[Metric]:
        canonical = {
            "rows": stats.canonical_rows,
            "logit_rows": stats.logit_rows,
            "mode": stats.mode,
            "kernels": stats.kernels,
            "fingerprint": stats.fingerprint,
        }
        cache = {
            "block_size": str(stats.block_size),
            "num_blocks": str(stats.kv_blocks),
            "enable_prefix_caching": str(stats.has_prefix_cache),
            "max_num_seqs": str(stats.max_num_seqs),
        }
        for name, documentation, value in (
            ("canonical_class", "The canonical class and what else names the contract.", canonical),
            ("cache_config", "KV memory and limits.", cache),
        ):
            info = InfoMetricFamily(f"{_PREFIX}{name}", documentation, labels=["model_name"])
            info.add_metric([self._model_name], value)
            yield info

    def _histograms(self) -> Iterator[Metric]:
        for name, documentation, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between deliveries of one output's tokens.", self.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean time of a request's tokens.", self.time_per_output_token),
            ("e2e_request_latency_seconds", "Arrival to last token.", self.latency),
            ("request_queue_time_seconds", "Waiting for the first pass.", self.queue_time),
            ("request_prefill_time_seconds", "First pass to first token.", self.prefill_time),
            ("request_decode_time_seconds", "First token to last token.", self.decode_time),
            ("request_inference_time_seconds", "First pass to last token.", self.inference_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of an output.", self.generation_tokens),
            ("request_params_max_tokens", "Parameter max_tokens.", self.max_tokens),
            ("request_params_n", "Parameter n.", self.num_outputs),
        ):
            yield self._histogram(name, documentation, histogram)

    def _histogram(self, name: str, documentation: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}{name}", documentation, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative, strict=True))
        family.add_metric([self._model_name], buckets, histogram.total)
        return family


class RequestMeter:
    """One request's way into the histograms: it is shown every item of the request's stream, or the whole output.

    A request that fails or is cancelled leaves the times of the tokens it had, and nothing else.
    """

    __slots__ = ("_arrived", "_delivered", "_metrics", "_num_tokens", "_params")

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._arrived = time.monotonic()
        self._delivered: dict[int, float] = {}
        """When each output had its newest tokens."""
        self._num_tokens: dict[int, int] = {}

    def observe(self, output: RequestOutput) -> None:
        """Take an item of the stream into account; the last one completes the request."""
        now = time.monotonic()
        for completion in output.outputs:
            if not completion.token_ids:
                continue
            last = self._delivered.get(completion.index)
            if last is not None:
                self._metrics.inter_token_latency.observe(now - last)
            elif not self._delivered:
                self._metrics.time_to_first_token.observe(now - self._arrived - _since_first_token(output.metrics))
            self._delivered[completion.index] = now
            self._num_tokens[completion.index] = self._num_tokens.get(completion.index, 0) + len(completion.token_ids)
        if output.finished:
            self._finish(output, now)

    def _finish(self, output: RequestOutput, now: float) -> None:
        metrics, times = self._metrics, output.metrics
        metrics.latency.observe(now - self._arrived)
        metrics.queue_time.observe(times.queue_time_s)
        metrics.inference_time.observe(times.total_time_s - times.queue_time_s)
        metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        metrics.num_outputs.observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.max_tokens.observe(self._params.max_tokens)
        for count in self._num_tokens.values():
            metrics.generation_tokens.observe(count)
        if times.time_to_first_token_s is None:
            return
        decode_time = _since_first_token(times)
        metrics.prefill_time.observe(times.time_to_first_token_s - times.queue_time_s)
        metrics.decode_time.observe(decode_time)
        if (longest := max(self._num_tokens.values(), default=0)) > 1:
            metrics.time_per_output_token.observe(decode_time / (longest - 1))


def _since_first_token(times: RequestMetrics) -> float:
    """How long ago, when an item was made, the engine had the request's first token: an item may be a whole output."""
    return 0.0 if times.time_to_first_token_s is None else times.total_time_s - times.time_to_first_token_s


def _one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the largest."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(largest))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= largest)
