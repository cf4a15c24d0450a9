"""`llm42 doctor`: what it shows, and that its exit status is the answer to whether the promise is kept."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from llm42 import LLM
from llm42.cli import app
from llm42.kernels import PortableKernels
from tiny_models import write_tiny_model

WIDE = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
ENGINE = ("--kernels", "portable", "--num-threads", "1")
SERVED, REFUSED = "deterministic requests are served", "deterministic requests are refused: see self-test"
START = re.compile(r"portable kernels · 1 threads · (\w+) · canonical passes of ([\d, by-]+) rows · (fp_[0-9a-f]{16})")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("doctor")))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path))


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env=WIDE)


def row(output, name):
    """What the table says beside a name."""
    (value,) = [line[len(name) :].strip() for line in output.splitlines() if line.startswith(f"{name}  ")]
    return value


def break_activation(monkeypatch):
    """An operation whose result depends on the number of rows: no linear layer shows it, whole passes do."""
    silu_mul = PortableKernels.silu_mul
    monkeypatch.setattr(PortableKernels, "silu_mul", lambda kernels, x: silu_mul(kernels, x) + 0.01 * x.shape[0])


def break_linears(monkeypatch):
    """Linear layers that add up their neighbours' values."""
    linear = PortableKernels.linear
    monkeypatch.setattr(
        PortableKernels, "linear", lambda kernels, x, of: linear(kernels, x, of) + x.float().mean().to(x.dtype)
    )


# Served ---------------------------------------------------------------------------------------------------------------


def test_everything_is_shown_and_a_sound_engine_exits_with_0(model):
    result = doctor(model, *ENGINE)
    assert result.exit_code == 0, result.output
    assert "1 threads" in row(result.stdout, "machine")
    assert row(result.stdout, "model") == f"{model}, bfloat16"
    assert row(result.stdout, "kernels") == "portable"
    assert row(result.stdout, "kernels: torch") == torch.__version__
    for layer in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert re.match(r"\{\d", row(result.stdout, f"classes of {layer}"))
    assert re.fullmatch(r"[\d, by-]+ rows; [\d, by-]+ rows for logits", row(result.stdout, "canonical class"))
    assert re.fullmatch(r"auto, \d+ rows a pass at most", row(result.stdout, "mode"))
    assert row(result.stdout, "self-test") == "passed"
    assert re.fullmatch("fp_[0-9a-f]{16}", row(result.stdout, "fingerprint"))
    assert result.stdout.splitlines()[-1] == SERVED


def test_json_has_everything_and_nothing_else_is_on_stdout(model):
    result = doctor(model, *ENGINE, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == {
        *("machine", "model", "kernels", "classes", "canonical", "mode", "rows_per_pass", "fingerprint", "refusal")
    }
    assert set(report["machine"]) == {"processor", "instructions", "threads", "torch"}
    assert all(report["machine"].values())
    assert report["machine"]["threads"] == 1
    assert set(report["classes"]) == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert all(classes for classes in report["classes"].values())
    assert report["refusal"] is None


def test_the_report_is_about_the_engine_that_the_library_starts(model):
    report = json.loads(doctor(model, *ENGINE, "--json").stdout)
    with LLM(model, kernels="portable", num_threads=1) as llm:
        assert report["fingerprint"] == llm.system_fingerprint
        assert report["kernels"] == llm.contract["kernels"]
        assert report["model"]["max_model_len"] == llm.max_model_len


@pytest.mark.parametrize("option", [("--dtype", "float32"), ("--kernels", "jitter")], ids=str)
def test_another_contract_has_another_fingerprint(model, option):
    found = [json.loads(doctor(model, *ENGINE, *more, "--json").stdout) for more in ((), option)]
    assert found[0]["fingerprint"] != found[1]["fingerprint"]
    assert found[0]["refusal"] is found[1]["refusal"] is None


def test_a_mode_shares_the_contract_of_the_others(model):
    found = [json.loads(doctor(model, *ENGINE, "--mode", mode, "--json").stdout) for mode in ("auto", "invariant")]
    assert [report["mode"] for report in found] == ["auto", "invariant"]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["canonical"] == found[1]["canonical"]


def test_a_path_with_square_brackets_is_shown_as_it_is(tmp_path):
    model = write_tiny_model(tmp_path / "a [bold] model")
    assert row(doctor(str(model), *ENGINE).stdout, "model") == f"{model}, bfloat16"


# Refused --------------------------------------------------------------------------------------------------------------


def test_mode_off_exits_with_1_and_says_why(model):
    result = doctor(model, *ENGINE, "--mode", "off")
    assert result.exit_code == 1
    assert "the engine runs with mode='off'" in row(result.stdout, "self-test")
    assert result.stdout.splitlines()[-1] == REFUSED


@pytest.mark.parametrize(
    ("break_kernels", "reason"),
    [
        (break_activation, r"a canonical pass of \d+ rows gives other bits than one of \d+"),
        (break_linears, "a row of a linear layer depends on its index or its neighbours' values"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "json"])
def test_broken_kernels_exit_with_1_and_say_why(model, monkeypatch, break_kernels, reason, form):
    break_kernels(monkeypatch)
    result = doctor(model, *ENGINE, *form)
    assert result.exit_code == 1
    shown = json.loads(result.stdout)["refusal"] if form else row(result.stdout, "self-test")
    assert re.search(f"the start-up self-test failed: {reason}", shown)
    assert (SERVED in result.stdout, REFUSED in result.stdout) == (False, not form)


def test_an_unknown_model_exits_with_2_and_one_line():
    result = doctor("no-such-model", *ENGINE)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: model 'no-such-model' is not known")
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


def test_a_bad_value_exits_with_2_before_a_model_is_looked_for():
    result = doctor("no-such-model", "--mode", "fast")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: mode must be one of auto, verify, invariant, off, not 'fast'")


# The start-up line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_line_at_the_start_names_kernels_threads_mode_class_and_fingerprint_on_stderr(model, mode):
    result = doctor(model, *ENGINE, "--mode", mode, "--json")
    (line,) = [line for line in result.stderr.splitlines() if "canonical passes" in line]
    found = START.fullmatch(line)
    assert found, line
    report = json.loads(result.stdout)
    assert found.groups() == (mode, report["canonical"]["rows"], report["fingerprint"])


def test_a_run_has_the_line_too_and_keeps_stdout_for_the_text(model):
    arguments = ["run", model, "Once", "--raw", "--max-tokens", "3", "--ignore-eos", "--mode", "verify", *ENGINE]
    result = CliRunner().invoke(app, arguments, env=WIDE)
    assert result.exit_code == 0, result.output
    first, *_, last = result.stderr.splitlines()
    assert START.fullmatch(first).group(1) == "verify"
    assert last.endswith(f"fingerprint {START.fullmatch(first).group(3)}")
    assert "canonical passes" not in result.stdout
