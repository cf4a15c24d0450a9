"""Responses: JSON, server-sent events, and the end of the work when the client is gone.

Invariant: whatever runs for a client is cancelled as soon as the client has hung up.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llm42.server.errors import APIError, as_api_error

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


class ClientGoneError(Exception):
    """The client hung up before the answer was complete."""


class JSON(Response):
    """A JSON body in ASCII: any text can be in it, lone surrogates too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: APIError) -> JSON:
    """The response that an error is."""
    return JSON(error.body, error.status, headers=error.headers)


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events from an asynchronous generator of encoded events.

    A comment is sent when there was nothing to send for `keep_alive_s`. An error before anything was sent is a response
    with a status of its own; a later one becomes the last event. When the client hangs up, the generator is cancelled.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_s: float) -> None:
        # Proxies must neither keep nor collect what should be seen at once.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._has_begun = False
        self._turn = asyncio.Lock()
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        del scope
        try:
            await _until_gone(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("the client of a stream is gone")

    async def _send_all(self, send: Send) -> None:
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except Exception as error:
            if not self._has_begun:
                raise
            if not isinstance(error, ValueError | APIError):
                logger.warning("a stream ended with %s: %s", type(error).__name__, error)
            await self._send(send, event(as_api_error(error).body) + DONE)
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive_s - loop.time())
            if loop.time() - self._last_sent >= self._keep_alive_s:
                await self._send(send, _COMMENT)

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        async with self._turn:  # events and comments come from two tasks
            if not self._has_begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._has_begun = True
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def answer(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, which is cancelled when the client of the request hangs up.

    Raises:
        ClientGoneError: It did.
    """
    return await _until_gone(request.receive, work)


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGoneError
    finally:
        await _cancel(gone)
        await _cancel(task)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen, so that asyncio does not complain
