"""`llm42 chat` in a real terminal and in a pipe, with a model in its process and with `llm42 serve`."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx2
import pytest

from tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")

ENGINE = ("--num-threads", "1", "--kv-cache-bytes", "16M", "--kernels", "portable")  # not built in each new cache
SAMPLING = ("--deterministic", "--seed", "3", "--temperature", "0.9", "--max-tokens", "8", "--ignore-eos")
# The terminal must be the process's own, so that a Ctrl-C typed there reaches it as a signal.
IN_TERMINAL = (
    "import fcntl, runpy, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "runpy.run_module('llm42', run_name='__main__', alter_sys=True)\n"
)
PROMPT = "\n>>> "


class Terminal:
    """A person at a terminal who types, and waits for what appears."""

    def __init__(self, *arguments, **environment):
        self._master, slave = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200", **environment},
        )
        os.close(slave)
        self._unread = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, text):
        """What appears up to and with the text."""
        while text not in self._unread:
            assert self._read(), f"the chat ended before {text!r}: {self._unread!r}"
        end = self._unread.index(text) + len(text)
        seen, self._unread = self._unread[:end], self._unread[end:]
        return seen

    def wait_for_more(self):
        """Wait until anything appears."""
        while not self._unread:
            assert self._read(), "the chat ended"

    def say(self, line):
        """Type a line and wait until the chat is ready for the next; what appeared in between."""
        self.type(f"{line}\n")
        self.wait_for(f"{line}\n")
        return self.wait_for(PROMPT).removesuffix(PROMPT)

    def end(self, typed):
        """Type what ends the chat; its exit status.

        Typed again while nothing happens: readline prints its prompt before it waits for keys, and a signal in between
        is not noticed until the next key.
        """
        for _ in range(20):
            self.type(typed)
            while self._has_more(within_s=3.0):
                if not self._read():
                    return self._process.wait()
        raise AssertionError(f"the chat does not end by {typed!r}")

    def close(self):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _has_more(self, within_s):
        return bool(select.select([self._master], [], [], within_s)[0])

    def _read(self):
        assert self._has_more(within_s=120.0), f"nothing came after {self._unread!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # what Linux says when the other end is closed
            return False
        self._unread += data.decode().replace("\r\n", "\n")
        return bool(data)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def server(model):
    command = [sys.executable, "-m", "llm42", "serve", model, "--port", "0", "--api-key", "secret", *ENGINE]
    with subprocess.Popen([*command, "--log-level", "error"], stderr=subprocess.PIPE, encoding="utf-8") as process:
        try:
            said = ""
            while (found := re.search(r"serving .* at (\S+)/v1", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[1]
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture(params=["model", "server"])
def target(request):
    """The arguments that say with whom to chat."""
    if request.param == "model":
        return (request.getfixturevalue("model"), *ENGINE)
    return (request.getfixturevalue("server"), "--api-key", "secret")


@contextmanager
def chatting(target, tmp_path):
    terminal = Terminal("chat", *target, *SAMPLING, LLM42_CACHE=str(tmp_path / "cache"))
    try:
        terminal.wait_for("Ctrl-D ends\n>>> ")
        yield terminal
    finally:
        terminal.close()


def test_a_chat_in_a_terminal(target, tmp_path):
    """One session, since each takes seconds to start: answers, cancelling, commands, what is kept, and the end."""
    with chatting(target, tmp_path) as terminal:
        first = terminal.say("What is a token?")
        assert re.search(r"\n8 tokens \(length\) · .* rollbacks · .* seed 3 · fingerprint fp_\w+\n", first)
        terminal.say("/set max_tokens 1900")
        terminal.type("Go on.\n")
        terminal.wait_for("Go on.\n")
        terminal.wait_for_more()
        terminal.type("\x03")
        assert terminal.wait_for(PROMPT).endswith("\ncancelled\n>>> ")
        assert_idle(target)
        assert "error: /nonsense is no command" in terminal.say("/nonsense")
        terminal.say("/set max_tokens 8")
        again = terminal.say("/retry")
        terminal.say(f"/save {tmp_path / 'chat.json'}")
        terminal.say("/new")
        assert terminal.say("What is a token?").splitlines()[:-2] == first.splitlines()[:-2]
        assert terminal.end("\x04") == 0
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [message["content"] for message in saved["messages"] if message["role"] == "user"] == [
        "What is a token?",
        "Go on.",
    ]
    assert [answer["seed"] for answer in saved["answers"]] == [3, 3]
    assert again
    assert "What is a token?\n" in (tmp_path / "cache" / "chat_history").read_text(encoding="utf-8")


def assert_idle(target):
    """Assert that soon no request runs on the server that was chatted with."""
    if not target[0].startswith("http"):
        return
    deadline = time.monotonic() + 30
    headers = {"Authorization": "Bearer secret"}
    while (status := httpx2.get(f"{target[0]}/llm42/status", headers=headers).json())["requests"]["running"]:
        assert time.monotonic() < deadline, "the server still works on a cancelled answer"
        time.sleep(0.02)
    assert status["tokens"]["generated"] < 1900, "the answer was not cancelled"


def test_a_message_from_a_pipe_is_answered_once_and_alike_by_a_model_and_its_server(model, server):
    results = []
    for target in ((model, *ENGINE), (server, "--api-key", "secret")):
        command = [sys.executable, "-m", "llm42", "chat", *target, *SAMPLING]
        results.append(
            subprocess.run(command, input="What is\na token?\n", capture_output=True, encoding="utf-8", check=True)
        )
    local, remote = results
    assert local.stdout.strip()
    assert local.stdout == remote.stdout
    seeds_and_prints = [re.findall(r"(?:seed|fingerprint) \w+", result.stderr) for result in results]
    assert seeds_and_prints[0] == seeds_and_prints[1]
    assert len(seeds_and_prints[0]) == 2


@pytest.mark.parametrize("typed", ["\x03", "\x04", "/quit\n"])
def test_a_chat_ends_well_however_it_is_ended(server, typed, tmp_path):
    with chatting((server, "--api-key", "secret"), tmp_path) as terminal:
        assert terminal.end(typed) == 0
