"""`llm42 chat URL`: what is sent to a server, and what is made of everything that it may send back.

The server is a real one, of this file: it sends bytes that no well-behaved server would send in that way.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import aclosing, contextmanager

import pytest

from llm42.cli.chat_models import ContextFullError
from llm42.cli.chat_remote import RemoteModel
from llm42.cli.facts import Verification
from llm42.errors import RequestError


def event(**fields):
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def delta(text, **fields):
    return event(choices=[{"index": 0, "delta": {"content": text}, **fields}], system_fingerprint="fp_1")


USAGE = {"completion_tokens": 3, "llm42": {"windows": 4, "rollbacks": 2, "recomputed_tokens": 1}}
ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
ANSWER = ROLE + delta("Grü", seed=2**64 - 1) + b": keep-alive\n\n" + delta("ße [b]\x1b 世界") + END + DONE
TEXT = "Grüße [b]\x1b 世界"


class Server:
    """Answers every connection with the given bytes, `step` of them in each HTTP chunk, and notes what it was asked."""

    def __init__(self, body, step=1000, status="200 OK", content_type="text/event-stream", is_endless=False):
        self.body, self.step, self.status, self.content_type = body, step, status, content_type
        self.is_endless = is_endless
        self.requests = []
        self.is_left = threading.Event()

    async def handle(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length:" in line), 0)
        self.requests.append((head, json.loads(await reader.readexactly(length) or b"null")))
        fields = f"Content-Type: {self.content_type}\r\nTransfer-Encoding: chunked"
        writer.write(f"HTTP/1.1 {self.status}\r\n{fields}\r\n\r\n".encode())
        for start in range(0, len(self.body), self.step):
            piece = self.body[start : start + self.step]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        if self.is_endless:
            assert await reader.read() == b""
            self.is_left.set()
        writer.write(b"0\r\n\r\n")
        writer.close()


@contextmanager
def serving(body, **options):
    server, is_ready, loop = Server(body, **options), threading.Event(), asyncio.new_event_loop()

    async def main():
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server.stop = asyncio.Event()
        is_ready.set()
        async with listener:
            await server.stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    is_ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join()
        loop.close()


QUESTION = [{"role": "user", "content": "Hi"}]


def answer(server, parameters=None, api_key=None):
    async def collect():
        model = RemoteModel(server.url, "m", api_key)
        return [item async for item in model.stream(QUESTION, parameters or {})]

    *pieces, facts = asyncio.run(collect())
    return "".join(pieces), facts


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
def test_an_answer_is_the_same_however_the_stream_is_cut(step, newline):
    with serving(ANSWER.replace(b"\n", newline), step=step) as server:
        text, facts = answer(server)
    assert text == TEXT
    assert (facts.num_tokens, facts.finish_reason, facts.seed) == (3, "stop", 2**64 - 1)
    assert facts.fingerprint == "fp_1"
    assert facts.verification == Verification(4, 2, 1)


def test_a_server_that_tells_nothing_beside_the_answer_is_enough():
    body = event(choices=[{"delta": {"content": "Hi"}, "finish_reason": None}])
    with serving(body + event(choices=[{"delta": {}, "finish_reason": "stop"}]) + DONE) as server:
        text, facts = answer(server)
    assert text == "Hi"
    assert (facts.num_tokens, facts.seed, facts.fingerprint, facts.verification) == (None, None, None, None)


def test_only_given_parameters_are_sent_and_the_key_as_a_bearer_token():
    with serving(ANSWER) as server:
        answer(server, {"seed": 3, "deterministic": True}, api_key="secret")
    ((head, body),) = server.requests
    assert head.startswith("POST /v1/chat/completions ")
    assert "authorization: bearer secret" in head.lower()
    assert body == {
        "model": "m",
        "messages": QUESTION,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        "deterministic": True,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (delta("Hel") + event(error={"message": "out of luck", "code": None}) + DONE, "failed: out of luck"),
        (delta("Hel") + event(error="out of luck"), "failed: out of luck"),
        (delta("Hel"), "ended the stream before the answer was finished"),
        (delta("Hel") + DONE, "ended the stream before the answer was finished"),
        (b"data: Hello\n\n", "no chunk of a chat completion: Hello"),
        (b"data: [1]\n\n", "no chunk of a chat completion"),
        (event(choices=[{"text": "Hel"}]), "no chunk of a chat completion"),
    ],
)
def test_a_stream_that_breaks_is_an_error_and_never_a_short_answer(body, message):
    with serving(body) as server, pytest.raises(RequestError, match=message):
        answer(server)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            "401 Unauthorized",
            {"error": {"message": "no key"}},
            RequestError,
            "answered 401: no key; give --api-key-file",
        ),
        ("400 Bad Request", {"error": {"message": "bad seed", "code": None}}, RequestError, "answered 400: bad seed"),
        (
            "400 Bad Request",
            {"error": {"message": "too much", "code": "context_length_exceeded"}},
            ContextFullError,
            "too much",
        ),
        (
            "400 Bad Request",
            {"object": "error", "message": "This model's maximum context length is 8 tokens"},
            ContextFullError,
            "is 8 tokens",
        ),
        ("502 Bad Gateway", "<html>bad gateway</html>", RequestError, "answered 502: <html>bad gateway</html>"),
        ("200 OK", {"choices": []}, RequestError, "text/event-stream"),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_server(status, body, kind, message):
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    with (
        serving(raw, status=status, content_type="application/json") as server,
        pytest.raises(kind, match=message),
    ):
        answer(server)


def test_leaving_an_answer_closes_its_connection():
    async def leave(url):
        async with aclosing(RemoteModel(url, "m", None).stream(QUESTION, {})) as stream:
            return await anext(stream)

    with serving(delta("Hel"), is_endless=True) as server:
        assert asyncio.run(leave(server.url)) == "Hel"
        assert server.is_left.wait(10)


def test_cancelling_an_answer_closes_its_connection():
    async def cancel(url):
        is_started = asyncio.Event()

        async def read():
            async for _ in RemoteModel(url, "m", None).stream(QUESTION, {}):
                is_started.set()

        task = asyncio.create_task(read())
        await is_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(delta("Hel"), is_endless=True) as server:
        asyncio.run(cancel(server.url))
        assert server.is_left.wait(10)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_only_model_of_a_server_is_found(path):
    listed = json.dumps({"data": [{"id": "tiny"}]}).encode()
    with serving(listed, content_type="application/json") as server:
        assert RemoteModel(server.url + path, None, "secret").name == "tiny"
    ((head, _),) = server.requests
    assert head.startswith("GET /v1/models ")
    assert "authorization: bearer secret" in head.lower()


@pytest.mark.parametrize(
    ("listed", "kind", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, ValueError, "has 2 models; name one with --model: a, b"),
        ({"data": []}, ValueError, "has 0 models"),
        (["a"], RequestError, "did not answer with a list of models"),
    ],
)
def test_a_model_that_cannot_be_chosen_must_be_named(listed, kind, message):
    with (
        serving(json.dumps(listed).encode(), content_type="application/json") as server,
        pytest.raises(kind, match=message),
    ):
        RemoteModel(server.url, None, None)


def test_a_server_that_is_not_there_is_named():
    with serving(b"") as server:
        pass
    with pytest.raises(RequestError, match=f"no answer from {server.url}/v1 .*is the server running"):
        RemoteModel(server.url, None, None)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://host:port"])
def test_a_bad_url_is_bad_input(url):
    with pytest.raises(ValueError, match="URL"):
        RemoteModel(url, "m", None)


def test_talking_to_a_server_needs_no_torch():
    with serving(ANSWER) as server:
        code = (
            "import json, sys; import llm42.cli; from typer.testing import CliRunner\n"
            f"result = CliRunner().invoke(llm42.cli.app, ['chat', {server.url!r}, '--model', 'm'], input='Hi')\n"
            "assert 'torch' not in sys.modules\n"
            "print(json.dumps((result.exit_code, result.stdout, result.stderr)))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, stdout, stderr = json.loads(result.stdout)
    assert (exit_code, stdout) == (0, f"{TEXT}\n")
    assert stderr.startswith("3 tokens (stop) · ")
    assert stderr.endswith(f" · 4 windows · 2 rollbacks · 1 recomputed · seed {2**64 - 1} · fingerprint fp_1\n")
