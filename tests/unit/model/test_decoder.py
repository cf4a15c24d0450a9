"""The decoder computes what transformers' own classes compute, for every supported family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm42 import LLM, SamplingParams
from llm42.kernels import RowBatch, RowSegment, create_kernels
from llm42.model.config import ModelConfig
from llm42.model.decoder import Decoder
from llm42.model.weights import load_weights
from tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model

NUM_TOKENS = 300  # more than two key tiles, and many times Mistral's window of 16


@pytest.fixture(params=FAMILIES)
def model_path(request, tmp_path):
    return write_tiny_model(tmp_path, request.param, dtype=torch.float32)


def reference_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(path, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    config = ModelConfig.from_directory(path)
    weights = load_weights(path, config, torch.float32)
    decoder = Decoder(config, weights, create_kernels("portable"), 2048)
    assert not weights, "every weight of the file has its place in the model"
    kv = decoder.new_kv_pool(40, 16)
    blocks = [*range(39, 20, -1)]
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        batch = RowBatch([RowSegment(0, start, len(part), blocks)], len(part), 16)
        parts.append(decoder.logits(decoder.forward(part, batch, kv)))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [300, 37])
def test_fp32_logits_equal_those_of_transformers(model_path, chunk):
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference_model(model_path)(ids[None]).logits[0]
    assert expected.abs().max() > 1.0
    assert (logits_of(model_path, ids, chunk) - expected).abs().max() < 1e-3


def test_fp32_greedy_continuations_equal_those_of_transformers(model_path):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in (1, 9, 40, 130)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(str(model_path), dtype="float32", kv_cache_bytes=4 << 20, max_model_len=512, num_threads=1) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in prompts], params)
    reference = reference_model(model_path)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert len(expected) == 32
        assert output.outputs[0].token_ids == expected


def test_another_models_weights_give_other_logits(tmp_path):
    """The partner: the comparison above is not satisfied by any model of the family."""
    ids = torch.arange(3, 60)
    ours = logits_of(write_tiny_model(tmp_path / "a", "llama", dtype=torch.float32), ids, 57)
    other = write_tiny_model(tmp_path / "b", "llama", seed=1, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference_model(other)(ids[None]).logits[0]
    assert (ours - expected).abs().max() > 0.1
