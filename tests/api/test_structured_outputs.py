"""Structured outputs through the Python API: whole and streamed, deterministic or not, and where they cannot go on."""

from __future__ import annotations

import asyncio
import json

import pytest

from llm42 import AsyncLLM, RequestError, SamplingParams, StructuredOutputs

FORM = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3})


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 3, "structured_outputs": FORM, **fields})


def is_instance(text: str) -> bool:
    value = json.loads(text)
    return len(value) in (2, 3) and set(value) <= {1, 2}


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_output_of_a_call_has_its_form(portable, deterministic):
    form = StructuredOutputs(json=FORM.json, disable_any_whitespace=True)
    (output,) = portable.generate("A", params(n=3, deterministic=deterministic, structured_outputs=form, logprobs=1))
    assert [completion.finish_reason for completion in output.outputs] == ["stop"] * 3
    assert all(is_instance(completion.text) for completion in output.outputs)
    assert all(len(completion.logprobs) == len(completion.token_ids) for completion in output.outputs)


def test_a_stream_joins_to_the_whole(portable, model, fields):
    async def streamed() -> tuple[str, list[int]]:
        llm = AsyncLLM(str(model), **fields)
        try:
            pieces = [item.outputs[0] async for item in llm.generate("A", params(deterministic=True)) if item.outputs]
        finally:
            await llm.aclose()
        return "".join(piece.text for piece in pieces), [i for piece in pieces for i in piece.token_ids]

    (whole,) = portable.generate("A", params(deterministic=True))
    assert asyncio.run(streamed()) == (whole.outputs[0].text, list(whole.outputs[0].token_ids))


@pytest.mark.parametrize("deterministic", [True, False])
def test_min_tokens_beyond_a_complete_form_ends_that_request_alone(portable, assert_clean, deterministic):
    stuck = params(structured_outputs=StructuredOutputs(choice=["a"]), min_tokens=5, deterministic=deterministic)
    with pytest.raises(RequestError, match="complete after 1 tokens; lower min_tokens, which is 5") as caught:
        portable.generate(["A", "B"], [stuck, params(deterministic=deterministic)])
    failed, other = (output.outputs[0] for output in caught.value.outputs)
    assert (failed.finish_reason, failed.text) == ("error", "a")
    assert other.finish_reason in ("stop", "length")
    assert_clean(portable)


def test_a_form_that_cannot_be_compiled_is_refused_before_anything_runs(portable, assert_clean):
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs.regex is refused by xgrammar"):
        portable.generate(["A", "B"], [params(), params(structured_outputs=StructuredOutputs(regex="(?=a)b"))])
    assert_clean(portable)
