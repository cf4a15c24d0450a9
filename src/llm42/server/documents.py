"""What the OpenAPI schema tells of responses. For documentation only: no response is made or checked with these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What is wrong, and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error, and the last event of a stream that could not go on."""

    error: ErrorDetail


class Choice(BaseModel):
    """One output; of a chat, `message` instead of `text`, and in chunks `delta`."""

    model_config = ConfigDict(extra="allow")

    index: int
    finish_reason: str | None
    seed: int


class Usage(BaseModel):
    """Tokens; `llm42` tells of windows, rollbacks, and recomputed and cached tokens."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    llm42: dict[str, int]


class Completion(BaseModel):
    """An answer. A stream has such objects as events, without `usage` unless it is asked for, and ends with [DONE]."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


_ERRORS = {
    400: "The request is not valid, or too long for the model.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or no such path.",
    405: "The path has other methods.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "The queue is full; try again after Retry-After seconds.",
    500: "The request failed.",
    503: "The engine has failed, or the server is shutting down.",
    504: "The request did not finish within the server's limit.",
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """The description of some errors, and of all others."""
    described: Responses = {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}
    return {**described, "default": {"model": ErrorBody, "description": "Any other error."}}


READS = errors(400, 401, 404, 503)
WRITES = errors(400, 401, 404, 408, 413, 503)
EVENTS: Responses = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    **READS,
}
COMPLETIONS: Responses = {
    200: {
        "model": Completion,
        "description": "The answer, or with `stream` its pieces.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **errors(400, 401, 404, 408, 413, 429, 500, 503, 504),
}
