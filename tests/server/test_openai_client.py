"""The real `openai` client against the server: answers have the documented form, and streams join to the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llm42 import SamplingParams
from llm42.server.schemas import ChatBody, CompletionBody

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["Once upon a time", "The capital of France", "7 days in a week"]
EXACT = {"deterministic": True, "return_token_ids": True}


GIVEN = {"model", "max_tokens", "temperature", "seed", *EXACT}
"""Fields that all requests here have."""


def chat(client, messages=MESSAGES, *, extra_body=None, **fields):
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, "seed": 0, **fields}
    return client.chat.completions.create(messages=messages, extra_body={**EXACT, **(extra_body or {})}, **fields)


def complete(client, prompt=PROMPTS[0], *, extra_body=None, **fields):
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, "seed": 0, **fields}
    return client.completions.create(prompt=prompt, extra_body={**EXACT, **(extra_body or {})}, **fields)


def said(choice):
    return {
        "text": choice.message.content if hasattr(choice, "message") else choice.text,
        "token_ids": choice.token_ids,
        "logprobs": None if choice.logprobs is None else dict(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "seed": choice.seed,
    }


def joined(chunks):
    """What the chunks of a stream add up to, in the form of `said`."""
    choices = {}
    for chunk in chunks:
        (new,) = chunk.choices
        choice = choices.setdefault(new.index, {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "nothing may follow the finish reason"
        choice["text"] += (new.delta.content if hasattr(new, "delta") else new.text) or ""
        if hasattr(new, "token_ids"):
            choice["token_ids"] += new.token_ids
            choice |= {"stop_reason": new.stop_reason, "seed": new.seed, "finish_reason": new.finish_reason}
        if new.logprobs is not None:
            before = choice["logprobs"] or {}
            choice["logprobs"] = {
                name: values if values is None else (before.get(name) or []) + values for name, values in new.logprobs
            }
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 7, "temperature": 1.2, "logprobs": True, "top_logprobs": 4},
        {"stop": ["e", "an"], "temperature": 0.9, "seed": 3, "logprobs": True},
        {"temperature": 1.5, "seed": 11, "extra_body": {"stop_token_ids": list(range(200, 400))}},
    ],
)
def test_the_chunks_of_a_chat_join_to_the_whole_answer(client, fields):
    whole = chat(client, **fields)
    *deltas, last = chat(client, stream=True, stream_options={"include_usage": True}, **fields)
    assert joined(deltas) == [said(choice) for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(fields.get("n", 1)))
    assert whole.object == "chat.completion"
    assert {(choice.message.role, choice.message.refusal) for choice in whole.choices} == {("assistant", None)}
    heads = {(chunk.id, chunk.created, chunk.model, chunk.object, chunk.system_fingerprint) for chunk in deltas}
    assert heads == {(last.id, last.created, "tiny", "chat.completion.chunk", whole.system_fingerprint)}
    roles = {}
    for chunk in deltas:
        roles.setdefault(chunk.choices[0].index, []).append(chunk.choices[0].delta.role)
    assert all(of_choice == ["assistant"] + [None] * (len(of_choice) - 1) for of_choice in roles.values())
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in deltas)
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    assert last.usage.prompt_tokens == len(whole.prompt_token_ids) == len(deltas[0].prompt_token_ids)
    for usage in (last.usage, whole.usage):
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert set(usage.llm42) == {"windows", "rollbacks", "recomputed_tokens", "cached_tokens"}
        assert usage.prompt_tokens_details.cached_tokens == usage.llm42["cached_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "seed": 7, "temperature": 1.2, "logprobs": 3},
        {"echo": True, "n": 2, "seed": 1, "temperature": 0.8, "logprobs": 0},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"echo": True, "stop": "o", "extra_body": {"include_stop_str_in_output": True, "prompt_logprobs": 1}},
    ],
)
def test_the_chunks_of_completions_join_to_the_whole_answer(client, offline, fields):
    whole = complete(client, PROMPTS, **fields)
    *deltas, last = complete(client, PROMPTS, stream=True, stream_options={"include_usage": True}, **fields)
    assert joined(deltas) == [said(choice) for choice in whole.choices]
    n = fields.get("n", 1)
    assert [choice.index for choice in whole.choices] == list(range(3 * n))
    for choice in whole.choices:
        prompt = PROMPTS[choice.index // n]
        assert choice.prompt_token_ids == offline.tokenizer.encode(prompt)
        assert choice.text.startswith(prompt) == bool(fields.get("echo"))
        assert choice.finish_reason in {"stop", "length"}
    heads = {(chunk.id, chunk.created, chunk.model, chunk.object, chunk.system_fingerprint) for chunk in deltas}
    assert heads == {(last.id, last.created, "tiny", "text_completion", whole.system_fingerprint)}
    assert last.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)
    assert whole.usage.prompt_tokens == sum(len(choice.prompt_token_ids) for choice in whole.choices) // n


def test_usage_comes_with_chunks_only_as_asked(client):
    for chunk in chat(client, stream=True):
        assert "usage" not in chunk.model_fields_set
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in chat(client, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 12


def test_each_of_n_outputs_comes_again_alone_with_its_seed(client):
    choices = chat(client, n=4, seed=None, temperature=1.3, logprobs=True, extra_body={"top_k": 50}).choices
    assert len({choice.seed for choice in choices}) == len({tuple(choice.token_ids) for choice in choices}) == 4
    for choice in choices:
        (alone,) = chat(client, seed=choice.seed, temperature=1.3, logprobs=True, extra_body={"top_k": 50}).choices
        assert said(alone) == said(choice)


VARIANTS = [
    {"temperature": 1.1, "seed": -5},
    {"temperature": 1.5, "seed": 1, "top_k": 3},
    {"temperature": 1.5, "seed": 1, "top_p": 0.3},
    {"temperature": 1.5, "seed": 1, "min_p": 0.4},
    {"logit_bias": {"300": 7}},
    {"logit_bias": {"300": 7}, "presence_penalty": 2.0},
    {"logit_bias": {"300": 7}, "frequency_penalty": 2.0},
    {"logit_bias": {"300": 7}, "repetition_penalty": 1.8},
    {"logit_bias": {"300": 60, "2": -100}},
    {"logit_bias": {"2": 40.5}},
    {"logit_bias": {"2": 40.5}, "min_tokens": 9},
    {"logit_bias": {"2": 40.5}, "ignore_eos": True},
    {"logit_bias": {"2": 40.5}, "ignore_eos": True, "skip_special_tokens": False},
    {"stop": "e"},
    {"stop": ["e", "t"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(100, 500))},
]
NAMED = {
    *("temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "n", "max_tokens")
}
"""Fields that the client has arguments for; all others go into its `extra_body`."""


@pytest.mark.parametrize("send", [chat, complete])
def test_every_sampling_field_means_what_it_means_offline(client, offline, send):
    variants = [{}, *VARIANTS]

    def answer(variant):
        named = {name: value for name, value in variant.items() if name in NAMED}
        extra = {name: value for name, value in variant.items() if name not in NAMED}
        return send(client, **named, extra_body=extra)

    def params(variant):
        fields = {"temperature": 0, "seed": 0, **variant}
        bias = {int(key): value for key, value in variant.get("logit_bias", {}).items()}
        seed = fields["seed"] % 2**64
        return SamplingParams(**fields | {"logit_bias": bias, "seed": seed}, max_tokens=12, deterministic=True)

    with ThreadPoolExecutor(len(variants)) as pool:
        answers = list(pool.map(answer, variants))
    ids = getattr(answers[0], "prompt_token_ids", None) or answers[0].choices[0].prompt_token_ids
    expected = offline.generate([{"prompt_token_ids": ids}] * len(variants), [params(variant) for variant in variants])
    seen = set()
    for variant, given, (output,) in zip(variants, answers, (one.outputs for one in expected), strict=True):
        told = said(given.choices[0])
        values = (output.text, output.token_ids, output.finish_reason, output.stop_reason, output.seed)
        assert tuple(told[name] for name in ("text", "token_ids", "finish_reason", "stop_reason", "seed")) == values
        assert (*values[2:4], output.text, *output.token_ids) not in seen, f"{variant} changes nothing: a useless test"
        seen.add((*values[2:4], output.text, *output.token_ids))


def test_the_logprobs_of_chats_are_the_numbers_of_generate_and_bytes_join_to_the_text(client, offline):
    bias = {"0": -100, "1": -100, "2": -100}  # special tokens have bytes, but are not in the text
    options = {"logprobs": True, "top_logprobs": 5, "temperature": 1.4, "seed": 8, "n": 2, "logit_bias": bias}
    answer = chat(client, **options, extra_body={"prompt_logprobs": 2})
    params = SamplingParams(
        logprobs=5, temperature=1.4, seed=8, n=2, max_tokens=12, prompt_logprobs=2, deterministic=True,
        logit_bias={0: -100, 1: -100, 2: -100},
    )  # fmt: skip
    (expected,) = offline.generate({"prompt_token_ids": answer.prompt_token_ids}, params)
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.token_ids == output.token_ids
        for entry, token_id, numbers in zip(choice.logprobs.content, output.token_ids, output.logprobs, strict=True):
            assert (entry.token, entry.logprob) == (numbers[token_id].decoded_token, numbers[token_id].logprob)
            best = sorted(numbers.values(), key=lambda value: value.rank)[:5]
            assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
                (value.decoded_token, value.logprob) for value in best
            ]
        whole = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert whole.decode(errors="replace") == choice.message.content
    assert "\ufffd" in "".join(entry.token for entry in choice.logprobs.content), "no character was cut in pieces"
    first, *others = answer.prompt_logprobs
    assert first is None
    for told, numbers in zip(others, expected.prompt_logprobs[1:], strict=True):
        assert {int(token_id): value["logprob"] for token_id, value in told.items()} == {
            token_id: value.logprob for token_id, value in numbers.items()
        }


def test_the_logprobs_of_completions_are_the_numbers_of_generate_with_offsets_into_the_text(client, offline):
    (choice,) = complete(client, "Grüße aus Köln", echo=True, logprobs=3, temperature=1.4, seed=4).choices
    params = SamplingParams(logprobs=3, prompt_logprobs=3, temperature=1.4, seed=4, max_tokens=12, deterministic=True)
    (expected,) = offline.generate("Grüße aus Köln", params)
    ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    entries = expected.prompt_logprobs + expected.outputs[0].logprobs
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == len(ids)
    assert (told.token_logprobs[0], told.top_logprobs[0], told.text_offset[0]) == (None, None, 0)
    for index, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
        text = offline.tokenizer.token_text(token_id)
        assert told.tokens[index] == text
        if "\ufffd" not in (told.tokens[index - 1] + text if index else text):  # else it is not clear where it begins
            assert choice.text.startswith(text, told.text_offset[index])
        if entry is not None:
            assert told.token_logprobs[index] == entry[token_id].logprob
            best = {}
            for value in sorted(entry.values(), key=lambda value: value.rank):
                best.setdefault(value.decoded_token, value.logprob)
            assert told.top_logprobs[index] == best


def test_tokens_are_named_by_their_ids_on_request(client):
    extra = {"return_tokens_as_token_ids": True}
    (choice,) = chat(client, logprobs=True, top_logprobs=1, extra_body=extra).choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{id_}" for id_ in choice.token_ids]
    (choice,) = complete(client, logprobs=1, extra_body=extra).choices
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)


def test_a_prompt_is_scored_without_a_token_of_output(client, offline):
    answer = complete(client, PROMPTS[0], echo=True, max_tokens=0, logprobs=0)
    (choice,) = answer.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (PROMPTS[0], [], "length")
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(choice.prompt_token_ids))
    (expected,) = offline.generate(PROMPTS[0], SamplingParams(prompt_logprobs=0, max_tokens=1, deterministic=True))
    scored = zip(choice.prompt_token_ids, expected.prompt_logprobs, strict=True)
    numbers = [entry[token_id].logprob for token_id, entry in scored if entry is not None]
    assert choice.logprobs.token_logprobs[1:] == numbers


def test_a_prompt_means_the_same_as_text_and_as_token_ids(client, offline):
    texts = [offline.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [said(choice) for choice in complete(client, PROMPTS).choices]
    assert [said(choice) for choice in complete(client, texts).choices] == expected
    assert [said(complete(client, prompt).choices[0]) for prompt in PROMPTS] == expected
    assert [said(complete(client, ids, echo=False).choices[0]) for ids in texts] == expected


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("messages", "fields", "text"),
    [
        (
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
            {"add_generation_prompt": False},
            "<|im_start|>user\none\ntwo<|im_end|>\n",
        ),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The capital"}],
            {"continue_final_message": True},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe capital",
        ),
        (
            [
                {"role": "user", "content": "1 + 1?", "name": "ann"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
            ],
            {},
            "<|im_start|>user\n1 + 1?<|im_end|>\n"  # noqa: ISC004
            '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_messages_become_the_prompt_that_the_template_says(client, offline, messages, fields, text):
    answer = chat(client, messages, extra_body=fields)
    assert answer.prompt_token_ids == offline.tokenizer.encode(text, add_special_tokens=False)
    assert answer.choices[0].token_ids


def test_null_means_the_default(client):
    nulls = dict.fromkeys({*ChatBody.model_fields} - {"messages", *GIVEN})
    expected = chat(client)
    assert said(chat(client, extra_body=nulls).choices[0]) == said(expected.choices[0])
    nulls = dict.fromkeys({*CompletionBody.model_fields} - {"prompt", *GIVEN})
    assert said(complete(client, extra_body=nulls).choices[0]) == said(complete(client).choices[0])


def test_fields_that_are_for_the_record_change_nothing(client):
    record = {"user": "ann", "metadata": {"run": "1"}, "store": False, "service_tier": "auto", "priority": 3}
    expected = said(chat(client).choices[0])
    extra = {**record, "safety_identifier": "a", "prompt_cache_key": "k", "modalities": ["text"]}
    answer = chat(client, max_tokens=None, max_completion_tokens=12, extra_body=extra)
    assert said(answer.choices[0]) == expected
    assert answer.service_tier == "default"


def test_a_request_has_the_name_that_its_header_gives(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert (raw.parse().id, raw.headers["x-request-id"]) == ("chatcmpl-mine-1", "mine-1")
    assert chat(client)._request_id
    assert complete(client, extra_body={"request_id": "mine-2"}).id == "cmpl-mine-2"


def test_models_are_listed_and_described(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 1200)
    assert client.models.retrieve("tiny") == model
