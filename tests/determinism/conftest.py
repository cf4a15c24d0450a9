"""Tiny models and their oracle results, made once per session and shared by all determinism tests."""

from __future__ import annotations

from functools import cache

import pytest

from harness import Reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A function (family, kernels, dtype) to `Reference`."""

    @cache
    def make(family: str = "llama", kernels: str = "portable", dtype: str = "bfloat16") -> Reference:
        return Reference(tmp_path_factory.mktemp(family), family, kernels, dtype)

    return make
