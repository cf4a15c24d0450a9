"""The command line as a process: what it prints where, how it ends, and that its answer is the library's.

(`tests/unit/cli` has help, options and messages, which need no model.)
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from llm42 import LLM, SamplingParams
from tiny_models import write_tiny_model

PROMPT = "Once upon a time"
ENGINE = ("--num-threads", "1", "--kv-cache-bytes", "4M")
SAMPLING = ("--raw", "--deterministic", "--seed", "3", "--max-tokens", "8", "--temperature", "0.9", "--ignore-eos")
JOBS = {
    "argument": ("run", "MODEL", PROMPT, *SAMPLING, *ENGINE),
    "stdin": ("run", "MODEL", *SAMPLING, *ENGINE),
    "bad parameter": ("run", "MODEL", PROMPT, "--temperature", "-1"),
    "too long": ("run", "MODEL", PROMPT, "--raw", "--max-tokens", "3000", *ENGINE),
    "demo": (
        *("demo", "--model", "MODEL", "--prompts", "2", "--batch", "6", "--max-tokens", "12"),
        *("--kernels", "jitter", "--num-threads", "1"),
    ),
    "serving": (
        *("bench", "serving", "MODEL", "--deterministic", "--repeats", "1", "--concurrency", "1,2"),
        *("--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--kernels", "portable", "--num-threads", "1"),
    ),
}
SUMMARY = re.compile(
    r"8 tokens \(length\) · [\d.]+ tok/s · first token [\d.]+ s · \d+ windows · \d+ rollbacks · \d+ recomputed"
    r" · seed 3 · fingerprint (fp_\w+)\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("cli")))


@pytest.fixture(scope="module")
def result_of(model):
    """A function of a job's name to its finished process; all run side by side, since each takes seconds to start."""

    def run(arguments: tuple[str, ...]) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "llm42", *(model if word == "MODEL" else word for word in arguments)]
        return subprocess.run(
            command, input=f"{PROMPT}\n", capture_output=True, encoding="utf-8", timeout=300, check=False
        )

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(run, arguments) for name, arguments in JOBS.items()}
        yield lambda name: futures[name].result()


@pytest.fixture(scope="module")
def library(model):
    """The text and the fingerprint that the library gives for the same prompt and parameters."""
    with LLM(model, num_threads=1, kv_cache_bytes=4 << 20) as llm:
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, deterministic=True)
        (output,) = llm.generate(PROMPT, params)
        return output.outputs[0].text, llm.system_fingerprint


@pytest.mark.parametrize("job", ["argument", "stdin"])
def test_run_prints_the_text_that_the_library_gives_and_one_summary_line(result_of, library, job):
    text, fingerprint = library
    result = result_of(job)
    assert result.returncode == 0, result.stderr
    assert text
    assert result.stdout == text.removesuffix("\n") + "\n"
    start, end = result.stderr.splitlines(keepends=True)
    assert "kernels · 1 threads · auto · canonical passes of" in start
    assert start.endswith(f"{fingerprint}\n")
    summary = SUMMARY.fullmatch(end)
    assert summary, result.stderr
    assert summary[1] == fingerprint


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("bad parameter", "error: temperature must be a finite number >= 0, got -1.0; use 0 for greedy decoding"),
        ("too long", "error: prompt (8 tokens) + max_tokens (3000) exceeds max_model_len 2048;"),
    ],
)
def test_run_with_a_bad_value_exits_with_2_and_says_why_in_one_line(result_of, job, line):
    result = result_of(job)
    assert (result.returncode, result.stdout) == (2, "")
    *before, last = result.stderr.splitlines()
    assert last.startswith(line)
    assert len(before) <= 1, "nothing but the line that the engine started"


def test_demo_compares_alone_and_batch_and_finds_deterministic_requests_identical(result_of):
    result = result_of("demo")
    assert result.returncode == 0, result.stderr
    assert "all 2 answers identical" in result.stdout
    for words in ("jitter kernels", "ordinary", "deterministic", "rollbacks", "recomputed", "fingerprint fp_"):
        assert words in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to another process")
def test_an_interrupt_ends_a_run_with_130_and_keeps_what_was_printed(model):
    command = [sys.executable, "-m", "llm42", "run", model, PROMPT, "--raw", "--ignore-eos", "--max-tokens", "2000"]
    with subprocess.Popen([*command, *ENGINE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert stdout.endswith(b"\n")
    assert stderr.endswith(b"\ncancelled\n")
    assert stderr.count(b"\n") == 2


def test_the_serving_benchmark_gets_the_engines_outputs_from_the_server(result_of):
    """It compares them itself, and fails if one differs."""
    result = result_of("serving")
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^ +(\d+) +(offline|stream|whole) +([\d.]+) ", result.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [(clients, way) for clients in "12" for way in ("offline", "stream", "whole")]
    assert all(float(rate) > 0 for _, _, rate in rows)
