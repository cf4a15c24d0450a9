"""`llm42 serve` before a model is loaded: options, the port, the log; the running process is in tests/server."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from llm42.cli import app
from llm42.cli.serve import _JSONFormatter

BAD = [
    (["--log-level", "loud"], "log_level must be one of debug, info, warning, error, not 'loud'"),
    (["--log-format", "xml"], "log_format must be one of text, json, not 'xml'"),
    (["--max-body-size", "3"], "max_body_size must be at least 1024 bytes, not 3"),
    (["--request-timeout", "-1"], "request_timeout_s must be a positive number of seconds, not -1.0"),
    (["--cors-origin", "page.example"], "cors_origins must be * or like https://example.org"),
    (["--api-key", ""], "api_keys must be printable and not empty"),
    (["--api-key-file", "/nowhere/keys"], "api_key_file /nowhere/keys cannot be read"),
    (["--ssl-keyfile", __file__], "ssl_keyfile needs ssl_certfile"),
    (["--ssl-certfile", "/nowhere/certificate"], "ssl_certfile /nowhere/certificate is not a file"),
    (["--ssl-certfile", __file__], "are no certificate with its unencrypted key in PEM"),
    (["--tool-call-parser", "none"], "tool_call_parser must be one of hermes"),
    (["--host", "not a host"], "of host not a host cannot be used"),
]


def invoke(*arguments):
    return CliRunner().invoke(app, ["serve", "/no/such/model", *arguments])


@pytest.fixture(autouse=True)
def restored_logging():
    """The command sets up the process's logging."""
    root = logging.getLogger()
    handlers, levels = list(root.handlers), {name: logging.getLogger(name).level for name in (None, "llm42", "uvicorn")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_bad_option_exits_with_2_and_says_so_before_the_model_is_looked_for(arguments, message):
    result = invoke("--port", "0", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "/no/such/model" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--port", "65536"], ["--max-body-size", "x"], ["--drain-timeout", "-1"], ["--nope"]]
)
def test_an_option_of_a_wrong_form_exits_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_a_port_that_is_taken_is_told_before_the_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = invoke("--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} of host 127.0.0.1 cannot be used" in result.stderr
    assert "choose another with --port" in result.stderr


def test_help_is_grouped_and_needs_neither_torch_nor_a_web_server():
    code = (
        "import sys; sys.argv = ['llm42', 'serve', '--help']\n"
        "from llm42.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'uvicorn', 'fastapi'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    places = [result.stdout.index(f"─ {panel} ─") for panel in ("HTTP", "API", "Limits", "Engine")]
    assert places == sorted(places)
    assert result.stdout.index("--api-key-file") < places[1] < result.stdout.index("--served-model-name") < places[2]


def test_a_line_of_the_json_log_is_one_object_with_what_was_logged_beside_the_message():
    record = logging.makeLogRecord(
        {"name": "llm42.server", "levelno": logging.INFO, "levelname": "INFO", "msg": "two\nlines %d", "args": (5,)}
    )
    record.request_id = "a"
    record.exc_info = (ValueError, ValueError("wrong"), None)
    line = _JSONFormatter().format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["level"], entry["request_id"]) == ("two\nlines 5", "info", "a")
    assert "ValueError: wrong" in entry["exception"]
