"""GGUF conversion: the weights of the result, what is refused, and that it appears complete or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from llm42.model import gguf as gguf_module
from llm42.model.config import ModelConfig
from llm42.model.gguf import convert_gguf, stale_partials
from llm42.model.weights import expected_tensors, load_weights
from tiny_gguf import (
    HEAD_DIM,
    byte_level_vocabulary,
    random_weights,
    refusal,
    sentencepiece_vocabulary,
    write_tiny_gguf,
)

VOCAB_SIZE = len(byte_level_vocabulary().tokens)


def convert(tmp_path, *args, **kwargs):
    """Write a tiny GGUF file, convert it, and return the directory and the expected weights."""
    expected = write_tiny_gguf(tmp_path / "model.gguf", *args, **kwargs)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    return tmp_path / "out", expected


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
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


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
    assert json.loads((directory / "config.json").read_text())["attention_bias"] is True
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
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is tied
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


@pytest.mark.parametrize("architecture", ["gemma3", "deepseek2", "smollm3", "mamba"])
def test_an_unknown_architecture_is_refused_by_name(tmp_path, architecture):
    message = refusal(tmp_path / "model.gguf", keys={}, architecture=architecture)
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
    assert f"{name!r} is missing" in refusal(tmp_path / "model.gguf", architecture, omit=[name])


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    assert "'blk.0.attn_q_norm.weight'" in refusal(tmp_path / "model.gguf", extra_tensors=extra)


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(tmp_path):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1]
    message = refusal(tmp_path / "model.gguf", weights=weights, vocabulary=byte_level_vocabulary())
    assert "'blk.1.ffn_up.weight' has shape (95, 64), expected (96, 64)" in message


def test_values_that_are_not_finite_are_refused_by_tensor(tmp_path):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    assert "'blk.1.ffn_up.weight'" in refusal(tmp_path / "model.gguf", weights=weights)


@pytest.mark.parametrize(("matrix_type", "too_large"), [(Type.BF16, 3.4e38), (Type.F16, 1e5)])
def test_values_that_the_stored_dtype_cannot_hold_are_refused_by_tensor(tmp_path, matrix_type, too_large):
    weights = random_weights("llama", VOCAB_SIZE, tied=True)
    weights["model.norm.weight"][5] = too_large
    message = refusal(tmp_path / "model.gguf", weights=weights, matrix_type=matrix_type)
    assert "'output_norm.weight' has values that are not finite" in message


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_that_of_torch(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(gguf_module._round_to_bfloat16(array), expected)


def test_more_tokens_than_embedding_rows_are_refused(tmp_path):
    weights = random_weights("llama", 100, tied=True)
    assert "token_embd.weight has 100 rows" in refusal(tmp_path / "model.gguf", weights=weights)


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
