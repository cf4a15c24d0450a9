"""What every front end tells of its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from llm42.config import EngineConfig
from llm42.engine.engine import Engine
from llm42.engine.stats import EngineStats, engine_stats
from llm42.model.tokenizer import Tokenizer
from llm42.protocol.shape_class import describe_counts


class Frontend(ABC):
    """The read-only facts of a loaded engine."""

    @property
    @abstractmethod
    def _engine(self) -> Engine:
        """The engine; raises `RequestError` once it is closed."""

    @property
    def config(self) -> EngineConfig:
        """The configuration the engine runs with."""
        return self._engine.config

    @property
    def model_path(self) -> Path:
        """The directory of the loaded model."""
        return self._engine.model_path

    @property
    def max_model_len(self) -> int:
        """The most positions, prompt and output together, of one request."""
        return self._engine.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def contract(self) -> dict[str, Any]:
        """Everything that may change bits and is fixed while the engine runs; see docs/architecture.md."""
        return self._engine.contract

    @property
    def summary(self) -> str:
        """One line about how the engine runs: kernels, threads, mode, canonical class, fingerprint."""
        engine = self._engine
        rows = describe_counts(engine.atlas.row_counts)
        return (
            f"{engine.decoder.kernels.name} kernels · {engine.num_threads} threads · {engine.config.mode} · "
            f"canonical passes of {rows} rows · {engine.system_fingerprint}"
        )

    def stats(self) -> EngineStats:
        """What the engine is doing and has done; may be called from any thread."""
        return engine_stats(self._engine)

    @property
    def refusal(self) -> str | None:
        """Why deterministic requests are refused; None if they are accepted."""
        return self._engine.refusal

    @property
    def system_fingerprint(self) -> str:
        """The contract's hash: deterministic outputs are equal wherever it is."""
        return self._engine.system_fingerprint
