"""A new process gives the same bits under the same fingerprint, which is about what may change bits, and no more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

from harness import bits
from llm42 import LLM, SamplingParams
from tiny_models import write_tiny_model

PROMPTS = ["The capital of France", "Once upon a time", "0 1 2 3", "A dog", "def add(first,"]
PARAMS = {"temperature": 1.0, "seed": 11, "max_tokens": 30, "logprobs": 3, "prompt_logprobs": 1, "ignore_eos": True}

# What a user would write: no helper of the tests, one JSON line out. Other prompts come first, so that both the
# batch and the prefix cache differ.
SCRIPT = """
import json, sys
from llm42 import LLM, SamplingParams

model, fields, params, prompts, others = json.load(sys.stdin)
with LLM(model, **fields) as llm:
    params = SamplingParams(deterministic=True, **params)
    outputs = llm.generate(others + prompts, params)[len(others):]
    def exact(entries):
        return [entry and [[i, value.logprob.hex(), value.rank] for i, value in entry.items()] for entry in entries]
    result = [
        [o.outputs[0].text, o.outputs[0].token_ids, exact(o.outputs[0].logprobs), exact(o.prompt_logprobs)]
        for o in outputs
    ]
    print(json.dumps([llm.system_fingerprint, result]))
"""


def start(*job) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "random"},
    )
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    return process


def result_of(process: subprocess.Popen):
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def test_a_new_process_gives_the_same_bits_in_another_batch(model, fields):
    fields = {**fields, "kernels": "jitter"}
    others = [f"Another prompt, number {index}, in the same batch" for index in range(11)]
    processes = [start(str(model), fields, PARAMS, PROMPTS, more) for more in ([], others)]
    with LLM(model, **fields) as llm:
        outputs = [llm.generate(prompt, SamplingParams(deterministic=True, **PARAMS))[0] for prompt in PROMPTS]
        fingerprint = llm.system_fingerprint
    here = [bits(output) for output in outputs]
    assert all(len(output.token_ids) == 30 for output in here)
    expected = [
        [each.text, list(each.token_ids), as_lists(each.logprobs), as_lists(each.prompt_logprobs)] for each in here
    ]
    for process in processes:
        assert result_of(process) == [fingerprint, expected]


def as_lists(entries):
    return [entry and [list(value) for value in entry] for entry in entries]


@pytest.fixture(scope="module")
def fingerprint(model, fields):
    """A function of engine fields (and a model) to the fingerprint."""

    @cache
    def of(directory=model, **own) -> str:
        with LLM(directory, **{**fields, **own}) as llm:
            return llm.system_fingerprint

    return of


@pytest.mark.parametrize(
    "own",
    [
        {"canonical_rows": 48},
        {"canonical_logit_rows": 8},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"kernels": "jitter"},
        {"num_threads": 2},
    ],
    ids=str,
)
def test_what_may_change_bits_changes_the_fingerprint(fingerprint, own):
    assert fingerprint(**own) != fingerprint()


@pytest.mark.parametrize(
    "own",
    [
        {"mode": "auto"},
        {"mode": "invariant"},
        {"mode": "off"},
        {"window_size": 4},
        {"verify_batch_size": 2},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 7},
        {"max_model_len": 300},
        {"kv_cache_bytes": 8 << 20},
        {"block_size": 8},
        {"enable_prefix_caching": False},
        {"max_queue_len": 5},
    ],
    ids=str,
)
def test_what_only_changes_the_schedule_does_not_change_the_fingerprint(fingerprint, own):
    assert fingerprint(**own) == fingerprint()


def test_the_fingerprint_follows_the_weights_and_not_their_place(fingerprint, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint()
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert fingerprint(other) != fingerprint()


def test_the_fingerprint_follows_the_model_configuration(fingerprint, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint(copy) != fingerprint()
