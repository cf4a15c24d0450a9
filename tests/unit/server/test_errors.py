"""What clients are told of errors."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from llm42.errors import EngineStoppedError, ModelError, QueueFullError, RequestError, RequestTimeoutError
from llm42.server.errors import APIError, as_api_error, invalid_body
from llm42.server.schemas import ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ValueError("top_p must be"), 400, "invalid_request_error", None),
        (
            ValueError("prompt has 9 tokens, and max_model_len 5"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (ModelError("model x"), 400, "invalid_request_error", None),
        (QueueFullError("full"), 429, "rate_limit_error", "queue_full"),
        (EngineStoppedError("closed"), 503, "service_unavailable_error", "engine_stopped"),
        (RequestTimeoutError(2), 504, "timeout_error", "request_timeout"),
        (RequestError("failed"), 500, "server_error", "request_failed"),
        (KeyError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_each_error_has_its_status(error, status, kind, code):
    answer = as_api_error(error)
    assert (answer.status, answer.body["error"]["type"], answer.code) == (status, kind, code)
    assert "secret" not in str(answer)


def test_headers_belong_to_the_status():
    assert APIError(401, "x").headers == {"WWW-Authenticate": "Bearer"}
    assert APIError(429, "x").headers == {"Retry-After": "1"}
    assert APIError(504, "x").headers == {"X-Should-Retry": "false"}
    assert APIError(413, "x").headers == {"Connection": "close"}
    assert APIError(400, "x").headers == {}


def errors_of(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "max_token": 1}, "max_token"),
        ({"prompt": "a", "\ud800": 1}, None),
        ({"prompt": "a", "x" * 1000: 1}, None),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_the_first_wrong_field_is_named(body, param):
    answer = invalid_body(errors_of(CompletionBody, body))
    assert answer.status == 400
    assert answer.param is None if param is None else answer.param.startswith(param)
    assert len(str(answer)) < 400


def test_there_is_one_message_however_much_is_wrong():
    for body in ({"prompt": [1.5] * 10_000}, {"prompt": "a", **{f"x{i}": 1 for i in range(10_000)}}):
        assert len(errors_of(CompletionBody, body)) < 20
    assert len(errors_of(ChatBody, {"messages": [1] * 10_000})) == 1
