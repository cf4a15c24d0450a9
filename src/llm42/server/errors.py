"""Errors in the shape of the OpenAI API, so that its clients raise their own exceptions."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from llm42.errors import EngineStoppedError, QueueFullError, RequestError, RequestTimeoutError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_RETRY_AFTER_S = 1
_TYPE_NAMES = frozenset({"str", "int", "float", "bool"})
_NAMES = {"prompt_token_ids": "prompt", "text": "prompt"}
"""First words of messages about prompts, and the field that is meant."""


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: The HTTP status.
        message: What is wrong and what to do.
        param: The field of the request that is wrong.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What goes into the response, or into a stream that has begun."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in {408, 413}:
            return {"Connection": "close"}  # the rest of the body is not waited for
        if self.status == 429:
            return {"Retry-After": str(_RETRY_AFTER_S)}
        # A request that ran into its deadline would do so again.
        return {"X-Should-Retry": "false"} if self.status == 504 else {}


def as_api_error(error: Exception) -> APIError:
    """What a client is told of an error that the engine or a validation raised."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full")
    if isinstance(error, RequestTimeoutError):
        return APIError(504, str(error), code="request_timeout")
    if isinstance(error, EngineStoppedError):
        return APIError(503, str(error), code="engine_stopped")
    if isinstance(error, RequestError):
        return APIError(500, str(error), code="request_failed")
    if isinstance(error, ValueError):
        return invalid(error)
    return APIError(500, f"{type(error).__name__}; the server's log has the details", code="internal_error")


def invalid(error: ValueError, names: Mapping[str, str] = _NAMES) -> APIError:
    """Bad input; its message begins with the name of the field.

    Args:
        error: What is wrong.
        names: First words of messages that are no fields of the request, and which field is meant.
    """
    message = str(error)
    code = "context_length_exceeded" if "max_model_len" in message else None
    found = re.match(r"([a-z_]+)((?:\[\d+\]|\.[a-z_]+)*)(?=[\s=:])", message)
    param = names.get(found[1], found[1]) + found[2] if found else None
    return APIError(400, message, param=param, code=code)


def invalid_body(errors: Sequence[Any]) -> APIError:
    """What pydantic found wrong with a body, as one message about the first field."""
    first = _nearest(errors)
    param = _path(first["loc"]) or None
    kind, value = first["type"], first.get("input")
    if isinstance(value, bytes):
        return APIError(400, "the body is not read as JSON; send it with Content-Type: application/json")
    if kind == "value_error":  # of a validator of ours
        return invalid(first["ctx"]["error"])
    if kind == "extra_forbidden":
        message = f"{param or reprlib.repr(first['loc'][-1])} is not supported by this server; remove it"
    elif kind == "missing":
        message = f"{param or 'the body'} is missing"
    elif kind == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        param = None
    else:
        message = f"{param or 'the body'}: {first['msg']}, got {reprlib.repr(value)}"
    return APIError(400, message, param=param)


def _nearest(errors: Sequence[Any]) -> Any:
    """Of the first wrong field's errors, one for each type that it may have, the one that was found last in a list."""

    def progress(error: Any) -> tuple[int, int]:
        *_, last = error["loc"]
        return len(error["loc"]), last if isinstance(last, int) else 0

    field = errors[0]["loc"][:2]
    return max((error for error in errors if error["loc"][:2] == field), key=progress)


def _path(location: Sequence[str | int]) -> str:
    """A place in a body, such as `messages[0].content`; branches of a union, named by their types, are left out."""
    path = ""
    for part in location[1:] if location[:1] == ("body",) else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"\w{1,64}", part) and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path
