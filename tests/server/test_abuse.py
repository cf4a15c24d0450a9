"""What clients do wrong, on purpose or not: no 500, no hang, no traceback, nothing left behind, neighbours unharmed."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import socket
import threading
import time
from contextlib import ExitStack

import httpx2 as httpx
import pytest

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
EXACT = {**BODY, "deterministic": True, "logprobs": 2}
LONG = {**BODY, "max_tokens": 1100}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """Nothing that a client does is worth a traceback, or an error in the log."""
    caplog.set_level(logging.INFO)
    yield
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def post(server, path, content, media_type="application/json"):
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    return httpx.post(server.url + path, content=content, headers={"Content-Type": media_type}, timeout=60)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def request_bytes(body, path="/v1/completions"):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def receive_all(connection):
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


def answers(server, body):
    """What a deterministic request must answer in any company."""
    (choice,) = post(server, "/v1/completions", body).json()["choices"]
    return choice


# Bodies

NESTED = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"model":' + b"[" * 700 + b"]" * 700 + b"}",
    b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}",
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":' + b"[" * 800 + b"]" * 800 + b"}}",
]
BROKEN = [
    b"",
    b"{",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b'{"prompt": "\x00"}',
    b'{"\\ud800":1}',
    b'{"":1}',
    b"NaN",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", BROKEN + NESTED)
def test_a_body_that_is_no_request_is_400(server, path, content):
    response = post(server, path, content)
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("media_type", ["text/plain", "application/xml", "multipart/form-data"])
def test_another_content_type_is_400_with_the_right_one(server, media_type):
    response = post(server, "/v1/completions", BODY, media_type)
    assert (response.status_code, "Content-Type: application/json" in response.text) == (400, True)


WRONG = [
    *[{"temperature": value} for value in (float("nan"), float("inf"), 1e999, -1, "1", True, [], {})],
    *[{name: float("nan")} for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty")],
    *[{"max_tokens": value} for value in (-1, 0, 1.5, 10**400, "5", True)],
    *[{"n": value} for value in (0, -1, 10**9, 10**30, 1e9)],
    *[{"seed": value} for value in (2**64, -(2**63) - 1, 10**400, 0.5)],
    *[
        {"prompt": value}
        for value in (None, 5, [], [[]], [None], ["a", 5], [5, "a"], [[5], "a"], [5.5], [-1], [10**30])
    ],
    {"prompt": {}},
    {"prompt": "a\ud800b"},
    {"prompt": ["a", "\udfff"]},
    {"prompt": [[5]] * 2000},
    {"prompt": "x" * 2_000_000},
    {"prompt": [5] * 500_000},
    {"prompt": [1.5] * 200_000},
    {"logit_bias": {"\ud800": 1}},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"5": float("nan")}},
    {"stop_token_ids": [10**30]},
    {"logprobs": 10**12},
    {"stop": [""]},
    {"stop": [5] * 100_000},
    {"request_id": "a b"},
    {"request_id": "\ud800"},
    {"suffix": "\ud800"},
    {"guided_regex": "\ud800"},
    {"guided_grammar": "\ud800"},
    {"guided_json": "\ud800"},
    {"guided_choice": ["\ud800"]},
    {"\u0130": 1},
    {"x" * 100_000: 1},
    {f"x{index}": 1 for index in range(100_000)},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: f"{fields!r:.40}")
def test_a_field_that_is_wrong_is_400_and_named(server, fields):
    response = post(server, "/v1/completions", {**BODY, **fields})
    assert response.status_code == 400
    assert len(response.content) < 6000  # a number may be quoted
    param = response.json()["error"]["param"]
    assert param is None or param.split("[")[0] in {*fields, "structured_outputs", "prompt"}


CHAT_FIELDS = [
    {"messages": [{"role": "\ud800", "content": "x"}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
    {"messages": [{"role": "user", "content": "x"}] * 5000},
    {"messages": [1] * 100_000},
    {"tool_choice": "\ud800"},
    {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
    {"chat_template": "\ud800"},
    *[{"chat_template_kwargs": {name: 1}} for name in ("self", "messages", "conversations", "chat_template")],
]


@pytest.mark.parametrize("fields", CHAT_FIELDS, ids=lambda fields: f"{fields!r:.40}")
def test_a_conversation_that_is_wrong_is_400(server, fields):
    assert post(server, "/v1/chat/completions", {**CHAT, **fields}).status_code == 400


@pytest.mark.parametrize("name", ["user", "prompt_cache_key", "safety_identifier", "stop"])
def test_a_lone_surrogate_harms_nobody_where_no_token_depends_on_it(server, name):
    assert post(server, "/v1/completions", {**BODY, name: "\ud800"}).status_code == 200


# Bytes

GARBAGE = [
    b"garbage\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:40]))
def test_what_is_not_http_is_400_and_ends_the_connection(server, data):
    with connect(server) as connection:
        connection.sendall(data)
        assert receive_all(connection).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_stops_sending_in_the_middle_is_forgotten(server):
    data = request_bytes(LONG)
    for end in (3, 40, len(data) - 5, len(data)):
        with connect(server) as connection:
            connection.sendall(data[:end])
            connection.shutdown(socket.SHUT_WR)
            receive_all(connection)
    server.assert_clean()


# Clients that leave


def is_idle(server):
    return not server.llm._engine.core.has_work and not server.llm._streams


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_costs_one_more_pass_at_most(server, monkeypatch, stream):
    core = server.llm._engine.core
    running, may_go, cancelled = threading.Event(), threading.Event(), threading.Event()
    step, cancel, steps = core.step, core.cancel, []

    def counted_step():
        steps.append(cancelled.is_set())
        result = step()
        if len(steps) == 5:
            running.set()
            may_go.wait(30)
        return result

    def watched_cancel(request):
        cancelled.set()
        cancel(request)

    monkeypatch.setattr(core, "step", counted_step)
    monkeypatch.setattr(core, "cancel", watched_cancel)
    commands = server.llm._commands
    with connect(server) as connection:
        connection.sendall(request_bytes({**LONG, "stream": stream}))
        running.wait(30)
    deadline = time.monotonic() + 30
    while commands.empty():  # the hang-up reaches the engine while a pass runs ...
        assert time.monotonic() < deadline, "a client hung up, and the engine was not told"
        time.sleep(0.001)
    may_go.set()
    server.assert_clean()
    assert len(steps) == 5  # ... and no other pass follows
    assert cancelled.is_set()


def test_clients_that_leave_while_queued_or_tokenized_leave_nothing(server):
    with ExitStack() as stack:
        for index in range(60):
            connection = stack.enter_context(connect(server))
            connection.sendall(request_bytes({**LONG, "prompt": "A token. " * 60, "stream": index % 2 == 0}))
    server.assert_clean()


def test_a_client_that_reads_nothing_is_buffered_no_further_than_its_request(server):
    """Its neighbour is served meanwhile; and when it hangs up, all that waits for it goes."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_bytes({**LONG, "max_tokens": 400, "logprobs": 20, "stream": True}))
        while not server.llm._engine.core.has_work:
            time.sleep(0.001)
        deadline = time.monotonic() + 60
        while not is_idle(server):
            assert time.monotonic() < deadline, "the engine waits for a client that does not read"
            time.sleep(0.01)
        assert answers(server, EXACT)
    server.assert_clean()


def test_a_thousand_idle_connections_are_no_neighbours(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    expected = answers(server, EXACT)
    try:
        with ExitStack() as stack:
            for index in range(1000):
                connection = stack.enter_context(connect(server))
                if index % 2:
                    connection.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert answers(server, EXACT) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The storm


async def storm(server, num_requests, num_dropped, seed=0):
    """Send requests at once and drop some at random moments; return what the others answered, in order."""
    rng = random.Random(seed)
    dropped = set(rng.sample(range(num_requests), num_dropped))

    async def one(client, index):
        body = {**EXACT, "seed": index % 8, "deterministic": index % 4 != 3, "prompt": [5 + index % 8, 6, 7]}
        if index in dropped:
            body |= {"stream": index % 2 == 0, "max_tokens": 200}
            await asyncio.sleep(rng.random() * 0.5)
            work = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(rng.random() * 2)
            work.cancel()
            return await asyncio.gather(work, return_exceptions=True) and None
        return (await client.post("/v1/completions", json=body)).json()["choices"][0]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*[one(client, index) for index in range(num_requests)])


def num_tasks(server):
    """How many asyncio tasks the server has."""
    return len(asyncio.all_tasks(server.loop))


@pytest.mark.parametrize("size", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_storm_of_hang_ups_leaves_nothing_and_changes_no_bit(server, size):
    expected = [answers(server, {**EXACT, "seed": seed, "prompt": [5 + seed, 6, 7]}) for seed in range(8)]
    before = num_tasks(server)
    answered = asyncio.run(storm(server, size, size // 2))
    server.assert_clean()
    deadline = time.monotonic() + 10
    while num_tasks(server) > before:
        assert time.monotonic() < deadline, "a task is left for a request that is over"
        time.sleep(0.01)
    exact = [(choice, expected[i % 8]) for i, choice in enumerate(answered) if choice is not None and i % 4 != 3]
    assert len(exact) > size // 4
    assert all(choice == wanted for choice, wanted in exact)
    # The partner: ordinary requests do depend on their company, so that the comparison could fail.
    ordinary = [(choice, expected[i % 8]) for i, choice in enumerate(answered) if choice is not None and i % 4 == 3]
    assert any(choice["logprobs"] != wanted["logprobs"] for choice, wanted in ordinary)
