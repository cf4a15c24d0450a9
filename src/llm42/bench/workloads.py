"""What a benchmark runs: prompts as token ids and how much to generate, the same in every call.

`fixed`, `prefill` and `mixed` are cut from ShareGPT (`sharegpt.py`); `synthetic` is random token ids and needs no data.
All generation is greedy and goes on after EOS, so that every engine and every run does the same work.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm42.bench.sharegpt import NUM_MIXED, cut_sharegpt
from llm42.model.config import ModelConfig

WORKLOADS: Final = ("fixed", "prefill", "mixed", "synthetic")
_NUM_PROMPTS, _LENGTH = 64, 128
_SYNTHETIC_SEED: Final = 42


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and the number of tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how a concurrency limit is meant.

    With ``in_batches`` so many requests start together and the next ones when all have ended, as offline batches;
    without, a request starts whenever one has ended, as clients of a server.
    """

    name: str
    requests: tuple[BenchRequest, ...]
    in_batches: bool

    def describe(self) -> dict[str, Any]:
        """Its size, and a hash by which two reports can be seen to be about the same work."""
        work = [[request.prompt_token_ids, request.max_tokens] for request in self.requests]
        return {
            "name": self.name,
            "num_prompts": len(self.requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in self.requests),
            "output_tokens": sum(request.max_tokens for request in self.requests),
            "sha256": hashlib.sha256(json.dumps(work, separators=(",", ":")).encode()).hexdigest(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload that can be made for a model. None is the workload's own default.

    Raises:
        ValueError: A field is out of range, or the workload does not have it.
    """

    name: str = "fixed"
    """`fixed`: prompts of one length; `prefill`: the same, one new token; `mixed`: lengths as in the data, started as
    others end; `synthetic`: random token ids of one length."""
    num_prompts: int | None = None
    """Default: 64, `mixed` 128."""
    input_len: int | None = None
    """Tokens of a prompt. Default: 128; `mixed` has lengths of its own."""
    output_len: int | None = None
    """Tokens to generate. Default: 128, `prefill` 1; `mixed` has lengths of its own."""

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, not {self.name!r}")
        for field in ("num_prompts", "input_len", "output_len"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}; give 1 or more")
            if value is not None and self.name == "mixed" and field != "num_prompts":
                raise ValueError(f"{field} is {value}, but the workload `mixed` has its own lengths; leave it out")

    def make(self, model_path: Path, *, progress: bool = False) -> Workload:
        """The workload for the model in a directory.

        Args:
            model_path: The model: its tokenizer cuts the data, its vocabulary bounds synthetic ids.
            progress: Show a download on a terminal.

        Raises:
            ModelError: The data cannot be fetched, or the model is not usable.
            ValueError: The data does not hold that many prompts.
        """
        if self.name == "mixed":
            mixed, _ = cut_sharegpt(model_path, num_mixed=self.num_prompts or NUM_MIXED, progress=progress)
            requests = tuple(BenchRequest(tuple(ids), max_tokens) for ids, max_tokens in mixed)
            return Workload(self.name, requests, in_batches=False)
        count, length = self.num_prompts or _NUM_PROMPTS, self.input_len or _LENGTH
        if self.name == "synthetic":
            prompts = _random_ids(count, length, ModelConfig.from_directory(model_path).vocab_size)
        else:
            _, prompts = cut_sharegpt(model_path, num_fixed=count, length=length, progress=progress)
        max_tokens = self.output_len or (1 if self.name == "prefill" else _LENGTH)
        requests = tuple(BenchRequest(tuple(ids), max_tokens) for ids in prompts)
        return Workload(self.name, requests, in_batches=True)


def spread(share: float, count: int) -> list[bool]:
    """Which of ``count`` requests belong to a share of them: the rounded number, evenly spread."""
    chosen = round(share * count)
    return [(index + 1) * chosen // count > index * chosen // count for index in range(count)]


def _random_ids(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = random.Random(_SYNTHETIC_SEED)  # noqa: S311  prompts that everybody can repeat
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
