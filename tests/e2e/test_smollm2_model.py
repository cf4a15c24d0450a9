"""The right model: SmolLM2's logits and continuations are those of transformers, its perplexities as published."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm42 import LLM, SamplingParams
from llm42.kernels import RowBatch, RowSegment
from real_data import gsm8k, humaneval

pytestmark = pytest.mark.xdist_group("smollm2 model")

GREEDY = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
CHAT = SamplingParams(temperature=0.0, max_tokens=64, deterministic=True)


@pytest.fixture(scope="module")
def transformers_model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(str(smollm2), dtype="float32", canonical_rows=128, canonical_logit_rows=64) as llm:
        yield llm


def test_fp32_logits_equal_those_of_transformers(llm, transformers_model):
    """Through the engine's own passes: chunks of 128 rows over paged KV."""
    ids = llm.tokenizer.encode("\n".join(problem["prompt"] for problem in humaneval()))[:512]
    assert len(ids) == 512
    decoder = llm._engine.decoder
    kv = decoder.new_kv_pool(33, 16)
    with torch.inference_mode():
        expected = transformers_model(torch.tensor([ids])).logits[0]
        for start in range(0, 512, 128):
            batch = RowBatch([RowSegment(0, start, 128, range(1, 33))], 128, 16)
            logits = decoder.logits(decoder.forward(torch.tensor(ids[start : start + 128]), batch, kv))
            difference = (logits - expected[start : start + 128]).abs().max().item()
            assert difference < 1e-3
    assert expected.abs().max() > 5.0


def test_fp32_greedy_continuations_equal_those_of_transformers(llm, transformers_model):
    prompts = [problem["prompt"] for problem in gsm8k()[:10]] + [problem["prompt"] for problem in humaneval()[:10]]
    outputs = llm.generate(prompts, GREEDY)
    longest = max(len(output.prompt_token_ids) for output in outputs)
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, output in enumerate(outputs):
        count = len(output.prompt_token_ids)
        padded[row, longest - count :] = torch.tensor(output.prompt_token_ids)
        mask[row, longest - count :] = 1
    expected = transformers_model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=128,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, longest:]
    for output, continuation in zip(outputs, expected.tolist(), strict=True):
        assert len(continuation) == 128
        assert output.outputs[0].token_ids == continuation


def test_it_answers_a_question_and_ends_its_turn(llm):
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=2))
    assert output.outputs[0].text.startswith(" Paris")
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], CHAT)
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert llm.tokenizer.token_text(answer.outputs[0].token_ids[-1]) == "<|im_end|>"


def perplexity(llm, text: str) -> float:
    """Over 4,095 tokens, in windows of 1,024 that overlap by the one token that is not predicted."""
    ids = llm.tokenizer.encode(text)[:4096]
    assert len(ids) == 4096
    windows = [ids[start : start + 1025] for start in range(0, 4095, 1024)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    scores = []
    for window, output in zip(windows, llm.generate([{"prompt_token_ids": w} for w in windows], params), strict=True):
        assert output.prompt_logprobs[0] is None
        scores += [entry[token].logprob for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True)]
    assert len(scores) == 4095
    return math.exp(-sum(scores) / len(scores))


def test_perplexity_on_code_is_as_published(llm):
    text = "\n\n".join(problem["prompt"] + problem["canonical_solution"] for problem in humaneval())
    assert perplexity(llm, text) == pytest.approx(3.95, rel=0.01)


def test_perplexity_on_word_problems_is_as_published(llm):
    text = "\n\n".join(problem["prompt"] + "\n" + problem["upstream_answer"] for problem in gsm8k())
    assert perplexity(llm, text) == pytest.approx(5.94, rel=0.01)
