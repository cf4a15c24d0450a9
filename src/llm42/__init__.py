"""LLM-42: LLM inference with verified determinism.

A request sent with ``SamplingParams(deterministic=True)`` returns the same tokens and log-probabilities, bit for bit,
whatever else the engine is doing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm42.config import EngineConfig
    from llm42.engine.async_llm import AsyncLLM
    from llm42.engine.llm import LLM
    from llm42.errors import (
        EngineStoppedError,
        LLM42Error,
        ModelError,
        QueueFullError,
        RequestError,
        RequestTimeoutError,
    )
    from llm42.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from llm42.sampling.params import SamplingParams
    from llm42.sampling.structured import StructuredOutputs

try:
    __version__ = version("llm42")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

# Loaded on first use: `llm42 --help` must not wait for PyTorch.
_MODULES = {
    "AsyncLLM": "llm42.engine.async_llm",
    "CompletionOutput": "llm42.outputs",
    "EngineConfig": "llm42.config",
    "EngineStoppedError": "llm42.errors",
    "LLM": "llm42.engine.llm",
    "LLM42Error": "llm42.errors",
    "Logprob": "llm42.outputs",
    "ModelError": "llm42.errors",
    "QueueFullError": "llm42.errors",
    "RequestError": "llm42.errors",
    "RequestMetrics": "llm42.outputs",
    "RequestOutput": "llm42.outputs",
    "RequestTimeoutError": "llm42.errors",
    "SamplingParams": "llm42.sampling.params",
    "StructuredOutputs": "llm42.sampling.structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineStoppedError",
    "LLM42Error",
    "Logprob",
    "ModelError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'llm42' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
