"""Tiny models and their oracle results, made once per session and shared by all determinism tests."""

from __future__ import annotations

from functools import cache

import pytest
from harness import Bits, Call, Oracle, bits, make_engine, mixed_workload
from tiny_models import VOCAB_SIZE, write_tiny_model


class Reference:
    """A tiny model, its workload, and what the oracle says of it."""

    def __init__(self, directory, family: str, kernels: str, dtype: str) -> None:
        self.model = write_tiny_model(directory, family)
        self.fields = {"kernels": kernels, "dtype": dtype}
        self.calls: list[Call] = mixed_workload(VOCAB_SIZE)
        oracle = Oracle(make_engine(self.model, mode="invariant", **self.fields))
        self.expected: list[Bits] = [bits(oracle.generate(call)) for call in self.calls]

    def engine(self, **fields):
        return make_engine(self.model, **{**self.fields, **fields})


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A function (family, kernels, dtype) to `Reference`."""

    @cache
    def make(family: str = "llama", kernels: str = "portable", dtype: str = "bfloat16") -> Reference:
        return Reference(tmp_path_factory.mktemp(family), family, kernels, dtype)

    return make
