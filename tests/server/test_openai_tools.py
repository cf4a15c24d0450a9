"""Tools and structured output with the `openai` client and its helpers, on a random model that is held to the form."""

from __future__ import annotations

import json
import re
from enum import Enum

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, ConfigDict

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


class City(Enum):
    PARIS = "Paris"
    KOELN = "Köln"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: City
    tomorrow: bool


TOOLS = [pydantic_function_tool(Weather, name="weather")]
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(send, **fields):
    extra = {"deterministic": True, **fields.pop("extra_body", {})}
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "seed": 1, "temperature": 0.7, **fields}
    return send(**fields, extra_body=extra)


def streamed(client, **fields):
    """The completion that the client's own helper puts together from a stream."""
    with ask(client.chat.completions.stream, **fields) as stream:
        return stream.get_final_completion()


def plain(choice):
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content, choice.message.refusal, calls, choice.finish_reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_have_valid_arguments_and_stream_to_the_same_message(client, choice, reason):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = ask(client.chat.completions.parse, **fields).choices
    (call,) = whole.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert plain(whole) == (None, None, [(call.id, "weather", call.function.arguments)], reason)
    (joined,) = streamed(client, **fields).choices
    assert plain(joined) == plain(whole)
    later = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    assert ask(client.chat.completions.create, messages=later, max_tokens=4, tools=TOOLS).choices[0].message.content


def test_a_call_that_the_model_chose_is_found_in_its_text(client):
    text = 'Sure.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    fields = {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}}]}
    fields["extra_body"] = {"structured_outputs": {"choice": [text]}}
    (whole,) = ask(client.chat.completions.create, **fields).choices
    (call,) = whole.message.tool_calls
    assert (whole.message.content, whole.finish_reason) == ("Sure.", "tool_calls")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    (joined,) = streamed(client, **fields).choices
    assert plain(joined) == plain(whole)
    (without,) = ask(client.chat.completions.create, **fields, tool_choice="none").choices
    assert (without.message.content, without.message.tool_calls, without.finish_reason) == (text, None, "stop")


def test_an_answer_is_parsed_as_the_type_that_was_asked_for(client):
    (whole,) = ask(client.chat.completions.parse, response_format=Weather).choices
    assert isinstance(whole.message.parsed, Weather)
    assert whole.finish_reason == "stop"
    (joined,) = streamed(client, response_format=Weather).choices
    assert plain(joined) == plain(whole)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["Paris", "Köln"]}, "Paris|Köln"),
        ({"guided_regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"guided_json": {"type": "boolean"}}, r"\s*(true|false)\s*"),
        ({"structured_outputs": {"regex": "x{7}"}}, "x{7}"),
    ],
)
def test_constraints_of_both_endpoints_hold(client, extra, pattern):
    (chat,) = ask(client.chat.completions.create, extra_body=extra).choices
    assert re.fullmatch(pattern, chat.message.content), chat
    (text,) = client.completions.create(model="tiny", prompt="Hi", max_tokens=60, extra_body=extra).choices
    assert re.fullmatch(pattern, text.text), text
    assert text.finish_reason == "stop"


def test_json_mode_gives_an_object(client):
    body = {"logit_bias": {"2": 100}}  # the end, as soon as it may come
    (choice,) = ask(client.chat.completions.create, response_format={"type": "json_object"}, extra_body=body).choices
    assert isinstance(json.loads(choice.message.content), dict)
    (choice,) = ask(client.chat.completions.create, response_format={"type": "text"}, max_tokens=4).choices
    assert choice.finish_reason == "length"
