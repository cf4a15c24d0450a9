"""`llm42 run` around the engine: what goes in, what is written, and how it ends.

The engine is scripted here, because these tests are about every shape of stream it may give; the real one is run end
to end elsewhere.
"""

from __future__ import annotations

import asyncio
import io
import sys

import pytest
import typer

from llm42.cli.errors import reported
from llm42.cli.run import prompt_for, read_prompt, stream, summary
from llm42.errors import RequestError
from llm42.outputs import CompletionOutput, RequestMetrics, RequestOutput


def delta(text, token_ids, *, finish_reason=None):
    completion = CompletionOutput(0, text, token_ids, None, None, finish_reason=finish_reason, seed=7)
    metrics = RequestMetrics(
        queue_time_s=1.0,
        time_to_first_token_s=1.25,
        total_time_s=3.0,
        num_windows=4,
        num_rollbacks=2,
        num_recomputed_tokens=5,
    )
    return RequestOutput("r", None, [1], None, [completion], finish_reason is not None, metrics)


class ScriptedEngine:
    """Gives the items of a script; an exception in it is raised in its place."""

    def __init__(self, *script):
        self.script = script

    async def generate(self, _prompt, _params):
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            yield item


class ScriptedTokenizer:
    """Records what the chat template is applied to."""

    def __init__(self, *, has_chat_template):
        self.chat_template = "template" if has_chat_template else None

    def apply_chat_template(self, messages, add_generation_prompt):
        assert add_generation_prompt
        return [len(message["role"]) for message in messages]


def streamed(*script):
    written = []
    result = asyncio.run(stream(ScriptedEngine(*script), "prompt", None, written.append))
    return written, result


def test_deltas_are_written_as_they_come_and_their_tokens_counted():
    written, result = streamed(delta("Hel", [1, 2]), delta("", [3]), delta("lo", [4], finish_reason="stop"))
    assert written == ["Hel", "lo", "\n"]
    assert result.num_tokens == 4
    assert result.last.outputs[0].finish_reason == "stop"


def test_text_that_ends_with_a_newline_gets_no_other():
    assert streamed(delta("Hello\n", [1], finish_reason="stop"))[0] == ["Hello\n"]


def test_an_item_without_news_is_passed_over():
    nothing = RequestOutput("r", None, [1], None, [], False)
    written, result = streamed(delta("Hi", [1]), nothing, delta("", [2], finish_reason="stop"))
    assert (written, result.num_tokens) == (["Hi", "\n"], 2)


def test_output_without_text_writes_nothing():
    written, result = streamed(delta("", [2], finish_reason="stop"))
    assert (written, result.num_tokens) == ([], 1)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ((delta("Hel", [1]), RequestError("pass failed")), "pass failed"),
        ((delta("Hel", [1]),), "before the request was finished"),
        ((), "before the request was finished"),
    ],
)
def test_a_request_that_failed_is_an_error_and_never_a_short_answer(script, message):
    with pytest.raises(RequestError, match=message):
        streamed(*script)


def test_a_cancelled_stream_still_ends_its_line():
    written = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stream(ScriptedEngine(delta("Hel", [1]), KeyboardInterrupt()), "p", None, written.append))
    assert written == ["Hel", "\n"]


def test_summary_states_cost_and_what_is_needed_to_repeat_the_output():
    _, result = streamed(delta("a", list(range(30))), delta("b", list(range(10)), finish_reason="length"))
    assert summary(result, "f00d") == (
        "40 tokens (length) · 20.0 tok/s · first token 1.25 s · 4 windows · 2 rollbacks · 5 recomputed · seed 7 · "
        "fingerprint f00d"
    )


def test_chat_is_the_default_where_the_model_has_a_template():
    chat, plain = ScriptedTokenizer(has_chat_template=True), ScriptedTokenizer(has_chat_template=False)
    assert prompt_for(chat, "hi", None, None) == {"prompt_token_ids": [len("user")]}
    assert prompt_for(plain, "hi", None, None) == "hi"


def test_raw_is_the_text_itself():
    assert prompt_for(ScriptedTokenizer(has_chat_template=True), "hi", False, None) == "hi"


def test_a_system_message_stands_before_the_prompt():
    tokenizer = ScriptedTokenizer(has_chat_template=True)
    assert prompt_for(tokenizer, "hi", None, "Be brief.") == {"prompt_token_ids": [len("system"), len("user")]}


def test_a_system_message_in_a_raw_prompt_is_refused():
    with pytest.raises(ValueError, match="system needs a chat"):
        prompt_for(ScriptedTokenizer(has_chat_template=True), "hi", False, "Be brief.")


@pytest.mark.parametrize("argument", ["-", None])
def test_prompt_comes_from_stdin_without_its_final_newline(argument, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n\n"))
    assert read_prompt(argument) == "two\nlines\n"


def test_prompt_from_the_argument_is_taken_as_it_is():
    assert read_prompt(" a\n") == " a\n"


def test_a_missing_prompt_on_a_terminal_does_not_wait_for_input(monkeypatch):
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(ValueError, match="prompt is missing"):
        read_prompt(None)


def test_ctrl_c_of_a_stream_exits_with_130(capsys):
    with pytest.raises(typer.Exit) as raised, reported(debug=False):
        streamed(delta("Hel", [1]), KeyboardInterrupt())
    assert raised.value.exit_code == 130
    assert "cancelled" in capsys.readouterr().err
