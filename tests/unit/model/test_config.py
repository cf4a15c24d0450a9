"""Configuration: whatever transformers' classes derive from a `config.json`, `ModelConfig` derives too, or it refuses.

The oracle is always the real class of transformers on the same dictionary. Errors are a table: one bad field each, and
the message must name the file, the field and the value.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llm42.errors import ModelError
from llm42.model.config import ModelConfig
from llm42.model.rope import RopeConfig
from tiny_models import FAMILIES, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "smollm3": transformers.SmolLM3Config,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
REQUIRED = {
    "vocab_size": 200_000,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def minimal(family: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **REQUIRED, **fields}


def derived_by_transformers(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """What the class of transformers makes of the dictionary, in the fields of `ModelConfig`."""
    config = CONFIG_CLASSES[family](**copy.deepcopy(values))
    layers = config.num_hidden_layers
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    window = getattr(config, "sliding_window", None)
    heads = config.num_attention_heads
    model = _meta_model(config)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": attention.q_proj.bias is not None,
        "o_bias": attention.o_proj.bias is not None,
        "mlp_bias": mlp.down_proj.bias is not None,
        "qk_norm": hasattr(attention, "q_norm"),
        "sliding_windows": tuple(window if kind == "sliding_attention" else None for kind in layer_types),
        "rope_layers": tuple(bool(flag) for flag in getattr(config, "no_rope_layers", [1] * layers)[:layers]),
        "bos_token_id": config.bos_token_id,
    }


def _meta_model(config: Any) -> Any:
    one_layer = copy.deepcopy(config)
    one_layer.num_hidden_layers = 1
    if getattr(one_layer, "layer_types", None):
        one_layer.layer_types = one_layer.layer_types[:1]
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(one_layer)


def derived_here(values: dict[str, Any], names: Any) -> dict[str, Any]:
    config = ModelConfig.from_dict(values, "config.json")
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_reads_as_its_class_has_it(family: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, family)
    values = json.loads((directory / "config.json").read_text())
    expected = derived_by_transformers(family, values)
    config = ModelConfig.from_directory(directory)
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.model_type, config.architecture) == (family, ARCHITECTURES[family])
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (512, 64, 176)
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_get_the_defaults_of_the_class(family: str) -> None:
    expected = derived_by_transformers(family, minimal(family))
    assert derived_here(minimal(family), expected) == expected
    config, reference = ModelConfig.from_dict(minimal(family), "config.json"), CONFIG_CLASSES[family](**minimal(family))
    assert config.rope == RopeConfig(theta=reference.rope_parameters["rope_theta"])
    assert config.eos_token_ids == (() if reference.eos_token_id is None else (reference.eos_token_id,))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True, "head_dim": 128, "num_key_value_heads": None}),
        ("llama", {"layer_types": ["full_attention"] * 40}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 100, "attention_bias": True, "head_dim": None}),
        ("qwen2", {"attention_bias": False, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 39}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 20}),
        ("qwen3", {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8}),
        ("qwen3", {"use_sliding_window": True, "layer_types": None, "max_window_layers": 3}),
        ("smollm3", {"no_rope_layer_interval": 3, "attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"no_rope_layers": [0, 1] * 25}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 128}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention"] * 40}),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 128, "tie_word_embeddings": False}),
    ],
)
def test_each_field_means_what_the_class_makes_of_it(family: str, fields: dict[str, Any]) -> None:
    values = minimal(family, **fields)
    expected = derived_by_transformers(family, values)
    assert derived_here(values, expected) == expected


def test_a_window_that_means_something_differs_from_none() -> None:
    windowed = ModelConfig.from_dict(minimal("mistral", sliding_window=16), "config.json")
    assert windowed.sliding_windows == (16,) * 40
    assert ModelConfig.from_dict(minimal("mistral", sliding_window=None), "config.json").sliding_windows == (None,) * 40


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_styles_of_rope_fields_read_alike(scaling: dict[str, Any] | None, type_key: str) -> None:
    old_scaling = scaling and {(type_key if key == "rope_type" else key): value for key, value in scaling.items()}
    old = minimal("llama", rope_theta=5e5, rope_scaling=old_scaling)
    new = minimal("llama", rope_parameters={"rope_theta": 5e5, **(scaling or {"rope_type": "default"})})
    config = ModelConfig.from_dict(old, "config.json")
    assert config == ModelConfig.from_dict(new, "config.json")
    assert config.rope.theta == 5e5


ROPE_VARIANTS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    {**LLAMA3, "factor": 32, "low_freq_factor": 2, "high_freq_factor": 3.5, "original_max_position_embeddings": 100},
    {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 8, "beta_slow": 2.0, "attention_factor": 1.25},
    {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 0.7, "truncate": False},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.5},
    {**YARN, "original_max_position_embeddings": 8},  # so short that the ramp's ends meet or are clipped
]


def rotary_of_transformers(values: dict[str, Any]) -> tuple[torch.Tensor, float]:
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(values)))
    return rotary.inv_freq, rotary.attention_scaling


@pytest.mark.parametrize("theta", [10_000.0, 10_000, 1_000_000.0, 130_000.5])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 96, 128])
@pytest.mark.parametrize("variant", ROPE_VARIANTS, ids=lambda variant: str(list(variant.values())))
def test_inverse_frequencies_equal_transformers_bit_for_bit(
    variant: dict[str, Any], head_dim: int, theta: float
) -> None:
    # The length that the variant's factor implies, so that transformers has nothing to warn about.
    length = int(variant.get("factor", 1) * variant.get("original_max_position_embeddings", 512))
    values = minimal(
        "llama", head_dim=head_dim, max_position_embeddings=length, rope_parameters={**variant, "rope_theta": theta}
    )
    frequencies, scaling = rotary_of_transformers(values)
    rope = ModelConfig.from_dict(values, "config.json").rope
    ours = rope.inverse_frequencies(head_dim)
    assert ours.dtype == torch.float32
    assert ours.shape == (head_dim // 2,)
    assert torch.equal(ours, frequencies)
    assert rope.attention_scaling == scaling


def test_scaling_types_change_the_frequencies() -> None:
    ropes = [ModelConfig.from_dict(minimal("llama", rope_parameters=v), "config.json").rope for v in ROPE_VARIANTS]
    default, linear, llama3, *_, yarn = ropes[:6]
    seen = {rope.inverse_frequencies(64).numpy().tobytes() for rope in (default, linear, llama3, yarn)}
    assert len(seen) == 4
    assert yarn.attention_scaling == 0.1 * math.log(4.0) + 1.0 != 1.0


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_yarn_and_llama3_numbers_equal_transformers(data: st.DataObject) -> None:
    numbers = st.floats(0.5, 40, allow_nan=False)
    original = data.draw(st.integers(8, 10_000))
    variant = {"factor": data.draw(st.floats(1, 64)), "original_max_position_embeddings": original}
    if data.draw(st.booleans()):
        low, width = data.draw(numbers), data.draw(numbers)
        variant |= {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": low + width}
    else:
        slow, width = data.draw(numbers), data.draw(numbers)
        variant |= {"rope_type": "yarn", "beta_slow": slow, "beta_fast": slow + width}
        variant |= {name: data.draw(numbers) for name in ("mscale", "mscale_all_dim") if data.draw(st.booleans())}
    head_dim = 2 * data.draw(st.integers(1, 64))
    rope = {**variant, "rope_theta": data.draw(st.floats(2, 1e7))}
    values = minimal("llama", head_dim=head_dim, max_position_embeddings=64 * original, rope_parameters=rope)
    frequencies, scaling = rotary_of_transformers(values)
    ours = ModelConfig.from_dict(values, "config.json").rope
    assert torch.equal(ours.inverse_frequencies(head_dim), frequencies)
    assert ours.attention_scaling == scaling


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, 5, (2, 5)),
        ([7, 3], [3, 9], (3, 7, 9)),
        (2, None, (2,)),
        (None, 4, (4,)),
        (None, None, ()),
        ("absent", 4, (4,)),
        ("absent", None, (2,)),  # the default of Llama's class
    ],
)
def test_eos_ids_are_the_union_of_both_files(
    config_eos: Any, generation_eos: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    values = minimal("llama") if config_eos == "absent" else minimal("llama", eos_token_id=config_eos)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    alone = () if config_eos is None else expected if generation_eos is None else None
    if alone is not None:
        assert ModelConfig.from_directory(tmp_path).eos_token_ids == alone


class _Absent:
    """Stands for a field that is not there; its name is the same in every process, as test ids must be."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *[("llama", {name: ABSENT}, name) for name in REQUIRED],
    *[("llama", {name: 0}, name) for name in REQUIRED],
    *[("qwen2", {name: bad}, name) for name in REQUIRED for bad in ("64", 64.0, True, None, -1)],
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    ("llama", {"architectures": []}, "architectures"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
    ("llama", {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
    ("llama", {"architectures": ABSENT, "model_type": ABSENT}, "architectures"),
    ("llama", {"architectures": ABSENT, "model_type": "mixtral"}, "model_type"),
    ("llama", {"architectures": ABSENT, "model_type": ["llama"]}, "model_type"),
    ("llama", {"model_type": "mistral"}, "model_type"),
    ("llama", {"num_key_value_heads": 5}, "num_key_value_heads"),
    ("qwen2", {"num_attention_heads": 16}, "num_key_value_heads"),  # the class's default of 32 does not divide 16
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
    ("llama", {"num_attention_heads": 30}, "hidden_size"),
    ("llama", {"head_dim": 15}, "head_dim"),
    ("qwen3", {"head_dim": "128"}, "head_dim"),
    ("smollm3", {"hidden_size": 32}, "head_dim"),  # 32 heads: one element each
    ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ("llama", {"attention_bias": "no"}, "attention_bias"),
    ("smollm3", {"mlp_bias": None}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("qwen2", {"num_experts": 8}, "num_experts"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"attention_chunk_size": 64}, "attention_chunk_size"),
    ("llama", {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
    ("llama", {"sliding_window": 64}, "sliding_window"),
    ("llama", {"layer_types": ["sliding_attention"] * 40}, "layer_types"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 20}, "layer_types"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 40}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention"] * 39}, "layer_types"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 40}, "layer_types"),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types"),
    ("smollm3", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 40}, "layer_types"),
    ("smollm3", {"no_rope_layers": [1] * 39}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [2] * 40}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": 1}, "no_rope_layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("llama", {"eos_token_id": 200_000}, "eos_token_id"),
    ("llama", {"eos_token_id": [2, -1]}, "eos_token_id"),
    ("llama", {"eos_token_id": "2"}, "eos_token_id"),
    ("llama", {"bos_token_id": True}, "bos_token_id"),
    ("llama", {"bos_token_id": [1, 2]}, "bos_token_id"),
    ("llama", {"rope_theta": "10000"}, "rope_theta"),
    ("llama", {"rope_theta": 1.0}, "rope_theta"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
    ("llama", {"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor"),
    *[
        ("llama", {"rope_scaling": {**LLAMA3, name: bad}}, f"rope_scaling.{name}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for bad in (None, "4", 0)
    ],
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
    *[
        ("llama", {"rope_scaling": {**YARN, name: bad}}, f"rope_scaling.{name}")
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        for bad in ("1", -1.0)
    ],
    ("llama", {"rope_scaling": {**YARN, "beta_slow": 33.0}}, "rope_scaling.beta_fast"),
    ("llama", {"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate"),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
]


@pytest.mark.parametrize(("family", "bad", "field"), BAD_FIELDS, ids=lambda case: str(case)[:60])
def test_a_bad_field_is_refused_by_name_with_file_and_value(family: str, bad: dict[str, Any], field: str) -> None:
    values = {name: value for name, value in minimal(family, **bad).items() if value is not ABSENT}
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(values, "models/x/config.json")
    message = str(caught.value)
    assert message.startswith(f"models/x/config.json: field {field} is ")
    holder: Any = values
    for key in field.split("."):
        holder = holder.get(key, ABSENT)
    if holder is not ABSENT:
        assert repr(holder) in message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_s_base_is_itself_accepted(family: str) -> None:
    assert ModelConfig.from_dict(minimal(family), "config.json").model_type == family


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_a_file_that_is_no_json_object_is_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(minimal("llama")))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"/{name} "):
        ModelConfig.from_directory(tmp_path)


def test_a_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"/nowhere/config\.json is missing"):
        ModelConfig.from_directory(tmp_path / "nowhere")


def test_a_bad_eos_in_generation_config_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(minimal("llama")))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1.5}')
    with pytest.raises(ModelError, match=r"/generation_config\.json: field eos_token_id is 1\.5"):
        ModelConfig.from_directory(tmp_path)


def test_a_config_is_a_value() -> None:
    """It is part of the contract's hash: frozen, hashable, and equal when read twice."""
    config = ModelConfig.from_dict(minimal("qwen3"), "a")
    assert hash(config) == hash(ModelConfig.from_dict(minimal("qwen3"), "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.head_dim = 2  # type: ignore[misc]  # the assignment is what must fail
