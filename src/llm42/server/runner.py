"""Running the application in uvicorn until it is told to stop, and how it stops.

Invariant: the first signal lets what runs finish, for a while; a second one, or the end of that while, ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from llm42.engine.async_llm import AsyncLLM
from llm42.server.app import create_app
from llm42.server.http import BoundedHTTP
from llm42.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_FAREWELL_S = 0.5
"""How long the last words to clients may take."""
_KEEP_ALIVE_S = 65
"""How long a connection may be idle: longer than clients keep theirs, or some request meets a closing one."""


def run(
    llm: AsyncLLM,
    settings: ServerSettings,
    listener: socket.socket,
    on_ready: Callable[[], None],
    drain_timeout_s: int,
    tls: dict[str, Any],
) -> None:
    """Serve until a signal stops it.

    Args:
        llm: The engine.
        settings: Everything about HTTP.
        listener: A bound socket.
        on_ready: Called when the listener listens.
        drain_timeout_s: How long requests may run on after the signal.
        tls: uvicorn's options for TLS.
    """
    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        http=BoundedHTTP,
        ws="none",
        access_log=False,  # ours has request ids
        log_config=None,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        **tls,
    )
    server = _Server(config, llm, on_ready, drain_timeout_s)
    app.state.server.is_draining = lambda: server.should_exit
    server.run([listener])


class _Server(uvicorn.Server):
    """uvicorn, with another end: it would cancel what does not finish, without a word to its client."""

    def __init__(
        self, config: uvicorn.Config, llm: AsyncLLM, on_ready: Callable[[], None], drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._llm = llm
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a signal is an order, not an error, so it is not raised again at the end."""
        del sig, frame
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until what runs has finished, or has been ended."""
        ending = asyncio.create_task(self._end_what_lasts())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_what_lasts(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._drain_timeout_s)
        logger.warning("requests that have not finished are ended")
        await self._llm.aclose()  # their clients are told
        await asyncio.sleep(_FAREWELL_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # and those who do not listen are hung up on
