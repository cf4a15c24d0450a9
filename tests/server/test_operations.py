"""Operations: who is let in, what is refused and how, what is told of health, and how the process starts and ends."""

from __future__ import annotations

import json
import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import httpx2 as httpx
import pytest

from llm42.server import http
from served import run_server

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 1000}
OPEN = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/app.js")
PROTECTED = ("/v1/models", "/v1/models/tiny", "/llm42/status", "/tokenizer_info", "/v1/no-such-thing")


@pytest.fixture(scope="module")
def guarded(model):
    """A server with small limits and keys."""
    settings = {
        "api_keys": ("first key", "zweiter-schlüssel"),
        "cors_origins": ("https://page.example",),
        "max_body_size": 2048,
        "body_timeout_s": 0.5,
        "request_timeout_s": 0.6,
    }
    with run_server(model, settings, max_num_seqs=1, max_queue_len=2) as server:
        yield server
        server.assert_clean()


def call(server, path, body=None, *, method=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return client.request(method or ("GET" if body is None else "POST"), path, json=body, headers=headers)


def allowed(server, path, body=None, **fields):
    return call(server, path, body, authorization="Bearer first key", **fields)


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def send(server, data):
    """What a raw exchange answers, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


# Keys


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize("given", [None, b"Bearer wrong", b"Bearer", b"first key", b"Basic first key", b"Bearer first"])
def test_a_request_without_a_right_key_is_refused(guarded, path, given):
    response = call(guarded, path, **({} if given is None else {"authorization": given}))
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("given", ["Bearer first key", "bearer first key", "Bearer zweiter-schlüssel".encode()])
def test_each_key_lets_in(guarded, given):
    assert call(guarded, "/v1/models", authorization=given).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_operators_and_the_page_need_no_key(guarded, path):
    assert call(guarded, path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_the_key_is_asked_for_before_the_body_is_read(guarded, path):
    assert call(guarded, path, {"garbage": 1}).status_code == 401


# CORS


def test_other_origins_are_not_let_in_unless_asked_for(server):
    response = call(server, "/v1/models", origin="https://page.example")
    assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = call(server, "/v1/models", method="OPTIONS", origin="https://page.example")
    assert preflight.status_code == 405


def test_a_given_origin_may_call_and_read_even_a_refusal(guarded):
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-request-id"}
    preflight = call(guarded, "/v1/completions", method="OPTIONS", origin="https://page.example", **asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = call(guarded, "/v1/models", origin="https://page.example")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    other = call(guarded, "/v1/completions", method="OPTIONS", origin="https://other.example", **asked)
    assert "access-control-allow-origin" not in other.headers


# Limits


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(guarded):
    with_length = allowed(guarded, "/v1/completions", {**BODY, "user": "x" * 2048})
    assert (with_length.status_code, error_of(with_length)["code"]) == (413, "body_too_large")
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first key\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    answer = send(guarded, head + b"400\r\n" + b"x" * 1024 + b"\r\n401\r\n" + b"x" * 1025 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(guarded):
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first key\r\nContent-Length: 50\r\n\r\n{"
    assert send(guarded, head).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_is_too_large_or_does_not_come_ends_the_connection(server, monkeypatch):
    assert send(server, b"GET / HTTP/1.1\r\nX: " + b"a" * http.MAX_HEAD_SIZE).startswith(b"HTTP/1.1 400 ")
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.1)
    for beginning in (b"", b"GET / HTTP/1.1\r\nX: a"):
        assert send(server, beginning) == b""


def test_a_full_queue_is_429_for_whole_and_streamed_requests(guarded):
    several = [threading.Thread(target=allowed, args=(guarded, "/v1/completions", LONG)) for _ in range(3)]
    for thread in several:
        thread.start()
    core = guarded.llm._engine.core
    while len(core.scheduler.waiting) < 2:
        time.sleep(0.001)
    for stream in (False, True):
        response = allowed(guarded, "/v1/completions", {**BODY, "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert (error_of(response)["code"], error_of(response)["type"]) == ("queue_full", "rate_limit_error")
    for thread in several:
        thread.join()


@pytest.mark.parametrize("prompt", [[5] * 1200, "A token. " * 300, "x" * 1900])
def test_a_prompt_that_is_too_long_is_400_and_says_so(guarded, prompt):
    response = allowed(guarded, "/v1/completions", {**BODY, "prompt": prompt})
    assert (response.status_code, error_of(response)["code"]) in {
        (400, "context_length_exceeded"),
        (413, "body_too_large"),  # of token ids
    }


def test_a_request_past_its_deadline_is_504_or_the_last_event_of_its_stream(guarded):
    response = allowed(guarded, "/v1/completions", {**LONG, "n": 2})
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert error_of(response)["code"] == "request_timeout"
    stream = allowed(guarded, "/v1/completions", {**LONG, "n": 2, "stream": True})
    *_, last, done, empty = stream.text.split("\n\n")
    assert (stream.status_code, done, empty) == (200, "data: [DONE]", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"


# Names and logs


def access_lines(caplog, number):
    """The lines about requests, which are written after the answers, once there are so many."""
    deadline = time.monotonic() + 10
    while len(lines := [record for record in caplog.records if hasattr(record, "status")]) < number:
        assert time.monotonic() < deadline, "a line of the log is missing"
        time.sleep(0.005)
    return lines


def test_the_request_id_comes_back_and_stands_in_one_line_of_the_log(server, caplog):
    caplog.set_level(logging.INFO, "llm42.server")
    given = call(server, "/v1/completions", BODY, x_request_id="my-id/1")
    assert (given.headers["x-request-id"], given.json()["id"]) == ("my-id/1", "cmpl-my-id/1")
    in_body = call(server, "/v1/completions", {**BODY, "request_id": "other"}, x_request_id="my-id/1")
    assert (in_body.headers["x-request-id"], in_body.json()["id"]) == ("other", "cmpl-other")
    made = [call(server, "/v1/models").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    lines = [(record.request_id, record.status) for record in access_lines(caplog, 4)]
    assert lines == [("my-id/1", 200), ("other", 200), (made[0], 200), (made[1], 200)]


@pytest.mark.parametrize("value", [b"a b", b"\xff", b"", b"x" * 129])
def test_a_request_id_that_cannot_stand_in_a_log_is_refused(server, value):
    response = call(server, "/v1/models", x_request_id=value)
    assert response.status_code == 400
    assert error_of(response)["param"] == "request_id"


def test_a_path_cannot_write_a_line_of_its_own_into_the_log(server, caplog):
    caplog.set_level(logging.INFO, "llm42.server")
    assert call(server, "/nothing%0AERROR%20forged").status_code == 404
    assert not [record for record in access_lines(caplog, 1) if "\n" in record.getMessage()]


def test_an_endpoint_knows_which_methods_it_has(server):
    assert (call(server, "/v1/completions").status_code, call(server, "/v1/nothing").status_code) == (405, 404)
    assert call(server, "/v1/completions").headers["allow"] == "POST"


def test_an_error_nobody_expected_is_500_with_its_id_in_the_log(server, monkeypatch, caplog):
    monkeypatch.setattr(type(server.llm), "stats", lambda _: 1 // 0)
    response = call(server, "/llm42/status", x_request_id="unlucky")
    assert (response.status_code, response.headers["x-request-id"]) == (500, "unlucky")
    assert "ZeroDivisionError" in error_of(response)["message"]
    assert [record.request_id for record in caplog.records if record.exc_info] == ["unlucky"]


# Health


def test_what_operators_ask_is_answered(server):
    assert call(server, "/health").json() == {"status": "ok"}
    assert call(server, "/ready").json() == {"status": "ready"}
    assert set(call(server, "/version").json()) == {"version"}
    assert "llm42" in call(server, "/metrics").text
    status = call(server, "/llm42/status").json()
    assert (status["model"], status["accepts_deterministic"]) == ("tiny", True)
    assert "text/html" in call(server, "/").headers["content-type"]


def test_the_page_may_load_nothing_from_elsewhere(server):
    headers = call(server, "/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert (policy["frame-ancestors"], policy["base-uri"]) == ("'none'", "'none'")
    assert headers["x-content-type-options"] == "nosniff"


def test_an_engine_that_failed_is_503_everywhere_and_ends_what_runs(model, monkeypatch):
    with run_server(model) as server:
        with server.client() as client:
            stream = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1000, stream=True)
            next(stream)
            monkeypatch.setattr(server.llm._engine.core, "step", lambda: 1 // 0)
            with pytest.raises(Exception, match="ZeroDivisionError"):
                list(stream)
        for path, body in (("/health", None), ("/ready", None), ("/v1/completions", BODY)):
            response = call(server, path, body)
            assert response.status_code == 503
            assert "the engine failed with ZeroDivisionError" in error_of(response)["message"]
        assert call(server, "/metrics").status_code == 200


# The process


class Served:
    """`llm42 serve` as a process."""

    def __init__(self, model, *options):
        command = [sys.executable, "-m", "llm42", "serve", str(model), "--port", "0", "--kernels", "portable"]
        fields = ["--served-model-name", "tiny", "--max-model-len", "2000", "--num-threads", "1", "--mode", "verify"]
        self.process = subprocess.Popen([*command, *fields, *options], stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.url = ""
        self.client = None
        while not self.url:
            line = self.process.stderr.readline()
            assert line, "".join(self.lines)
            self.lines.append(line)
            if "serving tiny at " in line:
                self.url = line.split("serving tiny at ")[1].split("/v1")[0]

    def end(self):
        """The exit status, and everything on stderr."""
        self.lines.append(self.process.communicate(timeout=30)[1])
        return self.process.returncode, "".join(self.lines)


@pytest.fixture
def serve(model):
    """A function that starts `llm42 serve`; what it started is ended."""
    started = []

    def start(*options):
        started.append(Served(model, *options))
        return started[-1]

    yield start
    for served in started:
        if served.client is not None:
            served.client.close()
        served.process.kill()
        served.process.wait()
        served.process.stderr.close()


def begin_stream(served, max_tokens=1500, **fields):
    """The lines of a long stream that has begun."""
    served.client = httpx.Client(base_url=served.url, timeout=60, **fields)
    request = served.client.build_request(
        "POST", "/v1/completions", json={**BODY, "max_tokens": max_tokens, "stream": True}
    )
    lines = served.client.send(request, stream=True).iter_lines()
    next(lines)
    return lines


def test_sigterm_lets_a_stream_finish_and_then_exits_0(serve):
    served = serve("--log-format", "json", "--drain-timeout", "300")
    lines = begin_stream(served, max_tokens=400)
    served.process.terminate()
    received = [line for line in lines if line]
    assert received[-1] == "data: [DONE]"
    assert json.loads(received[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    status, log = served.end()
    assert status == 0, log
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (request,) = [entry for entry in entries if entry.get("path") == "/v1/completions"]
    assert request["request_id"]
    assert (request["method"], request["status"], request["level"]) == ("POST", 200, "info")
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url)


def test_a_drain_that_takes_too_long_tells_who_listens_and_ends_who_does_not(serve):
    """The second client reads nothing, so that its stream cannot end."""
    served = serve("--drain-timeout", "0")
    host, port = served.url.removeprefix("http://").split(":")
    lines = begin_stream(served)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        body = json.dumps({**BODY, "max_tokens": 1500, "logprobs": 20, "stream": True}).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        connection.recv(1024)
        served.process.terminate()
        *_, last, done = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert done == "data: [DONE]"
        status, log = served.end()
    assert status == 0, log
    assert "Traceback" not in log


def test_tls_serves_https_only_and_a_second_signal_ends_what_runs_at_once(serve, tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    try:
        made = subprocess.run(
            [*command, *subject, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert made.returncode == 0, made.stderr
    served = serve("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--drain-timeout", "1000")
    assert served.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(f"{served.url}/health", verify=trusted).json() == {"status": "ok"}
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http{served.url.removeprefix('https')}/health")
    lines = begin_stream(served, verify=trusted)
    served.process.terminate()
    for _ in range(2):
        next(lines)
    served.process.send_signal(signal.SIGINT)
    assert list(lines)
    status, log = served.end()
    assert status == 0, log
    assert "Traceback" not in log
