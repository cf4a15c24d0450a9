"""What `config.json` says about a model: the one place that reads it, checks it, and fills in what it leaves out.

Invariant: a `ModelConfig` read from a file describes a model that transformers' class of the same name computes alike.
What would change results and is not supported is a `ModelError`, never a silent difference. Defaults for absent fields
are those of transformers' configuration classes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm42.errors import ModelError
from llm42.model.rope import ROPE_TYPES, RopeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that shapes the decoder. Sizes count elements; per-layer tuples have `num_hidden_layers` entries."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before rotary
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # a row at position p sees positions > p - window; None: all up to p
    rope_layers: tuple[bool, ...]  # False: the layer's q and k are not rotated
    eos_token_ids: tuple[int, ...]  # ascending; any of them ends a generation
    bos_token_id: int | None

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` where there is one, which may add end-of-sequence ids.

        Raises:
            ModelError: a file is missing or unreadable, or a field is missing, mistyped or unsupported.
        """
        values = read_json_object(path / "config.json")
        config = cls.from_dict(values, str(path / "config.json"))
        generation_path = path / "generation_config.json"
        if not generation_path.exists():
            return config
        generation = _Fields(read_json_object(generation_path), str(generation_path))
        generation_eos = generation.token_ids("eos_token_id", config.vocab_size)
        # An id that only the class's default supplied does not count once the model names its own.
        own_eos = config.eos_token_ids if "eos_token_id" in values or not generation_eos else ()
        return dataclasses.replace(config, eos_token_ids=tuple(sorted({*own_eos, *generation_eos})))

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], source: str) -> ModelConfig:
        """Check and complete the content of a `config.json` (transformers 4 or 5 style); `source` names it in errors.

        Raises:
            ModelError: a field is missing, mistyped or unsupported.
        """
        fields = _Fields(d, source)
        architecture_name = _architecture_name(fields)
        architecture = _ARCHITECTURES[architecture_name]
        _refuse_unsupported(fields)
        vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
        num_layers, num_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        num_kv_heads = fields.optional_integer("num_key_value_heads", architecture.num_key_value_heads) or num_heads
        max_positions = fields.integer("max_position_embeddings", architecture.max_position_embeddings)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}", num_kv_heads)
        if isinstance(d.get("bos_token_id"), list):
            raise fields.error("bos_token_id", "must be one token id or null")
        biases = {name for name in architecture.bias_fields if fields.boolean(name, default=False)}
        rope_layers = _rope_layers(fields, architecture.model_type, num_layers)
        return cls(
            model_type=architecture.model_type,
            architecture=architecture_name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=architecture.tie_word_embeddings),
            qkv_bias=architecture.always_qkv_bias or "attention_bias" in biases,
            o_bias="attention_bias" in biases,
            mlp_bias="mlp_bias" in biases,
            qk_norm=architecture.qk_norm,
            rope=_rope(fields, architecture.rope_theta, max_positions),
            sliding_windows=_sliding_windows(fields, architecture.model_type, rope_layers),
            rope_layers=rope_layers,
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size, architecture.eos_token_ids),
            bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size, architecture.bos_token_ids)), None),
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file whose top level is an object; `ModelError` naming the file when it is missing or is not one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model is a directory with config.json and safetensors files") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}, expected an object")
    return values


@dataclass(frozen=True)
class _Architecture:
    """How one class of transformers reads its configuration: defaults of absent fields, and bias fields it heeds."""

    model_type: str
    num_key_value_heads: int | None  # None: num_attention_heads
    max_position_embeddings: int
    bias_fields: tuple[str, ...] = ()
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    always_qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


_BOTH_BIASES = ("attention_bias", "mlp_bias")
_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture("llama", None, 2048, _BOTH_BIASES, bos_token_ids=(1,), eos_token_ids=(2,)),
    "MistralForCausalLM": _Architecture("mistral", 8, 131_072, bos_token_ids=(1,), eos_token_ids=(2,)),
    "Qwen2ForCausalLM": _Architecture("qwen2", 32, 32_768, always_qkv_bias=True),
    "Qwen3ForCausalLM": _Architecture("qwen3", 32, 32_768, ("attention_bias",), head_dim=128, qk_norm=True),
    "SmolLM3ForCausalLM": _Architecture(
        "smollm3",
        4,
        32_768,
        _BOTH_BIASES,
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
        bos_token_ids=(128_000,),
        eos_token_ids=(128_001,),
    ),
}

# Fields that change what a model computes, each with the only values that this engine honours. Absent is always fine.
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "n_routed_experts": (0, None),
}


def _refuse_unsupported(fields: _Fields) -> None:
    for name, supported in _SUPPORTED_VALUES.items():
        if name in fields.values and fields.values[name] not in supported:
            raise fields.error(name, f"is not supported (supported: {' or '.join(map(json.dumps, supported))})")


def _architecture_name(fields: _Fields) -> str:
    """The one supported class that `architectures` and `model_type` agree on; either may be absent."""
    by_model_type = {architecture.model_type: name for name, architecture in _ARCHITECTURES.items()}
    names, model_type = fields.values.get("architectures"), fields.values.get("model_type")
    supported = f"(supported: {', '.join(_ARCHITECTURES)})"
    if names is None and model_type is None:
        raise fields.error("architectures", f"is missing {supported}")
    if names is None:
        names = [by_model_type.get(model_type) if isinstance(model_type, str) else None]
        if names == [None]:
            raise fields.error("model_type", f"is not supported {supported}")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "must be a list with one name")
    if names[0] not in _ARCHITECTURES:
        raise fields.error("architectures", f"is not supported {supported}")
    if model_type not in (None, _ARCHITECTURES[names[0]].model_type):
        raise fields.error("model_type", f"contradicts architectures = {names}")
    return names[0]


def _head_dim(fields: _Fields, architecture: _Architecture, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", architecture.head_dim)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"must be a multiple of num_attention_heads = {num_heads} (no head_dim)")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", "must be even, since rotary embedding turns pairs", head_dim)
    return head_dim


def _rope_layers(fields: _Fields, model_type: str, num_layers: int) -> tuple[bool, ...]:
    if model_type != "smollm3":
        return (True,) * num_layers
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    # The name misleads: 1 marks a layer that does use rotary embedding.
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"must be a list of 0 or 1 for each of the {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _sliding_windows(fields: _Fields, model_type: str, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    num_layers = len(rope_layers)
    layer_types = fields.layer_types(num_layers)
    if model_type in ("llama", "mistral"):
        window = fields.optional_integer("sliding_window", 4096 if model_type == "mistral" else None)
        if model_type == "llama" and window is not None:
            # transformers' Llama masks nothing for it, yet drops old keys from its cache: there is no one right answer.
            raise fields.error("sliding_window", "is not supported by LlamaForCausalLM (supported: null)")
        if layer_types and set(layer_types) != {"full_attention" if window is None else "sliding_attention"}:
            raise fields.error("layer_types", f"must be alike for all layers and agree with sliding_window = {window}")
        return (window,) * num_layers

    uses_window = fields.boolean("use_sliding_window", default=False)
    default_window = None if model_type == "smollm3" else 4096
    window = fields.optional_integer("sliding_window", default_window) if uses_window else None
    if layer_types is None and model_type == "smollm3":
        return tuple(None if rotated else window for rotated in rope_layers)
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("layer_types", "needs use_sliding_window = true and a sliding_window for sliding_attention")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _rope(fields: _Fields, default_theta: float, max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4); of two dicts the latter wins."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = fields.section(name)
    nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
    if nested:
        raise fields.error(name, f"has parameters per layer type ({', '.join(nested)}), which are not supported")
    _refuse_unsupported(rope)
    type_name = "rope_type" if "rope_type" in rope.values else "type"
    rope_type = rope.values.get(type_name, "default")
    if rope_type not in ROPE_TYPES:
        raise rope.error(type_name, f"is not supported (supported: {', '.join(ROPE_TYPES)})")
    numbers: dict[str, Any] = {}
    if rope_type != "default":
        numbers["factor"] = rope.number("factor", at_least=1.0)
    if rope_type in ("llama3", "yarn"):
        length_name = "original_max_position_embeddings"
        holder = fields if length_name in fields.values else rope
        numbers[length_name] = holder.integer(length_name, max_positions)
    if rope_type == "llama3":
        low = numbers["low_freq_factor"] = rope.number("low_freq_factor")
        numbers["high_freq_factor"] = rope.number("high_freq_factor", above=low)
    if rope_type == "yarn":
        numbers |= _yarn_numbers(rope)
    theta = (rope if "rope_theta" in rope.values else fields).number("rope_theta", default_theta, above=1.0)
    return RopeConfig(theta=theta, type=rope_type, **numbers)


def _yarn_numbers(rope: _Fields) -> dict[str, float | bool | None]:
    beta_fast, beta_slow = rope.optional_number("beta_fast") or 32.0, rope.optional_number("beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"must be >= beta_slow = {beta_slow}", beta_fast)
    return {
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "attention_factor": rope.optional_number("attention_factor"),
        "mscale": rope.optional_number("mscale"),
        "mscale_all_dim": rope.optional_number("mscale_all_dim"),
        "truncate": rope.boolean("truncate", default=True),
    }


class _Fields:
    """Typed access to one JSON object. Every complaint names the file, the field and the value."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self._source = source
        self._prefix = prefix

    def error(self, name: str, problem: str, value: object = None) -> ModelError:
        shown = self.values.get(name, value)
        is_shown = "" if name not in self.values and value is None else f" is {shown!r}:"
        return ModelError(f"{self._source}: field {self._prefix}{name}{is_shown} {problem}")

    def section(self, name: str) -> _Fields:
        """The object under `name`; an empty one when it is absent or null."""
        values = self.values.get(name)
        if values is not None and not isinstance(values, dict):
            raise self.error(name, "must be an object or null")
        return _Fields(values or {}, self._source, f"{self._prefix}{name}.")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer >= `minimum`; required when there is no default."""
        value = self.values.get(name, default)
        if name not in self.values and default is None:
            raise self.error(name, f"is missing: it must be an integer >= {minimum}")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"must be an integer >= {minimum}")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """An integer >= 1, or None when it is null; `default` when it is absent."""
        value = self.values.get(name, default)
        return None if value is None else self.integer(name, default)

    def number(
        self, name: str, default: float | None = None, *, above: float = 0.0, at_least: float | None = None
    ) -> float:
        """A finite number > `above`, or >= `at_least` where that is given; required when there is no default."""
        expected = f"must be a finite number {f'> {above}' if at_least is None else f'>= {at_least}'}"
        value = self.values.get(name, default)
        if name not in self.values and default is None:
            raise self.error(name, f"is missing: it {expected}")
        # The comparison also refuses NaN, and integers too large for a float.
        is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not is_finite or (value <= above if at_least is None else value < at_least):
            raise self.error(name, expected)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number > 0, or None when it is absent or null."""
        return None if self.values.get(name) is None else self.number(name)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """The attention type of each layer, or None when it is absent or null."""
        value = self.values.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or any(kind not in ("full_attention", "sliding_attention") for kind in value):
            raise self.error("layer_types", "must be a list of full_attention or sliding_attention")
        if len(value) != num_layers:
            raise self.error("layer_types", f"must have an entry for each of the {num_layers} layers, not {len(value)}")
        return value

    def token_ids(self, name: str, vocab_size: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One id or a list of ids below `vocab_size`, ascending; empty for null."""
        if name not in self.values:
            return tuple(token_id for token_id in default if token_id < vocab_size)
        value = self.values[name]
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"must be one token id or a list of them, each from 0 to {vocab_size - 1}")
        return tuple(sorted(set(ids)))
