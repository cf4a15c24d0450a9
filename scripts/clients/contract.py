"""What main.py and the runners of the clients agree on; standard library only, for both environments.

A runner is started as `run_X.py ARGUMENTS.json`. For every level of concurrency it runs its client once over the same
samples, and it writes `Outputs`: all that came back, by sample. Nothing in there may differ between levels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Outputs = dict[str, Any]
"""By sample: what the server said, as a value of JSON. Floats are kept as they are read, which is bit for bit."""


@dataclass(frozen=True)
class Job:
    """What a runner is to do."""

    url: str
    """The server, without /v1."""
    model: str
    """The model's name in the API."""
    tokenizer: str
    """The model's directory."""
    gsm8k: str
    """JSON lines with `question` and `answer`."""
    hellaswag: str
    """JSON lines with `query`, `choices` and `label`."""
    levels: list[int]
    limit: int
    """How many samples."""
    max_tokens: int
    folder: str
    """Where the runner may write; it is empty."""
    out: str
    """Where the result goes."""

    @property
    def questions(self) -> list[str]:
        """The first problems of GSM8K."""
        lines = Path(self.gsm8k).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["question"] for line in lines[: self.limit]]


def run(run_level: Callable[[Job, int], Outputs]) -> None:
    """The whole of a runner."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    levels = {}
    for level in job.levels:
        print(f"concurrency {level}", flush=True)
        levels[level] = run_level(job, level)
    Path(job.out).write_text(json.dumps(levels), encoding="utf-8")


def write(job: Job, path: Path) -> None:
    """The argument of a runner."""
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
