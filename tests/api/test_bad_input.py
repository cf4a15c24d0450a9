"""Bad input is a `ValueError` that names field and value before anything runs; the engine serves the next call."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from harness import bits
from llm42 import LLM, ModelError, SamplingParams
from tiny_models import VOCAB_SIZE, write_tiny_model

IDS = [261, 438, 81, 17]
GOOD = {"prompt_token_ids": IDS}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=5, logprobs=1, ignore_eos=True, deterministic=True)
MAX_LEN = 1200


def token_ids(value):
    return {"prompt_token_ids": value}


BAD_PROMPTS = [
    ("", "prompt must have at least one token, and '' has none"),
    (token_ids([]), "prompt must have at least one token"),
    (token_ids(None), "prompt_token_ids must be a list of integers, not None"),
    (token_ids("abc"), "prompt_token_ids must be a list of integers, not 'abc'"),
    (token_ids(b"abc"), "prompt_token_ids must be a list of integers, not b'abc'"),
    (token_ids(7), "prompt_token_ids must be a list of integers, not 7"),
    (token_ids({1, 2}), "prompt_token_ids must be a list of integers, not {1, 2}"),
    (token_ids([[1, 2]]), "prompt_token_ids[0] must be an integer of 0..511, not [1, 2]"),
    (token_ids([3, 1.0]), "prompt_token_ids[1] must be an integer of 0..511, not 1.0"),
    (token_ids([3, math.nan]), "prompt_token_ids[1] must be an integer of 0..511, not nan"),
    (token_ids([3, "4"]), "prompt_token_ids[1] must be an integer of 0..511, not '4'"),
    (token_ids([True]), "prompt_token_ids[0] must be an integer of 0..511, not True"),
    (token_ids([None]), "prompt_token_ids[0] must be an integer of 0..511, not None"),
    (token_ids([3, 4, -1]), "prompt_token_ids[2] must be an integer of 0..511, not -1"),
    (token_ids([VOCAB_SIZE]), "prompt_token_ids[0] must be an integer of 0..511, not 512"),
    (token_ids([2**70]), f"prompt_token_ids[0] must be an integer of 0..511, not {2**70}"),
    (token_ids([3] * MAX_LEN), f"prompt has {MAX_LEN} tokens, and max_model_len {MAX_LEN}"),
    (token_ids([3] * 5000), f"prompt has 5000 tokens, and max_model_len {MAX_LEN}"),
    (token_ids([3] * (MAX_LEN - 4)), f"prompt (1196 tokens) + max_tokens (5) exceeds max_model_len {MAX_LEN}"),
    ({}, 'prompt must be a string or {"prompt_token_ids": [...]}, not {}'),
    ({"text": "hello"}, "not {'text': 'hello'}"),
    ("a \ud800", "lone surrogate"),
]
NOT_PROMPTS = [
    (None, "prompts must be a prompt or a list of prompts, not None"),
    (5, "prompts must be a prompt or a list of prompts, not 5"),
    ([None], 'prompt must be a string or {"prompt_token_ids": [...]}, not None'),
    ([5, 6], "prompts[0]: prompt must be a string"),
    ([[5, 6]], "prompt must be a string or"),
    ([b"bytes"], "prompt must be a string or"),
]
BAD_FIELDS = [
    ({"n": 0}, "n must be an integer >= 1, got 0"),
    ({"n": 1.0}, "n must be an integer >= 1, got 1.0"),
    ({"n": True}, "n must be an integer >= 1, got True"),
    ({"temperature": -0.1}, "temperature must be a finite number >= 0, got -0.1"),
    ({"temperature": math.nan}, "temperature must be a finite number >= 0, got nan"),
    ({"temperature": math.inf}, "temperature must be a finite number >= 0, got inf"),
    ({"temperature": "hot"}, "temperature must be a finite number >= 0, got 'hot'"),
    ({"top_p": 0.0}, "top_p must be a finite number > 0 and <= 1, got 0.0"),
    ({"top_p": math.nan}, "top_p must be"),
    ({"top_p": 1.1}, "top_p must be"),
    ({"top_k": -2}, "top_k must be an integer >= -1, got -2"),
    ({"min_p": 1.5}, "min_p must be"),
    ({"seed": -1}, "seed must be an integer in 0..18446744073709551615, got -1"),
    ({"seed": 2**64}, "seed must be an integer in 0..18446744073709551615, got 18446744073709551616"),
    ({"seed": 1.5}, "seed must be"),
    ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be at most max_tokens (3), got 4"),
    ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
    ({"stop": ["a", 5]}, "stop must be a string or a list of strings, got ['a', 5]"),
    ({"stop": ""}, "stop must not have an empty string, got ''"),
    ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of integers, got 'ab'"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be an integer >= 0, got -1"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got [1]"),
    ({"logit_bias": {1: math.nan}}, "logit_bias must be a finite number"),
    ({"logit_bias": {"a": 1}}, "logit_bias token id must be an integer >= 0, got 'a'"),
    ({"presence_penalty": 3}, "presence_penalty must be"),
    ({"frequency_penalty": math.nan}, "frequency_penalty must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"logprobs": 21}, "logprobs must be an integer in 0..20, got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer in 0..20, got -1"),
    ({"deterministic": "yes"}, "deterministic must be True or False, got 'yes'"),
    # What only the engine can know.
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias has token id 512, but this model's ids are 0..511"),
    ({"stop_token_ids": [3, VOCAB_SIZE]}, "stop_token_ids has token id 512, but this model's ids are 0..511"),
    ({"max_tokens": MAX_LEN - 3}, f"prompt (4 tokens) + max_tokens (1197) exceeds max_model_len {MAX_LEN}"),
    (
        {"max_tokens": None, "min_tokens": MAX_LEN - 3},
        f"prompt (4 tokens) + min_tokens (1197) exceeds max_model_len {MAX_LEN}",
    ),
    ({"n": 1025}, "n is 1025, more than the queue holds: max_queue_len is 1024"),
]
NOT_PARAMS = [
    ({"temperature": 0.0}, "sampling_params must be a SamplingParams or a list of them, not {'temperature': 0.0}"),
    ("greedy", "sampling_params must be a SamplingParams or a list of them, not 'greedy'"),
    (5, "sampling_params must be a SamplingParams or a list of them, not 5"),
    ([PARAMS, PARAMS], "sampling_params has 2 entries for 1 prompts"),
    ([], "sampling_params has 0 entries for 1 prompts"),
    ([{}], "sampling_params must be a SamplingParams, not dict"),
]


@pytest.fixture(scope="module")
def expected(portable):
    """What the engine answers while nobody has sent it anything bad."""
    return bits(portable.generate(GOOD, PARAMS)[0])


@pytest.fixture
def refusing(llm, expected, monkeypatch):
    """A function that expects an error with that text, no pass, and an engine that then answers as ever."""

    def check(call, message):
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.core, "step", lambda: pytest.fail("a pass was planned"))
            patch.setattr(llm._engine.core, "add", lambda _: pytest.fail("a request was queued"))
            with pytest.raises(ValueError, match=re.escape(message)):
                call(llm)
        assert bits(llm.generate(GOOD, PARAMS)[0]) == expected

    return check


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[f"{p!r:.30}" for p, _ in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_alone_and_by_its_index_among_good_ones(refusing, prompt, message):
    refusing(lambda llm: llm.generate(prompt, PARAMS), message)
    refusing(lambda llm: llm.generate([GOOD, prompt, GOOD], PARAMS), "prompts[1]: ")


@pytest.mark.parametrize(("prompts", "message"), NOT_PROMPTS)
def test_what_is_no_list_of_prompts_is_refused(refusing, prompts, message):
    refusing(lambda llm: llm.generate(prompts, PARAMS), message)


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[f"{f!r:.40}" for f, _ in BAD_FIELDS])
def test_a_bad_parameter_is_refused(refusing, fields, message):
    refusing(lambda llm: llm.generate(GOOD, SamplingParams(**fields)), message)


@pytest.mark.parametrize(("params", "message"), NOT_PARAMS)
def test_what_is_no_sampling_params_is_refused(refusing, params, message):
    refusing(lambda llm: llm.generate(GOOD, params), message)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages must be a conversation or a list of conversations, not None"),
        ("hello", "messages must be a conversation or a list of conversations, not 'hello'"),
        ([[]], "messages is []; give at least one mapping with role and content"),
        (["hello"], "messages is 'hello'; give at least one mapping with role and content"),
        ([{"role": "user"}], "messages do not fit the model's chat template"),
    ],
)
def test_bad_messages_are_refused(refusing, messages, message):
    refusing(lambda llm: llm.chat(messages, PARAMS), message)


def test_a_model_without_chat_template_refuses_to_chat(tmp_path, fields):
    write_tiny_model(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "no_template"))
    with LLM(tmp_path, **fields) as llm, pytest.raises(ValueError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


# Configurations that do not fit the model


PER_BLOCK = 3 * 2 * 2 * 16 * 16 * 2
"""Bytes of a KV block of the tiny Llama: layers, keys and values, KV heads, head size, positions, bytes a number."""


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"max_model_len": 2049}, "max_model_len 2049 exceeds the model's max_position_embeddings 2048; lower it"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes 1 holds no block besides the reserved one; give at least 12288 bytes"),
        ({"kv_cache_bytes": 2 * PER_BLOCK - 1}, "kv_cache_bytes 12287 holds no block"),
        ({"kv_cache_bytes": 100_000}, f"raise kv_cache_bytes to {76 * PER_BLOCK} or lower max_model_len"),
        ({"canonical_rows": 8, "window_size": 32}, "window_size 32 does not fit a pass of canonical_rows 8"),
        ({"mode": "fast"}, "mode must be one of auto, verify, invariant, off, not 'fast'"),
        ({"num_threads": 0}, "num_threads must be an integer of at least 1, not 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_the_start(make_llm, own, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_llm(**own)


def test_the_memory_that_an_error_asks_for_is_exactly_enough(make_llm):
    needed = 76 * PER_BLOCK
    with pytest.raises(ValueError, match=f"raise kv_cache_bytes to {needed} "):
        make_llm(kv_cache_bytes=needed - 1)
    with make_llm(kv_cache_bytes=needed) as llm:
        params = replace(PARAMS, max_tokens=4, n=2)
        (output,) = llm.generate(token_ids([5] * (MAX_LEN - 4)), params)
        assert [len(completion.token_ids) for completion in output.outputs] == [4, 4]
    with make_llm(kv_cache_bytes=2 * PER_BLOCK, max_model_len=None) as llm:
        assert llm.max_model_len == 16


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        LLM(tmp_path / "nowhere")
