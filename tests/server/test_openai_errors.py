"""What goes wrong reaches the `openai` client as the exception that its users expect, with the field at fault."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from served import run_server

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(client, messages=MESSAGES, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 4, **fields})


def complete(client, prompt="Hi", **fields):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 4, **fields})


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WRONG = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "banana"}}}}}
BANANA = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": {"type": "banana"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        (chat, {"extra_body": {"colour": "red"}}, "colour"),
        (chat, {"reasoning_effort": "high"}, "reasoning_effort"),
        (chat, {"store": True}, "store"),
        (chat, {"modalities": ["text", "audio"]}, "modalities"),
        (chat, {"functions": [{"name": "add"}]}, "functions"),
        (chat, {"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        (chat, {"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
        (chat, {"temperature": "warm"}, "temperature"),
        (chat, {"temperature": -1}, "temperature"),
        (chat, {"temperature": True}, "temperature"),
        (chat, {"top_p": 0}, "top_p"),
        (chat, {"n": 0}, "n"),
        (chat, {"n": 100_000}, "n"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        (chat, {"max_completion_tokens": 5}, "max_tokens"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"seed": 2**64}, "seed"),
        (chat, {"seed": -(2**63) - 1}, "seed"),
        (chat, {"stop": ["a", ""]}, "stop"),
        (chat, {"logit_bias": {"512": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"cat": 1}}, "logit_bias"),
        (chat, {"extra_body": {"stop_token_ids": [1, "2"]}}, "stop_token_ids[1]"),
        (chat, {"extra_body": {"request_id": "a b"}}, "request_id"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "Hi"}, "messages"),
        (chat, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        (chat, {"messages": [*MESSAGES, {"role": "tool", "content": "2"}]}, "messages[1].tool_call_id"),
        (chat, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format"),
        (chat, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (chat, {"response_format": {"type": "json_object"}, "extra_body": {"guided_choice": ["a"]}}, None),
        (chat, {"extra_body": {"guided_choice": []}}, "guided_choice"),
        (chat, {"response_format": BANANA}, "response_format"),
        (chat, {"tools": [WRONG], "tool_choice": "required"}, "tools"),
        (chat, {"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        (chat, {"extra_body": {"structured_outputs": {"colour": "red"}}}, "structured_outputs"),
        (complete, {"prompt": [1, 512]}, "prompt[1]"),
        (complete, {"prompt": [1, "two"]}, "prompt[1]"),
        (complete, {"prompt": []}, "prompt"),
        (complete, {"prompt": ["Hi", ""]}, "prompt"),
        (complete, {"best_of": 3}, "best_of"),
        (complete, {"suffix": "end"}, "suffix"),
        (complete, {"logprobs": 21}, "logprobs"),
        (complete, {"max_tokens": 0}, "max_tokens"),
        (complete, {"presence_penalty": 2.5}, "presence_penalty"),
    ],
)
def test_bad_input_is_a_bad_request_that_names_the_field(client, send, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        send(client, stream=stream, **fields)
    error = caught.value
    assert (error.status_code, error.type, error.param) == (400, "invalid_request_error", param)
    assert "Error" not in error.body["message"]
    assert error.request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        (chat, {"messages": [{"role": "user", "content": "long " * 900}]}, "messages"),
        (chat, {"messages": [{"role": "user", "content": "long " * 100_000}]}, "messages"),
        (chat, {"max_tokens": 1200}, "messages"),
        (complete, {"prompt": "long " * 100_000}, "prompt"),
        (complete, {"prompt": [[1], [5] * 1200]}, "prompt"),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_for_it(client, send, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        send(client, stream=stream, **fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_stream_options_need_a_stream(client):
    with pytest.raises(openai.BadRequestError, match="stream_options needs stream"):
        chat(client, stream_options={"include_usage": True})


def test_what_is_not_there_is_not_found(client):
    for ask in (lambda: chat(client, model="other"), lambda: client.models.retrieve("other")):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model="tiny", input="Hi")


def test_a_stream_that_fails_midway_raises(server, client, monkeypatch):
    core = server.llm._engine.core

    def fail(_):
        raise RuntimeError("the power is gone")

    stream = chat(client, stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "execute", fail)
        with pytest.raises(openai.APIError, match="the power is gone") as caught:
            list(stream)
    assert caught.value.code == "request_failed"
    assert chat(client).choices, "the server goes on"


@pytest.fixture(scope="module")
def strict_server(model, tmp_path_factory):
    """A server with a key and small limits, whose model has a chat template with a variable."""
    directory = tmp_path_factory.mktemp("strict") / "model"
    shutil.copytree(model, directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["chat_template"] = "{{ mood | default('calm') }}: {{ messages[0]['content'] }}"
    file.write_text(json.dumps(config), encoding="utf-8")
    settings = {"api_keys": ("secret",), "max_body_size": 4096}
    with run_server(directory, settings, max_num_seqs=1, max_queue_len=2) as server:
        yield server


def test_a_server_with_a_key_lets_nobody_else_in(strict_server):
    with strict_server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        chat(client)
    assert caught.value.code == "invalid_api_key"
    with strict_server.client(api_key="secret") as client:
        assert chat(client).choices


def test_variables_reach_the_chat_template(strict_server):
    with strict_server.client(api_key="secret") as client:
        for extra, text in (({}, "calm: Hi"), ({"chat_template_kwargs": {"mood": "glad"}}, "glad: Hi")):
            answer = chat(client, extra_body={"return_token_ids": True, **extra})
            assert strict_server.llm.tokenizer.decode(answer.prompt_token_ids) == text


def test_a_body_that_is_too_large_is_refused(strict_server):
    with strict_server.client(api_key="secret") as client, pytest.raises(openai.APIStatusError) as caught:
        complete(client, "long " * 1000)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


def test_a_full_queue_is_a_rate_limit(strict_server):
    core = strict_server.llm._engine.core
    with strict_server.client(api_key="secret") as client, ThreadPoolExecutor(2) as pool:
        running = complete(client, stream=True, max_tokens=1100, extra_body={"ignore_eos": True})
        next(running)
        queued = [pool.submit(complete, client) for _ in range(2)]
        while len(core.scheduler.waiting) < 2:
            time.sleep(0.001)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                chat(client, stream=stream)
            assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
        running.close()
        assert all(future.result().choices for future in queued)


def test_a_request_that_takes_too_long_ends_with_504(model):
    with run_server(model, {"request_timeout_s": 0.05}) as server, server.client(max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client, max_tokens=1100, extra_body={"ignore_eos": True})
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        assert caught.value.response.headers["x-should-retry"] == "false"
        server.assert_clean()
