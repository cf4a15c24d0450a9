"""The runner measures every case once per round, and its report says what its table shows."""

from __future__ import annotations

import json
import statistics

import pytest

from llm42.bench.report import spread_text, tables
from llm42.bench.throughput import Bench, Case, Plan, run_throughput
from llm42.bench.workloads import WorkloadSpec
from llm42.config import MODES

MODES_HERE = ("verify", "off")


@pytest.fixture(scope="module")
def workload(tiny):
    return WorkloadSpec(name="synthetic", num_prompts=6, input_len=10, output_len=5).make(tiny)


@pytest.fixture(scope="module")
def measured(tiny, small, workload):
    """A whole run over two modes: its report, the report after each round, and the lines of progress."""
    lines, rounds = [], []
    plan = Plan(
        model=str(tiny),
        modes=MODES_HERE,
        deterministic=(0.0, 0.5),
        concurrency=(1, 3),
        repeats=2,
        max_batches=2,
        fields=small,
    )
    report = run_throughput(plan, workload, lines.append, lambda report: rounds.append(json.dumps(report)))
    return report, rounds, lines


def cases_of(lines, start):
    return [line.split("  ", 1)[1].split(":")[0] for line in lines if line.startswith(f"{start}  ")]


def test_every_case_runs_once_in_each_round_before_any_runs_again(measured):
    _, rounds, lines = measured
    first, second = cases_of(lines, "round 1/2"), cases_of(lines, "round 2/2")
    assert first == second
    assert len(set(first)) == len(first) == 6  # `off` has no deterministic requests
    assert [index for index, line in enumerate(lines) if " done" in line] == [6, 13]
    assert [len(json.loads(text)["cases"][0]["runs"]) for text in rounds] == [1, 2]


def test_shares_that_are_compared_run_side_by_side(measured):
    names = cases_of(measured[2], "round 1/2")
    assert names[:2] == [
        "verify, 0% deterministic, concurrency 1",
        "verify, 50% deterministic, concurrency 1",
    ]


def test_low_concurrencies_run_only_so_many_batches(measured):
    counts = {case["concurrency"]: {run["num_requests"] for run in case["runs"]} for case in measured[0]["cases"]}
    assert counts == {1: {2}, 3: {6}}


def test_tokens_of_a_case_are_those_of_its_requests(measured):
    for case in measured[0]["cases"]:
        for run in case["runs"]:
            assert run["output_tokens"] == 5 * run["num_requests"]
            assert run["prompt_tokens"] == 10 * run["num_requests"]
            assert run["deterministic_changed"] == 0
            assert (run["num_windows"] > 0) is (case["deterministic"] > 0)


def test_a_summary_is_median_minimum_and_maximum_of_the_runs(measured):
    for case in measured[0]["cases"]:
        values = [run["output_tok_s"] for run in case["runs"]]
        assert case["summary"]["output_tok_s"] == {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        assert (case["summary"]["recomputed_share"] is None) is (case["deterministic"] == 0)


def test_deterministic_cases_are_compared_with_ordinary_ones_of_the_same_round(measured):
    by_case = {(case["mode"], case["deterministic"], case["concurrency"]): case for case in measured[0]["cases"]}
    case, other = by_case["verify", 0.5, 3], by_case["verify", 0.0, 3]
    ratios = [a["output_tok_s"] / b["output_tok_s"] for a, b in zip(case["runs"], other["runs"], strict=True)]
    assert case["vs_ordinary"]["median"] == pytest.approx(statistics.median(ratios))
    assert other["vs_ordinary"] is None


def test_the_report_is_plain_json_that_says_what_was_run(measured):
    report = json.loads(json.dumps(measured[0]))
    assert report == measured[0]
    assert report["workload"]["num_prompts"] == 6
    assert set(report["engines"]) == set(MODES_HERE)
    for mode, about in report["engines"].items():
        assert about["config"]["mode"] == mode
        assert about["config"]["enable_prefix_caching"] is False
        assert about["fingerprint"].startswith("fp_")
        assert len(about["load_s"]) == 2


def test_the_tables_show_figures_of_the_report(measured):
    report = json.loads(json.dumps(measured[0]))
    speed, times = tables(report)
    rows = [dict(zip([c.header for c in speed.columns], cells, strict=True)) for cells in cells_of(speed)]
    assert len(rows) == len(report["cases"])
    for row, case in zip(rows, report["cases"], strict=True):
        summary = case["summary"]
        assert row["mode"] == case["mode"]
        assert row["conc."] == str(case["concurrency"])
        assert row["output tok/s"] == spread_text(summary["output_tok_s"])
        assert row["total tok/s"] == spread_text(summary["total_tok_s"])
        assert row["vs ordinary"] == spread_text(case["vs_ordinary"], 2)
        assert row["peak RSS MiB"] == f"{summary['peak_rss_mib']['median']:.0f}"
    rows = [dict(zip([c.header for c in times.columns], cells, strict=True)) for cells in cells_of(times)]
    for row, case in zip(rows, report["cases"], strict=True):
        summary = case["summary"]
        assert row["step"] == f"{summary['step_ms_p50']['median']:.1f}/{summary['step_ms_p99']['median']:.1f}"
        assert row["gap"].startswith(f"{summary['ordinary_gap_ms_p50']['median']:.1f}/")
        assert row["changed"].endswith("/0")


def cells_of(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_times_are_of_deterministic_requests_where_there_are_no_others(measured):
    report = json.loads(json.dumps(measured[0]))
    for case in report["cases"]:
        for name in ("ttft_ms_p50", "ttft_ms_p99", "gap_ms_p50", "gap_ms_p99", "request_tok_s"):
            case["summary"][f"ordinary_{name}"] = {"median": 5.0, "min": 5.0, "max": 5.0}
            case["summary"][f"deterministic_{name}"] = {"median": 7.0, "min": 7.0, "max": 7.0}
    for share, number in ((0.0, "5.0"), (0.5, "5.0"), (1.0, "7.0")):
        for case in report["cases"]:
            case["deterministic"] = share
        shown = {cells[5:8] for cells in cells_of(tables(report)[1])}
        assert shown == {(f"{number}/{number}", f"{number}/{number}", number)}


def test_one_changed_output_in_one_round_is_shown(measured):
    report = json.loads(json.dumps(measured[0]))
    report["cases"][0]["summary"]["deterministic_changed"] = {"median": 0, "min": 0, "max": 1}
    assert cells_of(tables(report)[1])[0][-1].endswith("/1")


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        (None, "-"),
        ({"median": 2.0, "min": 2.0, "max": 2.0}, "2.0"),
        ({"median": 2.0, "min": 1.0, "max": 3.25}, "2.0 (1.0-3.2)"),
        ({"median": 200.4, "min": 99.6, "max": 300.0}, "200 (100-300)"),
    ],
)
def test_a_range_is_shown_where_there_is_one(summary, text):
    assert spread_text(summary) == text


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_can_be_planned(mode):
    cases = Plan(model="m", modes=(mode,), concurrency=(2,)).cases
    shares = {case.deterministic for case in cases}
    assert shares == ({0.0} if mode == "off" else {0.0, 1.0})


def test_an_engine_has_room_for_the_highest_concurrency():
    config = Plan(model="m", concurrency=(1, 2000)).config("off")
    assert config.max_num_seqs == config.max_queue_len == 2000
    assert Plan(model="m", concurrency=(1,), fields={"max_num_seqs": 3}).config("off").max_num_seqs == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modes": ("fast",)}, "mode must be one of .*'fast'"),
        ({"modes": ()}, "modes is"),
        ({"deterministic": (0.0, 0.0)}, "deterministic is .* each once"),
        ({"deterministic": (1.5,)}, "deterministic is 1.5"),
        ({"deterministic": (float("nan"),)}, "deterministic is nan"),
        ({"concurrency": (0, 1)}, "concurrency is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"max_batches": 0}, "max_batches is 0"),
        ({"fields": {"dtype": "int8"}}, "dtype must be"),
        ({"modes": ("off",), "deterministic": (1.0,)}, "`off` accepts ordinary requests only"),
    ],
)
def test_a_bad_field_of_a_plan_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"model": "m", **fields})


def test_a_round_that_was_interrupted_still_gives_a_report(tiny, small, workload):
    plan = Plan(model=str(tiny), modes=("verify",), concurrency=(1, 2), repeats=1, max_batches=1, fields=small)
    seen = []

    def stop(line):
        seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    bench = Bench(plan, workload, stop)
    with pytest.raises(KeyboardInterrupt):
        bench.run_mode("verify", "round")
    assert [case["concurrency"] for case in bench.report()["cases"]] == [1, 1, 2]
    assert Case("verify", 1.0, 2) not in {
        Case(c["mode"], c["deterministic"], c["concurrency"]) for c in bench.report()["cases"]
    }
