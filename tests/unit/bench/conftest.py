"""A tiny model and a loaded engine for the benchmark's own tests."""

from __future__ import annotations

import pytest

from harness import CANONICAL
from llm42.config import EngineConfig
from llm42.engine.engine import Engine
from tiny_models import write_tiny_model

SMALL = {**CANONICAL, "kernels": "portable", "kv_cache_bytes": 4 << 20, "num_threads": 1}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a tiny Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def small():
    """Engine fields that make any engine of these tests small."""
    return dict(SMALL)


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(EngineConfig(model=str(tiny), mode="verify", enable_prefix_caching=False, **SMALL))
