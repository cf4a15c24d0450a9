"""`llm42 bench throughput`: help, bad values, and one small run from the command line to the file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from llm42.bench.report import spread_text
from llm42.cli import app, bench
from llm42.config import MODES

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "throughput", *arguments], env=WIDE)


def test_help_names_the_options_the_modes_and_examples():
    text = invoke("--help").output
    for word in ("--concurrency", "--deterministic", "--mode", "--workload", "--repeats", "--json", *MODES):
        assert word in text
    assert "llm42 bench throughput smollm2-135m-instruct" in text


def test_the_group_names_its_command_and_the_comparison_with_other_engines():
    text = CliRunner().invoke(app, ["bench"], env=WIDE).output
    assert "throughput" in text
    assert "scripts/bench peers" in text


def test_help_starts_without_importing_torch():
    code = (
        "import sys, llm42.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(llm42.cli.app, ['bench', 'throughput', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--concurrency", "1,x", "concurrency"),
        ("--concurrency", "", "concurrency"),
        ("--concurrency", "0", "concurrency"),
        ("--concurrency", "2,2", "concurrency"),
        ("--deterministic", "2", "deterministic"),
        ("--deterministic", "half", "deterministic"),
        ("--mode", "verify,fast", "mode"),
        ("--workload", "random", "workload"),
        ("--num-prompts", "0", "num_prompts"),
        ("--input-len", "0", "input_len"),
        ("--output-len", "0", "output_len"),
        ("--repeats", "0", "repeats"),
        ("--max-batches", "-1", "max_batches"),
        ("--kernels", "cuda", "kernels"),
        ("--num-threads", "0", "num_threads"),
        ("--json", "/no/such/directory/out.json", "json"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_field_before_a_model_is_looked_for(option, value, field):
    result = invoke("no-such-model", option, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {field} ")
    assert result.stderr.count("\n") == 1
    assert "no-such-model" not in result.stderr
    assert result.stdout == ""


def test_a_missing_model_is_an_error_that_says_so():
    result = invoke("no-such-model", "--workload", "synthetic")
    assert result.exit_code == 2
    assert "'no-such-model' is not known" in result.stderr


@pytest.mark.parametrize(("changed", "status"), [(0, 0), (2, 1)])
def test_a_deterministic_output_that_changed_is_a_failure(monkeypatch, changed, status):
    report = {"cases": [{"summary": {"deterministic_changed": {"median": 0, "min": 0, "max": changed}}}]}
    monkeypatch.setattr(bench, "_measure", lambda *_arguments: report)
    result = invoke("no-such-model")
    assert result.exit_code == status
    assert ("DETERMINISM BROKEN: 2 deterministic outputs" in result.stderr) is bool(changed)


def test_a_small_run_prints_both_tables_and_writes_every_run(tiny, tmp_path):
    path = tmp_path / "out.json"
    result = invoke(
        *(str(tiny), "--mode", "verify", "--workload", "synthetic", "--num-prompts", "4", "--input-len", "8"),
        *("--output-len", "4", "--concurrency", "2,4", "--deterministic", "0,1", "--repeats", "1", "--json", str(path)),
        *("--kernels", "portable", "--num-threads", "1", "--max-model-len", "1200", "--kv-cache-bytes", "4M"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [(case["deterministic"], case["concurrency"]) for case in report["cases"]] == [
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
    ]
    for word in ("output tok/s", "vs ordinary", "peak RSS MiB", "recomputed %", "changed"):
        assert word in result.stdout
    for case in report["cases"]:
        assert spread_text(case["summary"]["output_tok_s"]) in result.stdout
    assert "round 1/1 done" in result.stderr
    assert "round 1/1" not in result.stdout
