"""Metrics: what is exposed is what happened, and the docs, the dashboard and the alerts speak of what is exposed."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llm42 import AsyncLLM, SamplingParams
from llm42.engine.stats import EngineStats, Totals
from llm42.outputs import CompletionOutput, RequestMetrics, RequestOutput
from llm42.server.metrics import ServerMetrics
from tiny_models import write_tiny_model

ROOT = Path(__file__).parents[3]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
STATS = EngineStats(
    totals=Totals(),
    running=2,
    waiting=3,
    max_num_seqs=64,
    kv_blocks_used=10,
    kv_blocks=40,
    block_size=16,
    has_prefix_cache=True,
    spot_checked_tokens=0,
    violations=0,
    mode="auto",
    kernels="native",
    window_size=32,
    group_size=8,
    canonical_rows="1-64",
    logit_rows="16",
    fingerprint="fp_0",
)


def make_metrics(stats=STATS):
    metrics = ServerMetrics(lambda: stats, "tiny", 4096)
    metrics.count_http_request("POST", "/v1/completions", 200)
    return metrics


def families(metrics):
    body, _ = metrics.exposition(OPENMETRICS)
    return list(parse_openmetrics(body.decode()))


def samples(metrics):
    """Values by name and labels, without the model's name."""
    result = {}
    for family in families(metrics):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            result[(sample.name, *labels.values())] = sample.value
    return result


def item(*token_ids, finished=False, index=0, **times):
    completion = CompletionOutput(index, "", list(token_ids), None, None)
    return RequestOutput("request", None, [1, 2, 3], None, [completion], finished, RequestMetrics(**times))


# What is exposed ------------------------------------------------------------------------------------------------------


def test_no_total_of_the_engine_is_forgotten():
    names = [f.name for f in fields(Totals) if f.type in {"int", "float"}]
    totals = replace(Totals(), **{name: 1000 + index for index, name in enumerate(names)})
    totals.finished = {"stop": 2001, "length": 2002, "abort": 2003, "error": 2004}
    totals.tokens_per_pass.observe(3001)
    stats = replace(STATS, totals=totals, spot_checked_tokens=4001, violations=4002)
    exposed = list(samples(make_metrics(stats)).values())
    wanted = [*range(1000, 1000 + len(names)), *totals.finished.values(), 3001, 4001, 4002]
    assert [value for value in wanted if exposed.count(value) == 0] == []


def test_values_stand_under_the_names_that_users_of_vllm_know():
    totals = replace(Totals(), prompt_rows=11, generated_tokens=12, prefix_cache_hits=13, windows=14, rollbacks=15)
    totals.finished["length"] = 16
    exposed = samples(make_metrics(replace(STATS, totals=totals)))
    assert exposed["llm42:num_requests_running",] == 2
    assert exposed["llm42:num_requests_waiting",] == 3
    assert exposed["llm42:kv_cache_usage_perc",] == 0.25
    assert exposed["llm42:prompt_tokens_total",] == 11
    assert exposed["llm42:generation_tokens_total",] == 12
    assert exposed["llm42:prefix_cache_hits_total",] == 13
    assert exposed["llm42:verify_windows_total",] == exposed["llm42:commit_lag_steps_count",] == 14
    assert exposed["llm42:rollbacks_total",] == 15
    assert exposed["llm42:request_success_total", "length"] == 16
    assert exposed["llm42:http_requests_total", "/v1/completions", "POST", "200"] == 1


def test_both_formats_say_the_same_to_whom_they_are_for():
    metrics = make_metrics()
    text, text_type = metrics.exposition("text/plain")
    openmetrics, openmetrics_type = metrics.exposition(OPENMETRICS)
    assert text_type.startswith("text/plain")
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")

    def llm42(parsed):
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in parsed
            for sample in family.samples
            if sample.name.startswith("llm42:")
        }

    assert llm42(parse_text(text.decode())) == llm42(parse_openmetrics(openmetrics.decode())) != {}
    assert b"process_cpu_seconds" in text


def test_an_odd_model_name_is_a_label_like_any_other():
    metrics = ServerMetrics(lambda: STATS, 'org/"odd"\\\n', 64)
    names = {sample.labels.get("model_name") for family in families(metrics) for sample in family.samples}
    assert 'org/"odd"\\\n' in names


# Requests -------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_one_first_token_and_a_gap_for_each_further_item():
    metrics = make_metrics()
    meter = metrics.request(SamplingParams(n=1, max_tokens=10))
    times = {"queue_time_s": 1.0, "time_to_first_token_s": 3.0, "total_time_s": 3.0}
    meter.observe(item(7, **times))
    meter.observe(item(8, 9, 10, **times))
    meter.observe(item(11, finished=True, **times | {"total_time_s": 8.0}))
    exposed = samples(metrics)
    assert exposed["llm42:time_to_first_token_seconds_count",] == 1
    assert exposed["llm42:inter_token_latency_seconds_count",] == 2
    assert exposed["llm42:e2e_request_latency_seconds_count",] == 1
    assert exposed["llm42:request_queue_time_seconds_sum",] == 1.0
    assert exposed["llm42:request_prefill_time_seconds_sum",] == 2.0
    assert exposed["llm42:request_decode_time_seconds_sum",] == 5.0
    assert exposed["llm42:request_inference_time_seconds_sum",] == 7.0
    assert exposed["llm42:request_time_per_output_token_seconds_sum",] == 5.0 / 4
    assert exposed["llm42:request_prompt_tokens_sum",] == 3
    assert exposed["llm42:request_generation_tokens_sum",] == 5
    assert exposed["llm42:request_params_max_tokens_sum",] == 10
    assert exposed["llm42:request_params_n_sum",] == 1


def test_a_whole_output_had_its_first_token_when_the_engine_had_it():
    metrics = make_metrics()
    meter = metrics.request(SamplingParams())
    meter._arrived -= 10.5
    meter.observe(item(7, 8, 9, finished=True, time_to_first_token_s=2.0, total_time_s=10.0))
    exposed = samples(metrics)
    elapsed = exposed["llm42:e2e_request_latency_seconds_sum",]
    assert exposed["llm42:time_to_first_token_seconds_sum",] == pytest.approx(elapsed - 8.0)
    assert exposed["llm42:inter_token_latency_seconds_count",] == 0


def test_outputs_of_one_request_have_gaps_of_their_own():
    metrics = make_metrics()
    meter = metrics.request(SamplingParams(n=2))
    for index in (0, 1, 0, 1):
        meter.observe(item(7, index=index))
    exposed = samples(metrics)
    assert exposed["llm42:time_to_first_token_seconds_count",] == 1
    assert exposed["llm42:inter_token_latency_seconds_count",] == 2


def test_an_unfinished_request_leaves_its_tokens_and_nothing_else():
    metrics = make_metrics()
    metrics.request(SamplingParams()).observe(item(7))
    counts = {key[0]: value for key, value in samples(metrics).items() if key[0].endswith("_count") and value}
    assert counts == {"llm42:time_to_first_token_seconds_count": 1}


def test_buckets_of_token_counts_end_at_the_models_length():
    buckets = [key[1] for key in samples(make_metrics()) if key[0] == "llm42:request_prompt_tokens_bucket"]
    assert buckets == [*(f"{n}.0" for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)), "+Inf"]


@pytest.mark.parametrize("whole", [False, True])
def test_an_engine_that_served_requests_says_so(tmp_path, whole):
    async def serve():
        llm = AsyncLLM(str(write_tiny_model(tmp_path, "llama")), max_model_len=256, kv_cache_bytes=8 << 20)
        metrics = ServerMetrics(llm.stats, "tiny", llm.max_model_len)
        params = SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=0, deterministic=True)
        meter = metrics.request(params)
        async for output in llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, whole=whole):
            meter.observe(output)
        exposed = samples(metrics)
        await llm.aclose()
        return exposed

    exposed = asyncio.run(serve())
    assert exposed["llm42:generation_tokens_total",] == exposed["llm42:request_generation_tokens_sum",] == 24
    assert exposed["llm42:prompt_tokens_total",] == 8
    assert exposed["llm42:request_success_total", "length"] == 2
    assert exposed["llm42:time_to_first_token_seconds_count",] == 1
    ttft, latency = exposed["llm42:time_to_first_token_seconds_sum",], exposed["llm42:e2e_request_latency_seconds_sum",]
    assert 0.0 < ttft < latency


# What speaks of it ----------------------------------------------------------------------------------------------------

_SUFFIX = {"counter": "_total", "info": "_info"}


def test_the_docs_list_every_metric_with_its_type_and_no_other():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(llm42:\w+)` \| (\w+) \|", text, re.MULTILINE))
    exposed = {
        family.name + _SUFFIX.get(family.type, ""): family.type
        for family in families(make_metrics())
        if family.name.startswith("llm42:")
    }
    assert documented == exposed


@pytest.mark.parametrize("name", ["docs/metrics.md", "deploy/grafana-dashboard.json", "deploy/llm42-alerts.yml"])
def test_every_metric_that_is_spoken_of_is_exposed(name):
    metrics = make_metrics()
    exposed = {sample.name for family in families(metrics) for sample in family.samples}
    names = set(re.findall(r"\b(?:llm42:|process_)\w+", (ROOT / name).read_text(encoding="utf-8")))
    families_without_samples = {key.removesuffix("_count") for key in exposed if key.endswith("_count")}
    unknown = names - exposed - families_without_samples
    assert names
    assert {key for key in unknown if key != "process_"} == set()


def test_the_dashboard_shows_every_metric_of_verification_and_loads_anywhere():
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    expressions = "\n".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    docs = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Verification\n(.*?)\n## ", docs, re.DOTALL)
    verification = re.findall(r"^\| `(llm42:\w+)`", section, re.MULTILINE)
    assert [name for name in verification if name not in expressions and name != "llm42:verify_passes_total"] == []
    assert dashboard["uid"] is None
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {"${datasource}"}
    assert len({panel["id"] for panel in panels}) == len(panels)
