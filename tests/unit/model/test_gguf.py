"""GGUF conversion: the weights and configuration of the result, and every refusal before anything is written."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm42.errors import ModelError
from llm42.model import gguf as gguf_module
from llm42.model.config import ModelConfig
from llm42.model.gguf import convert_gguf, stale_partials
from llm42.model.gguf_config import llama3_factors, recover_llama3_scaling
from llm42.model.weights import expected_tensors, load_weights
from tiny_gguf import (
    HEAD_DIM,
    byte_level_vocabulary,
    random_weights,
    sentencepiece_vocabulary,
    write_tiny_gguf,
)

VOCAB_SIZE = len(byte_level_vocabulary().tokens)
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def inverse_frequencies(theta, half):
    return theta ** (-np.arange(half, dtype=np.float64) / half)


def convert(tmp_path, *args, **kwargs):
    """Write a tiny GGUF file, convert it, and return the directory and the expected weights."""
    expected = write_tiny_gguf(tmp_path / "model.gguf", *args, **kwargs)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    return tmp_path / "out", expected


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def refusal(tmp_path, *args, **kwargs):
    """The message with which a tiny GGUF file is refused; nothing may be left behind."""
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, *args, **kwargs)
    return refusal_of(path)


def refusal_of(path):
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, path.parent / "out")
    assert str(path) in str(caught.value)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("matrix_type", "dtype"),
    [
        (Type.F32, torch.float32),
        (Type.F16, torch.float16),
        (Type.BF16, torch.bfloat16),
        (Type.Q8_0, torch.bfloat16),
        (Type.Q4_1, torch.bfloat16),
    ],
)
def test_converted_tensors_are_the_dequantized_originals(tmp_path, architecture, matrix_type, dtype):
    directory, expected = convert(tmp_path, architecture, matrix_type=matrix_type)
    converted = load_file(directory / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert converted[name].dtype == dtype
        assert torch.equal(converted[name], torch.from_numpy(values).to(dtype)), name
    assert config_of(directory)["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_rows_left_in_the_stored_order_would_not_pass(tmp_path, monkeypatch):
    """The partner of the test above: it fails when the rows of Llama's Q and K are not moved."""
    monkeypatch.setattr(gguf_module, "_halves_order", lambda num_rows, _num_heads: np.arange(num_rows))
    directory, expected = convert(tmp_path)
    converted = load_file(directory / "model.safetensors")
    wrong = {name for name, values in expected.items() if not torch.equal(converted[name], torch.from_numpy(values))}
    assert wrong == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"}


def test_biases_of_llama_are_moved_with_their_rows(tmp_path):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    generator = np.random.default_rng(1)
    for name in [name for name in weights if name.endswith("_proj.weight") and "self_attn" in name]:
        bias = name.replace(".weight", ".bias")
        weights[bias] = generator.standard_normal(weights[name].shape[0]).astype(np.float32)
    directory, expected = convert(tmp_path, weights=weights)
    converted = load_file(directory / "model.safetensors")
    assert config_of(directory)["attention_bias"] is True
    for name, values in expected.items():
        assert torch.equal(converted[name], torch.from_numpy(values)), name


def test_large_tensors_are_written_slice_by_slice_with_the_same_result(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_module, "_SLICE_ELEMENTS", 100)
    reports = []
    expected = write_tiny_gguf(tmp_path / "model.gguf", matrix_type=Type.Q8_0)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda done, total: reports.append((done, total)))
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(converted[name], torch.from_numpy(expected[name]).bfloat16()) for name in expected)
    total = sum(values.size for values in expected.values())
    assert len(reports) > len(expected)
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ({"token_embd.weight": Type.Q8_0}, torch.bfloat16),
        ({"token_embd.weight": Type.BF16}, torch.bfloat16),
        ({"token_embd.weight": Type.F32}, torch.float32),
        ({}, torch.float16),
    ],
)
def test_one_matrix_of_another_type_decides_the_dtype(tmp_path, types, dtype):
    directory, _ = convert(tmp_path, matrix_type=Type.F16, types=types)
    assert load_file(directory / "model.safetensors")["model.norm.weight"].dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_exactly_when_there_is_no_output_matrix(tmp_path, tied):
    directory, expected = convert(tmp_path, tied=tied)
    assert config_of(directory)["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in expected) is not tied
    assert load_file(directory / "model.safetensors").keys() == expected.keys()


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", {}),
        ("llama", {"attention.sliding_window": 128}),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("qwen2", {}),
        ("qwen2", {"attention.sliding_window": 128}),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        ),
        ("qwen3", {}),
    ],
)
def test_the_engine_reads_what_was_converted(tmp_path, architecture, keys):
    directory, expected = convert(tmp_path, architecture, keys=keys)
    config = ModelConfig.from_directory(directory)
    assert expected_tensors(config) == {name: values.shape for name, values in expected.items()}
    weights = load_weights(directory, config, torch.float32)
    assert all(torch.equal(weights[name], torch.from_numpy(values)) for name, values in expected.items())
    assert config.eos_token_ids == (2,)
    assert config.rms_norm_eps == 1e-5
    assert config.qk_norm is (architecture == "qwen3")
    assert config.qkv_bias is (architecture == "qwen2")
    assert set(config.sliding_windows) == {keys.get("attention.sliding_window")}
    assert config.rope.type == keys.get("rope.scaling.type", "default")


def test_head_dimension_comes_from_key_length(tmp_path):
    directory, _ = convert(tmp_path, "qwen3")
    assert config_of(directory)["head_dim"] == 2 * HEAD_DIM


def test_per_layer_keys_with_equal_entries_count_as_one(tmp_path):
    directory, _ = convert(tmp_path, keys={"attention.head_count_kv": [2, 2]})
    assert config_of(directory)["num_key_value_heads"] == 2


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
    directory, _ = convert(tmp_path, keys=keys)
    assert config_of(directory).get("rope_scaling") == scaling


def test_llama3_scaling_is_recovered_from_the_factor_tensor(tmp_path):
    factors = llama3_factors(inverse_frequencies(500000.0, HEAD_DIM // 2), LLAMA_3_1).astype(np.float32)
    directory, _ = convert(tmp_path, keys={"rope.freq_base": 500000.0}, extra_tensors={"rope_freqs.weight": factors})
    assert config_of(directory)["rope_scaling"] == LLAMA_3_1


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
    message = refusal(tmp_path, extra_tensors={"rope_freqs.weight": factors})
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
    assert mentioned in refusal(tmp_path, keys=keys)


@pytest.mark.parametrize("architecture", ["gemma3", "deepseek2", "smollm3", "mamba"])
def test_an_unknown_architecture_is_refused_by_name(tmp_path, architecture):
    message = refusal(tmp_path, keys={}, architecture=architecture)
    assert f"general.architecture {architecture!r}" in message
    assert "llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "token_embd.weight"),
        ("llama", "blk.1.ffn_down.weight"),
        ("qwen2", "blk.0.attn_v.bias"),
        ("qwen3", "blk.1.attn_k_norm.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(tmp_path, architecture, name):
    assert f"{name!r} is missing" in refusal(tmp_path, architecture, omit=[name])


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    assert "'blk.0.attn_q_norm.weight'" in refusal(tmp_path, extra_tensors=extra)


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(tmp_path):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1]
    message = refusal(tmp_path, weights=weights, vocabulary=byte_level_vocabulary())
    assert "'blk.1.ffn_up.weight' has shape (95, 64), expected (96, 64)" in message


def test_values_that_are_not_finite_are_refused_by_tensor(tmp_path):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    assert "'blk.1.ffn_up.weight'" in refusal(tmp_path, weights=weights)


def test_more_tokens_than_embedding_rows_are_refused(tmp_path):
    weights = random_weights("llama", 100, tied=True)
    assert "token_embd.weight has 100 rows" in refusal(tmp_path, weights=weights)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else altogether")
    assert "not a GGUF file" in refusal_of(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    assert "version 1" in refusal_of(path)
    path.write_bytes(b"")
    assert "truncated" in refusal_of(path)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        convert_gguf(path, tmp_path / "out")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The bytes of a small valid file."""
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    write_tiny_gguf(path, matrix_type=Type.Q8_0)
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused_and_nothing_is_written(intact, tmp_path, data):
    header = intact.index(b"blk.1.ffn_up.weight")
    length = data.draw(st.integers(0, header) | st.integers(0, len(intact) - 1))
    path = tmp_path / "model.gguf"
    path.write_bytes(intact[:length])
    refusal_of(path)


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_byte_is_refused_or_harmless_but_never_a_crash(intact, tmp_path, data):
    header = intact.index(b"blk.1.ffn_up.weight")
    position, value = data.draw(st.integers(4, header)), data.draw(st.integers(0, 255))
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    path.write_bytes(intact[:position] + bytes([value]) + intact[position + 1 :])
    try:
        convert_gguf(path, out)
    except ModelError:
        assert not out.exists()
    else:
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
    assert stale_partials(out) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_tiny_gguf(path)
    seen = []

    def interrupt(done, total):
        seen.extend(stale_partials(out))
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, out, interrupt)
    assert seen  # there was something that could have been left
    assert list(tmp_path.iterdir()) == [path]


def test_the_directory_appears_only_when_it_is_complete(tmp_path):
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_tiny_gguf(path)
    existed = []
    convert_gguf(path, out, lambda *_: existed.append(out.exists()))
    assert existed
    assert not any(existed)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in out.iterdir()} == names


def test_of_two_conversions_the_first_to_finish_is_kept(tmp_path):
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_tiny_gguf(path)
    nested = []

    def overtake(*_):
        if not nested:
            nested.append(True)
            convert_gguf(path, out)
            (out / "mark").touch()

    convert_gguf(path, out, overtake)
    assert (out / "mark").exists()
    assert stale_partials(out) == []


def test_an_existing_directory_is_not_touched(tmp_path):
    write_tiny_gguf(tmp_path / "model.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_sentencepiece_model_converts_too(tmp_path):
    directory, _ = convert(tmp_path, vocabulary=sentencepiece_vocabulary())
    assert json.loads((directory / "tokenizer.json").read_text())["model"]["byte_fallback"] is True
    assert json.loads((directory / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}
