"""The configuration of a GGUF model: what is carried over, Llama 3's scaling, and every key that is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm42.model.gguf_config import build_config, llama3_factors, recover_llama3_scaling
from llm42.model.gguf_file import GGUFFile
from tiny_gguf import HEAD_DIM, refusal, write_tiny_gguf

LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(path, *args, **kwargs):
    write_tiny_gguf(path, *args, **kwargs)
    with GGUFFile(path) as file:
        return build_config(file)


def inverse_frequencies(theta, half):
    return theta ** (-np.arange(half, dtype=np.float64) / half)


def test_head_dimension_comes_from_key_length(tmp_path):
    config = config_of(tmp_path / "model.gguf", "qwen3")
    assert config["head_dim"] == 2 * HEAD_DIM


def test_per_layer_keys_with_equal_entries_count_as_one(tmp_path):
    config = config_of(tmp_path / "model.gguf", keys={"attention.head_count_kv": [2, 2]})
    assert config["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 24.0,
                "rope.scaling.attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 24.0,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0),
            },
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path, keys, scaling):
    config = config_of(tmp_path / "model.gguf", keys=keys)
    assert config.get("rope_scaling") == scaling


def test_llama3_scaling_is_recovered_from_the_factor_tensor(tmp_path):
    factors = llama3_factors(inverse_frequencies(500000.0, HEAD_DIM // 2), LLAMA_3_1).astype(np.float32)
    config = config_of(
        tmp_path / "model.gguf", keys={"rope.freq_base": 500000.0}, extra_tensors={"rope_freqs.weight": factors}
    )
    assert config["rope_scaling"] == LLAMA_3_1


def test_llama3_factors_are_those_of_transformers():
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters={"rope_theta": 500000.0, **LLAMA_3_1})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = inverse_frequencies(500000.0, 64)
    np.testing.assert_allclose(plain / llama3_factors(plain, LLAMA_3_1), scaled.numpy(), rtol=1e-5)


@given(
    factor=st.sampled_from([2.0, 8.0, 16.0, 32.0]),
    high=st.sampled_from([4.0, 6.5, 8.0]),
    original=st.sampled_from([1024, 4096, 8192, 32768]),
    half=st.sampled_from([32, 64]),
    theta=st.sampled_from([10000.0, 500000.0]),
)
def test_recovered_llama3_scaling_reproduces_its_factors(factor, high, original, half, theta):
    scaling = LLAMA_3_1 | {
        "factor": factor,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    frequencies = inverse_frequencies(theta, half)
    factors = llama3_factors(frequencies, scaling).astype(np.float32).astype(np.float64)
    recovered = recover_llama3_scaling(factors, theta)
    if recovered is None:  # such a short context that no frequency is scaled
        assert np.allclose(factors, 1.0)
    else:
        np.testing.assert_allclose(llama3_factors(frequencies, recovered), factors, rtol=1e-4)


def test_rope_factors_of_another_form_are_refused(tmp_path):
    factors = np.linspace(1.0, 3.0, HEAD_DIM // 2).astype(np.float32)
    message = refusal(tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": factors})
    assert "rope_freqs.weight" in message
    assert "Llama 3" in message


@pytest.mark.parametrize(
    ("keys", "mentioned"),
    [
        ({"expert_count": 8}, "llama.expert_count is 8; mixture-of-experts"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 3}, "blk.2.attn_q.weight"),
        ({"block_count": "two"}, "llama.block_count is 'two', not an integer"),
        ({"context_length": 0}, "llama.context_length is 0"),
        ({"attention.head_count": 3}, "llama.embedding_length 64"),
        ({"attention.head_count_kv": 3}, "head_count_kv 3"),
        ({"attention.head_count_kv": [2, 4]}, "llama.attention.head_count_kv is [2, 4]"),
        ({"attention.key_length": 15}, "llama.attention.key_length is 15"),
        ({"attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "llama.attention.layer_norm_rms_epsilon is nan"),
        ({"attention.causal": False}, "llama.attention.causal"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"embedding_length": 32}, "token_embd.weight"),
        ({"split.count": 2}, "2 parts"),
        ({"general.alignment": 24}, "general.alignment is 24"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"tokenizer.ggml.pre": "nonesuch"}, "tokenizer.ggml.pre 'nonesuch'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer.ggml.merges has 'a zz'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "tokenizer.ggml.eos_token_id is 5000"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_bad_key_is_refused_by_name_before_anything_is_written(tmp_path, keys, mentioned):
    assert mentioned in refusal(tmp_path / "model.gguf", keys=keys)
