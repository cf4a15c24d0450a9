"""Tiny models and engines that the tests of the Python API share; each test leaves its engine clean."""

from __future__ import annotations

import pytest

from harness import CANONICAL
from llm42 import LLM
from tiny_models import write_tiny_model

SMALL = {
    **CANONICAL,
    "mode": "verify",
    "kernels": "portable",
    "window_size": 32,
    "verify_batch_size": 8,
    "kv_cache_bytes": 4 << 20,
    "num_threads": 1,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a tiny Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory):
    """The directory of a tiny Qwen2, whose embedding is not its lm_head."""
    return write_tiny_model(tmp_path_factory.mktemp("untied"), "qwen2")


@pytest.fixture(scope="session")
def fields():
    """Engine fields that make any engine of these tests small, under one contract."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def make_llm(model):
    """A function of engine fields to a new `LLM` of the tiny Llama."""
    return lambda **fields: LLM(model, **{**SMALL, **fields})


@pytest.fixture(scope="session")
def portable(make_llm):
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def jittery(make_llm):
    """Kernels under which ordinary requests change with the batch, so that a comparison of bits can fail."""
    with make_llm(kernels="jitter") as llm:
        yield llm


@pytest.fixture(scope="session")
def assert_clean():
    """A function that asserts of an `LLM` that no block is taken and no request left."""

    def check(llm: LLM) -> None:
        core = llm._engine.core
        core.pool.check()
        assert core.pool.num_free == core.pool.num_usable, "a KV block is still taken"
        assert not core.has_work

    return check


@pytest.fixture
def llm(portable, assert_clean):
    """The shared engine, which each test must leave clean."""
    yield portable
    assert_clean(portable)


@pytest.fixture
def jitter_llm(jittery, assert_clean):
    """As `llm`, with kernels whose results change with the batch."""
    yield jittery
    assert_clean(jittery)
