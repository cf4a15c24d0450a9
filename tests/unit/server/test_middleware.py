"""The middleware alone, with messages that no good client sends."""

from __future__ import annotations

import asyncio
import hmac

import pytest

from llm42.server.middleware import AccessLog, Guard
from llm42.server.settings import ServerSettings


def settings(**fields):
    return ServerSettings(**{"model_names": ("tiny",), "max_body_size": 1024, "body_timeout_s": 0.05, **fields})


def run(app, messages=(), *, method="POST", path="/v1/x", headers=()):
    """What an application sends for a request whose body comes in `messages`."""
    sent, queue = [], list(messages)

    async def receive():
        if queue:
            return queue.pop(0)
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "client": None}
    asyncio.run(app(scope, receive, send))
    return sent


def part(body, *, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


async def echo(_scope, receive, send):
    """Answer with the body."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_a_body_in_pieces_arrives_whole():
    sent = run(Guard(echo, settings()), [part(b"a", more=True), part(b"", more=True), part(b"b")])
    assert [message.get("body") for message in sent] == [None, b"ab"]


@pytest.mark.parametrize(
    ("messages", "headers", "status"),
    [
        ([part(b"x" * 1024)], [], 200),
        ([part(b"x" * 1025)], [], 413),
        ([part(b"x" * 1000, more=True), part(b"x" * 25, more=True)], [], 413),
        ([], [(b"content-length", b"1025")], 413),
        ([part(b"x")], [(b"content-length", b"x")], 200),
        ([part(b"x", more=True)], [], 408),
    ],
)
def test_the_limits_of_a_body_hold_whatever_its_length_says(messages, headers, status):
    sent = run(Guard(echo, settings()), messages, headers=headers)
    assert sent[0]["status"] == status
    assert ((b"connection", b"close") in sent[0]["headers"]) == (status in {408, 413})


def test_nothing_is_answered_to_a_client_that_left_before_its_body():
    assert run(Guard(echo, settings()), [part(b"x", more=True), {"type": "http.disconnect"}]) == []


def test_every_key_is_compared_whole_and_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda given, key: compared.append(key) or given == key)
    for key in (b"one", b"two"):
        sent = run(
            Guard(echo, settings(api_keys=("one", "two"))), [part(b"")], headers=[(b"authorization", b"Bearer " + key)]
        )
        assert sent[0]["status"] == 200
    assert compared == [b"one", b"two"] * 2


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/models", "/llm42/status", "/tokenize", "/detokenize", "/tokenizer_info"]
)
def test_paths_of_the_api_are_behind_the_key(path):
    assert run(Guard(echo, settings(api_keys=("one",))), [part(b"")], path=path)[0]["status"] == 401


@pytest.mark.parametrize("path", ["/", "/health", "/v1x", "/tokenizer", "/app.js"])
def test_other_paths_are_not(path):
    assert run(Guard(echo, settings(api_keys=("one",))), [part(b"")], path=path)[0]["status"] == 200


def test_an_error_after_the_answer_has_begun_is_raised_and_before_it_is_answered():
    async def broken_late(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("late")

    async def broken_early(_scope, _receive, _send):
        raise RuntimeError("early")

    counted = []
    with pytest.raises(RuntimeError, match="late"):
        run(AccessLog(broken_late, lambda *fields: counted.append(fields)))
    sent = run(AccessLog(broken_early, lambda *fields: counted.append(fields)))
    assert (sent[0]["status"], b"RuntimeError" in sent[1]["body"], b"early" in sent[1]["body"]) == (500, True, False)
    assert counted == [("POST", "other", 200), ("POST", "other", 500)]


def test_what_is_not_http_passes():
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["type"])

    asyncio.run(AccessLog(Guard(app, settings()), print)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
