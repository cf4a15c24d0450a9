"""`llm42 chat` without a terminal: the conversation, its commands, what is typed, and the model in this process.

(`test_chat_remote.py` is about servers, `tests/e2e/test_chat.py` about a real terminal.)
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from contextlib import aclosing

import pytest

from llm42 import AsyncLLM, RequestError, SamplingParams
from llm42.cli.chat_commands import Commands
from llm42.cli.chat_conversation import Conversation
from llm42.cli.chat_input import read_message
from llm42.cli.chat_models import ChatModel, ContextFullError, LocalModel, local_params
from llm42.cli.facts import Facts, Verification
from llm42.cli.terminal import visible, write_answer
from tiny_models import write_tiny_model

FACTS = Facts(
    finish_reason="stop", num_tokens=2, seconds=1.0, first_token_s=0.5, seed=7, fingerprint="fp", verification=None
)


class ScriptedModel(ChatModel):
    """Answers with one script after the other; an exception in a script is raised in its place."""

    name = "scripted"

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.asked = []

    def check(self, parameters):
        local_params(parameters)

    async def stream(self, messages, parameters):
        self.asked.append((list(messages), dict(parameters)))
        for item in self.scripts.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self):
        pass


def said(role, content):
    return {"role": role, "content": content}


def ask(conversation, model, question):
    written = []
    asyncio.run(conversation.ask(model, question, written.append))
    return "".join(written)


# The conversation


def test_each_question_is_asked_with_everything_that_was_said_before():
    model = ScriptedModel(["Hel", "lo", FACTS], ["Fine\n", FACTS])
    conversation = Conversation("Be kind.", {"seed": 3})
    assert ask(conversation, model, "Hi") == "Hello\n"
    assert ask(conversation, model, "How are you?") == "Fine\n"
    first = [said("system", "Be kind."), said("user", "Hi")]
    second = [*first, said("assistant", "Hello"), said("user", "How are you?")]
    assert model.asked == [(first, {"seed": 3}), (second, {"seed": 3})]


@pytest.mark.parametrize("failure", [RequestError("broken"), ContextFullError("full"), KeyboardInterrupt()])
def test_a_question_without_an_answer_leaves_the_conversation_as_it_was(failure):
    model = ScriptedModel(["Hello", FACTS], [failure], ["Better", FACTS])
    conversation = Conversation(None, {})
    ask(conversation, model, "Hi")
    before = list(conversation.exchanges)
    with pytest.raises(type(failure)):
        ask(conversation, model, "Why?")
    assert conversation.exchanges == before
    asyncio.run(conversation.retry(model, lambda _: None))
    assert [(exchange.question, exchange.answer) for exchange in conversation.exchanges] == [
        ("Hi", "Hello"),
        ("Why?", "Better"),
    ]


def test_an_answer_that_was_cut_short_counts_as_far_as_it_was_seen():
    model = ScriptedModel(["Hel", KeyboardInterrupt()])
    conversation = Conversation(None, {})
    written = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(conversation.ask(model, "Hi", written.append))
    assert written == ["Hel", "\n"]
    assert [(exchange.answer, exchange.facts) for exchange in conversation.exchanges] == [("Hel", None)]


def test_a_retry_replaces_the_last_answer_and_one_that_fails_keeps_it():
    model = ScriptedModel(["A", FACTS], ["B", FACTS], [RequestError("broken")], ["D", FACTS])
    conversation = Conversation(None, {})
    ask(conversation, model, "Hi")
    answers = []
    for _ in range(3):
        try:
            asyncio.run(conversation.retry(model, lambda _: None))
        except RequestError:
            answers.append("failed")
        answers.append([exchange.answer for exchange in conversation.exchanges])
    assert answers == [["B"], "failed", ["B"], ["D"]]
    assert all(messages == [said("user", "Hi")] for messages, _ in model.asked)


def test_a_saved_conversation_holds_messages_parameters_and_seeds(tmp_path):
    conversation = Conversation("Be kind.", {"temperature": 0.5})
    ask(conversation, ScriptedModel(["Grüße \x1b", FACTS]), "Hi")
    conversation.save(tmp_path / "chat.json", "scripted")
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert saved["messages"] == [said("system", "Be kind."), said("user", "Hi"), said("assistant", "Grüße \x1b")]
    assert (saved["model"], saved["parameters"], saved["answers"][0]["seed"]) == ("scripted", {"temperature": 0.5}, 7)


# Commands


def obey(line, conversation, model=None, notes=None):
    commands = Commands(
        model or ScriptedModel(), conversation, (notes if notes is not None else []).append, asyncio.run
    )
    return commands.obey(line)


@pytest.mark.parametrize(
    ("line", "parameters"),
    [
        ("/seed 42", {"top_k": 5, "seed": 42}),
        ("/deterministic on", {"top_k": 5, "deterministic": True}),
        ("/deterministic off", {"top_k": 5, "deterministic": False}),
        ("/set temperature 0.7", {"top_k": 5, "temperature": 0.7}),
        ("/set top_k 9", {"top_k": 9}),
        ("/set  top_k none ", {}),
        ("/set stop The end", {"top_k": 5, "stop": "The end"}),
    ],
)
def test_a_command_sets_a_parameter_of_the_next_answers(line, parameters):
    conversation = Conversation(None, {"top_k": 5})
    assert obey(line, conversation)
    assert conversation.parameters == parameters


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nonsense", "/nonsense is no command"),
        ("/seed x", "seed is 'x'; give an integer"),
        ("/seed -1", "seed must be an integer in 0.."),
        ("/deterministic", "deterministic is ''; give on or off"),
        ("/set colour red", "colour is no parameter"),
        ("/set temperature -1", "temperature must be"),
        ("/save", "FILE is missing"),
        ("/retry", "no question"),
    ],
)
def test_a_bad_command_says_why_and_changes_nothing(line, message):
    conversation = Conversation(None, {"top_k": 5})
    with pytest.raises(ValueError, match=message):
        obey(line, conversation)
    assert conversation == Conversation(None, {"top_k": 5})


@pytest.mark.parametrize("line", ["/etc/hosts is what?", "a /new day", "/ what?", "Hello"])
def test_what_does_not_begin_with_a_slash_and_a_word_is_a_message(line):
    assert not obey(line, Conversation(None, {}))


def test_new_forgets_what_was_said_and_keeps_system_message_and_parameters():
    conversation = Conversation(None, {"seed": 1})
    obey("/system Be brief.", conversation)
    ask(conversation, ScriptedModel(["Hello", FACTS]), "Hi")
    obey("/new", conversation)
    assert conversation == Conversation("Be brief.", {"seed": 1})
    obey("/system", conversation)
    assert conversation.system is None


def test_help_lists_every_command():
    notes = []
    obey("/help", Conversation(None, {}), notes=notes)
    names = ("/help", "/new", "/retry", "/system", "/deterministic", "/seed", "/set", "/save", "/quit", "Ctrl-C")
    assert all(name in notes[0] for name in names)


# What is typed, and what is shown


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\ntwo\n", [("one", True), ("two", True)]),
        ("\n  \none\n", [("one", True)]),
        ("one\\\n two\\\n\n", [("one\n two\n", False)]),
        ('"""\none\n\n/new\n"""\n', [("one\n\n/new", False)]),
        ('"""one\ntwo"""\n"""three"""\n""""""\n', [("one\ntwo", False), ("three", False)]),
        ("no newline", [("no newline", True)]),
    ],
)
def test_a_message_may_have_several_lines(typed, messages, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert [read_message() for _ in messages] == messages
    with pytest.raises(EOFError):
        read_message()
    assert capsys.readouterr().out == ""


def test_no_control_character_of_a_model_reaches_a_terminal():
    controls = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
    shown = visible("".join(controls))
    assert len(shown) == len(controls)
    assert shown.isprintable()
    assert visible("\x1b]0;title\x07 \x9b2J\r") == "␛]0;title␇ �2J␍"
    assert visible("Grüße,\t世界 👋\n") == "Grüße,\t世界 👋\n"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "[b]␛[2J"), (False, "[b]\x1b[2J")])
def test_model_text_is_neutralised_on_a_terminal_and_kept_as_it_is_elsewhere(is_terminal, shown, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    write_answer("[b]\x1b[2J")
    assert out.getvalue() == shown


def test_the_line_about_an_answer_leaves_out_what_is_not_known():
    unknown = {"seed": None, "num_tokens": None, "fingerprint": None}
    facts = Facts(finish_reason="stop", seconds=2.0, first_token_s=0.25, verification=None, **unknown)
    assert facts.line == "first token 0.25 s"
    known = {"seed": 7, "num_tokens": 4, "fingerprint": "fp"}
    facts = Facts(finish_reason="stop", seconds=2.0, first_token_s=0.25, verification=Verification(3, 2, 1), **known)
    assert facts.line == (
        "4 tokens (stop) · 2.0 tok/s · first token 0.25 s · 3 windows · 2 rollbacks · 1 recomputed · seed 7 · "
        "fingerprint fp"
    )


# The model in this process


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    loaded = AsyncLLM(
        str(write_tiny_model(tmp_path_factory.mktemp("chat"))), num_threads=1, kv_cache_bytes=4 << 20, max_model_len=256
    )
    yield loaded
    loaded.close()


QUESTION = [said("user", "What is the capital of France?")]
PARAMETERS = {"temperature": 0.9, "seed": 5, "max_tokens": 12, "ignore_eos": True, "deterministic": True}


def test_an_answer_is_what_the_library_generates_for_the_chat_template(llm):
    async def both():
        pieces = [item async for item in LocalModel(llm, "tiny").stream(QUESTION, PARAMETERS)]
        prompt = {"prompt_token_ids": llm.tokenizer.apply_chat_template(QUESTION)}
        outputs = [item async for item in llm.generate(prompt, SamplingParams(**PARAMETERS))]
        return pieces, "".join(completion.text for output in outputs for completion in output.outputs)

    (*pieces, facts), text = asyncio.run(both())
    assert text
    assert "".join(pieces) == text
    assert (facts.num_tokens, facts.finish_reason, facts.seed) == (12, "length", 5)
    assert facts.fingerprint == llm.system_fingerprint
    assert facts.verification is not None


def test_an_ordinary_answer_has_no_verification_to_report(llm):
    async def last():
        return [item async for item in LocalModel(llm, "tiny").stream(QUESTION, {"max_tokens": 2})][-1]

    assert asyncio.run(last()).verification is None


def test_leaving_an_answer_cancels_its_request(llm):
    async def leave():
        async with aclosing(
            LocalModel(llm, "tiny").stream(QUESTION, {"ignore_eos": True, "max_tokens": 200})
        ) as stream:
            await anext(stream)
            (request,) = llm._streams
            return request

    request = asyncio.run(leave())
    deadline = time.monotonic() + 30
    while llm._engine.core.has_work:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.001)
    assert request.finish_reason == "abort"


def test_an_answer_ends_where_the_context_does_and_the_next_question_finds_it_full(llm):
    model = LocalModel(llm, "tiny")
    conversation = Conversation(None, {"ignore_eos": True})
    conversation.system = "word " * 60
    facts = asyncio.run(conversation.ask(model, "Go on.", lambda _: None))
    assert facts.finish_reason == "length"
    assert 0 < facts.num_tokens < 256
    before = list(conversation.exchanges)
    with pytest.raises(ContextFullError, match="max_model_len 256"):
        asyncio.run(conversation.ask(model, "Go on, please.", lambda _: None))
    assert conversation.exchanges == before


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    directory = write_tiny_model(tmp_path / "plain")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    plain = AsyncLLM(str(directory), num_threads=1, kv_cache_bytes=4 << 20)
    try:
        with pytest.raises(ValueError, match="has no chat template"):
            LocalModel(plain, "plain")
    finally:
        plain.close()
