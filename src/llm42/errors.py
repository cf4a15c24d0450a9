"""The exceptions that LLM-42 raises on purpose. Each message names the field or file, its value, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm42.outputs import RequestOutput


class LLM42Error(Exception):
    """Base class of every error raised on purpose by this package."""


class ModelError(LLM42Error, ValueError):
    """A model file is missing, corrupt, or describes something this engine does not support."""


class RequestError(LLM42Error):
    """A request that was accepted could not be completed; the message says why. Other requests go on.

    ``outputs`` holds what the call that raises it had produced, the outputs of unharmed requests included.
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class EngineStoppedError(RequestError):
    """The engine was closed or has failed: it serves no request any more."""


class RequestTimeoutError(RequestError):
    """A request took longer than its deadline allowed; it was cancelled."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request did not finish within {timeout_s:g} s; ask for fewer tokens or allow more time")


class QueueFullError(LLM42Error):
    """The bounded waiting queue has no room; try again later."""
