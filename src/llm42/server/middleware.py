"""What happens to every HTTP request before an endpoint sees it, and what is logged after.

Plain ASGI, in this order: `AccessLog` names and logs it; `Guard` checks the key and reads the body within its limits.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.server.errors import APIError, as_api_error
from llm42.server.responses import error_response
from llm42.server.settings import ServerSettings

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
VALID_ID = re.compile(r"[!-~]{1,128}")
_PROTECTED = re.compile(r"/(v1|llm42|tokenize|detokenize|tokenizer_info)(/|$)")
_QUIET = re.compile(r"/(health|ready|metrics|llm42/status)$")
"""Paths that are asked again and again, and are no news."""
_CLIENT_GONE = 499


class AccessLog:
    """Gives each request an id, which comes back in a header, and logs one line about it when it is over.

    What nobody expected to go wrong is logged with the id, and answered.

    Args:
        app: What comes next.
        count: Called with the method, the path template and the status of each request.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        is_valid = given is None or VALID_ID.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state["request_id"] = given if given and is_valid else secrets.token_hex(16)
        status = _CLIENT_GONE
        started = time.monotonic()
        path = urllib.parse.quote(scope["path"])  # as it was sent: a line break in it must not begin a line of the log

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state["request_id"]
            await send(message)

        try:
            if is_valid:
                await self._app(scope, receive, named_send)
            else:
                message = f"{REQUEST_ID_HEADER} must be 1 to 128 printable ASCII characters without spaces"
                await error_response(APIError(400, message, param="request_id"))(scope, receive, named_send)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], path, extra={"request_id": state["request_id"]})
            if status != _CLIENT_GONE:
                raise  # part of another answer has been sent
            await error_response(as_api_error(error))(scope, receive, named_send)
        finally:
            seconds = time.monotonic() - started
            self._count(scope["method"], getattr(scope.get("route"), "path", "other"), status)
            logger.log(
                logging.DEBUG if _QUIET.search(scope["path"]) else logging.INFO,
                "%s %s %d in %.3f s",
                scope["method"],
                path,
                status,
                seconds,
                extra={
                    "request_id": state["request_id"],
                    "client": (scope.get("client") or ("", 0))[0],
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "duration_s": round(seconds, 6),
                },
            )


class Guard:
    """Refuses requests without a key, and bodies that are too large or take too long."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            if self._keys and scope["method"] != "OPTIONS" and _PROTECTED.match(scope["path"]):
                self._check_key(headers.get("authorization", ""))
            if scope["method"] in {"POST", "PUT", "PATCH"}:
                receive = await self._buffered(headers, receive)
        except APIError as error:
            await error_response(error)(scope, receive, send)
            return
        except _HungUpError:
            return
        await self._app(scope, receive, send)

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # the bytes that were sent
        # Every key is compared, in time that does not tell how much of it was right.
        matches = [hmac.compare_digest(given, expected) for expected in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise APIError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _buffered(self, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body; return a `receive` that gives it again."""
        limit = self._settings.max_body_size
        too_large = APIError(413, f"the body has more than {limit} bytes; send less", code="body_too_large")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise too_large
        try:
            body = await asyncio.wait_for(_read(receive, limit), self._settings.body_timeout_s)
        except asyncio.TimeoutError:
            seconds = self._settings.body_timeout_s
            raise APIError(408, f"the body did not come within {seconds:g} s", code="body_timeout") from None
        if body is None:
            raise too_large
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return pending.pop() if pending else await receive()

        return again


class _HungUpError(Exception):
    """The client went away before it had sent its body."""


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body; None if it has more than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUpError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)
