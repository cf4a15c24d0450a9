"""Starting an engine from a command: a missing model is fetched, and the terminal says what takes so long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm42.engine.frontend import Frontend

Engine = TypeVar("Engine", bound="Frontend")


def load(engine: Callable[..., Engine], model: str, fields: dict[str, Any]) -> Engine:
    """An `LLM` or `AsyncLLM` of the model with these EngineConfig fields.

    Raises:
        ValueError: a field is not valid, known before anything is fetched; or the model is missing or not supported.
    """
    from llm42.config import EngineConfig

    EngineConfig(model=model, **fields)
    from llm42.model.hub import resolve_model

    path = resolve_model(model, progress=True)
    with Console(stderr=True).status(f"loading {model}"):
        loaded = engine(str(path), **fields)
    Console(stderr=True, soft_wrap=True, highlight=False).print(loaded.summary, style="dim", markup=False)
    return loaded
