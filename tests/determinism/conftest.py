"""Tiny models and their oracle results, made once per session and shared by all determinism tests."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from harness import Bits, Call, Oracle, bits, make_engine, mixed_workload
from tiny_models import VOCAB_SIZE, write_tiny_model


class Reference:
    """A tiny model, its workload, and what the oracle says of it."""

    def __init__(self, directory, family: str, kernels: str, dtype: str) -> None:
        self.model = write_tiny_model(directory, family)
        self.fields = {"kernels": kernels, "dtype": dtype}
        self.calls: list[Call] = mixed_workload(VOCAB_SIZE)
        oracle = Oracle(make_engine(self.model, mode="invariant", **self.fields))
        self.expected: list[Bits] = []
        self.canonical_kv: list[torch.Tensor] = []
        for call in self.calls:
            self.expected.append(bits(oracle.generate(call)))
            # All positions but the last token's, which is never an input.
            num_positions = len(call.prompt_token_ids) + len(self.expected[-1].token_ids) - 1
            self.canonical_kv.append(oracle.kv_of(num_positions).clone())

    def engine(self, **fields):
        return make_engine(self.model, **{**self.fields, **fields})


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A function (family, kernels, dtype) to `Reference`."""

    @cache
    def make(family: str = "llama", kernels: str = "portable", dtype: str = "bfloat16") -> Reference:
        return Reference(tmp_path_factory.mktemp(family), family, kernels, dtype)

    return make
