"""What the endpoints share: the engine, the settings, the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from llm42.engine.async_llm import AsyncLLM
from llm42.server.conversation import tool_call_parser
from llm42.server.errors import APIError
from llm42.server.metrics import ServerMetrics
from llm42.server.middleware import VALID_ID
from llm42.server.settings import ServerSettings


@dataclass
class ServerState:
    """One running server.

    Raises:
        ValueError: A setting does not fit the model.
    """

    llm: AsyncLLM
    settings: ServerSettings
    is_draining: Callable[[], bool] = bool
    """Whether the server has been told to stop: what runs is finished, and nothing should come."""
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.monotonic)
    metrics: ServerMetrics = field(init=False)
    tool_call_parser: str | None = field(init=False)
    """How the model writes tool calls; None if it is not known."""

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.llm.stats, self.settings.model_names[0], self.llm.max_model_len)
        self.tool_call_parser = tool_call_parser(self.llm.tokenizer, self.settings.tool_call_parser)

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            APIError: The server has no model of that name.
        """
        names = self.settings.model_names
        if name is not None and name not in names:
            raise APIError(
                404,
                f"model {name!r:.80} is not served here; use {' or '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]


def name_of(request: Request, given: str | None) -> str:
    """The name of a request: what its body gives, else its header's, else a new one; the response's header has it too.

    Raises:
        ValueError: The body's name cannot stand in a header.
    """
    if given is not None:
        if VALID_ID.fullmatch(given) is None:
            raise ValueError("request_id must be 1 to 128 printable ASCII characters without spaces")
        request.state.request_id = given
    name: str = request.state.request_id
    return name
