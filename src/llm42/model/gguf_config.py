"""The configuration of a GGUF model as the `config.json` that Hugging Face's layout expects.

Only keys whose meaning is known are translated; a key that would change the computation and has no counterpart is
refused, because a model that silently computes something else is worse than no model. llama.cpp stores Llama 3's rotary
scaling as one factor per frequency (`rope_freqs.weight`); `recover_llama3_scaling` inverts that table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm42.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from llm42.model.gguf_file import GGUFFile

ROPE_FACTORS_TENSOR: Final = "rope_freqs.weight"
_DEFAULT_ROPE_BASE: Final = 10000.0  # llama.cpp's own default where the key is absent
_PUBLISHED_LLAMA3_BANDS: Final = ((1.0, 4.0, 8192),)  # low_freq_factor, high_freq_factor, original context
_FACTOR_TOLERANCE: Final = 1e-4

_REFUSED_KEYS: Final = (
    "expert_count",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window_pattern",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
    "rope.dimension_sections",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF architecture: its Hugging Face names, and how its tensors differ from plain Llama."""

    model_type: str
    class_name: str
    interleaved_rope: bool = False  # llama.cpp stores the rows of Q and K in pairs (2j, 2j + 1) instead of halves
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES: Final = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", qk_norm=True),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of `file`; raises `ModelError` for one that this package does not convert, and for a part."""
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture {name!r} is not supported;"
            f" supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if (parts := file.optional("split.count", int)) is not None and parts > 1:
        raise ModelError(f"{file.path}: is one of {parts} parts; join them first with llama-gguf-split --merge")
    for key in _REFUSED_KEYS:
        if value := file.metadata.get(f"{name}.{key}"):
            kind = "mixture-of-experts models are not supported" if key == "expert_count" else "that is not supported"
            raise ModelError(f"{file.path}: {name}.{key} is {value!r}; {kind}")
    if file.optional(f"{name}.attention.causal", bool) is False:
        raise ModelError(f"{file.path}: {name}.attention.causal is false; only causal language models are supported")
    return ARCHITECTURES[name]


def build_config(file: GGUFFile) -> dict[str, Any]:
    """`config.json` for `file`, without the dtype. Raises `ModelError` naming the missing or unsupported key."""
    architecture = architecture_of(file)
    prefix = file.require("general.architecture", str)
    num_heads = _positive(file, f"{prefix}.attention.head_count")
    hidden_size = _positive(file, f"{prefix}.embedding_length")
    head_dim = _head_dim(file, prefix, hidden_size, num_heads)
    num_kv_heads = num_heads
    if f"{prefix}.attention.head_count_kv" in file.metadata:
        num_kv_heads = _positive(file, f"{prefix}.attention.head_count_kv")
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{file.path}: {prefix}.attention.head_count {num_heads} is not a multiple of head_count_kv {num_kv_heads}"
        )
    theta = _DEFAULT_ROPE_BASE
    if f"{prefix}.rope.freq_base" in file.metadata:
        theta = _positive_float(file, f"{prefix}.rope.freq_base")
    context_length = _positive(file, f"{prefix}.context_length")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, f"{prefix}.feed_forward_length"),
        "num_hidden_layers": _positive(file, f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _positive_float(file, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context_length,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, prefix, theta, head_dim, context_length),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if not architecture.qkv_bias:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    for name in ("bos_token_id", "eos_token_id"):
        config[name] = file.optional(f"tokenizer.ggml.{name}", int)
    _add_sliding_window(config, file, prefix)
    return config


def decimal(stored: float) -> float:
    """The shortest decimal that a float32 key can have meant: 9.999999747e-06 is 1e-05."""
    return float(str(np.float32(stored)))


def _positive(file: GGUFFile, key: str) -> int:
    value = file.require(key, int)
    if value < 1:
        raise ModelError(f"{file.path}: {key} is {value}, not a positive integer")
    return value


def _positive_float(file: GGUFFile, key: str) -> float:
    value = decimal(file.require(key, float))
    if not 0.0 < value < math.inf:
        raise ModelError(f"{file.path}: {key} is {value}, not a positive number")
    return value


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: the tensor 'token_embd.weight' is missing; the file is not a complete model")
    return embedding.shape[0]


def _head_dim(file: GGUFFile, prefix: str, hidden_size: int, num_heads: int) -> int:
    head_dim = file.optional(f"{prefix}.attention.key_length", int)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"{file.path}: {prefix}.embedding_length {hidden_size} is not a multiple of head_count {num_heads},"
                f" and {prefix}.attention.key_length is missing"
            )
        head_dim = hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{file.path}: {prefix}.attention.key_length is {head_dim}, not a positive even number")
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if (other := file.optional(key, int)) not in (None, head_dim):
            raise ModelError(f"{file.path}: {key} is {other} but the head dimension is {head_dim}; they must be equal")
    return head_dim


def _add_sliding_window(config: dict[str, Any], file: GGUFFile, prefix: str) -> None:
    """Every layer gets the window: the GGUF key has no list of layers, and one with a pattern was refused before."""
    window = file.optional(f"{prefix}.attention.sliding_window", int)
    if not window:
        return
    if prefix == "llama":
        if config["attention_bias"] or config["mlp_bias"]:
            raise ModelError(f"{file.path}: {prefix}.attention.sliding_window together with biases is not supported")
        del config["attention_bias"], config["mlp_bias"]
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return
    config |= {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
    }


def _rope_scaling(
    file: GGUFFile, prefix: str, theta: float, head_dim: int, context_length: int
) -> dict[str, Any] | None:
    kind = file.optional(f"{prefix}.rope.scaling.type", str)
    factor_key = f"{prefix}.rope.scaling.factor"
    if kind is None and file.optional(f"{prefix}.rope.scale_linear", float) not in (None, 1.0):
        kind, factor_key = "linear", f"{prefix}.rope.scale_linear"  # the key of old files
    if ROPE_FACTORS_TENSOR in file.tensors:
        if kind not in (None, "none", "llama3"):
            raise ModelError(f"{file.path}: {prefix}.rope.scaling.type {kind!r} together with {ROPE_FACTORS_TENSOR}")
        return _llama3_scaling(file, prefix, theta, head_dim)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: {prefix}.rope.scaling.type {kind!r} is not supported (none, linear, yarn are)")
    factor = _positive_float(file, factor_key)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return _yarn_scaling(file, prefix, factor, context_length)


def _yarn_scaling(file: GGUFFile, prefix: str, factor: float, context_length: int) -> dict[str, Any]:
    original = file.optional(f"{prefix}.rope.scaling.original_context_length", int) or context_length
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (beta := file.optional(f"{prefix}.rope.scaling.{key}", float)) is not None:
            scaling[name] = decimal(beta)
    if file.optional(f"{prefix}.rope.scaling.yarn_ext_factor", float) not in (None, 1.0):
        raise ModelError(f"{file.path}: {prefix}.rope.scaling.yarn_ext_factor other than 1 is not supported")
    for key in ("attn_factor", "yarn_attn_factor"):
        multiplier = file.optional(f"{prefix}.rope.scaling.{key}", float)
        if multiplier not in (None, 1.0):
            # llama.cpp multiplies YaRN's own attention factor; Hugging Face's key replaces it.
            scaling["attention_factor"] = decimal(multiplier) * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(file: GGUFFile, prefix: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    info = file.tensors[ROPE_FACTORS_TENSOR]
    if info.shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: tensor {info.name!r} has shape {info.shape}, expected {(head_dim // 2,)}")
    factors = file.rows(info, 0, 1)[0].astype(np.float64)
    original = file.optional(f"{prefix}.rope.scaling.original_context_length", int)
    try:
        return recover_llama3_scaling(factors, theta, original)
    except ValueError as error:
        raise ModelError(f"{file.path}: tensor {info.name!r}: {error}") from error


def llama3_factors(inverse_frequencies: npt.NDArray[np.float64], scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Llama 3's divisor of every rotary frequency, float64 [head_dim / 2]: 1 for fast ones, `factor` for slow ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse_frequencies / (2.0 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))


def recover_llama3_scaling(
    factors: npt.NDArray[np.float64], theta: float, original_context: int | None = None
) -> dict[str, Any] | None:
    """The `rope_scaling` entry whose factors are `factors` (float [head_dim / 2]), or None when all of them are 1.

    Between the two bands 1/f is linear in the frequency, so two frequencies there determine the band edges up to one
    common scale, which the published models fix by `low_freq_factor` = 1; with fewer, the published bands are tried.
    Every answer is checked against the whole table. Raises ValueError when the table is not of Llama 3's form.
    """
    if np.all(np.abs(factors - 1.0) < _FACTOR_TOLERANCE):
        return None
    if not np.all(np.isfinite(factors)) or factors.min() < 1.0 - _FACTOR_TOLERANCE:
        raise ValueError("has factors that are not finite numbers of at least 1; this scaling is not supported")
    half = len(factors)
    inverse_frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    largest = round(float(factors.max()), 4)
    candidates = [(low, high, original_context or original) for low, high, original in _PUBLISHED_LLAMA3_BANDS]
    between = (factors > 1.0 + _FACTOR_TOLERANCE) & (factors < largest * (1.0 - _FACTOR_TOLERANCE))
    if between.sum() >= 2:
        smooth = (1.0 / factors[between] - 1.0 / largest) / (1.0 - 1.0 / largest)
        slope, offset = np.polyfit(inverse_frequencies[between] / (2.0 * math.pi), smooth, 1)
        if slope > 0.0 > offset:
            high = 1.0 - 1.0 / float(offset)
            original = float(slope) * (high - 1.0)
            candidates += [(1.0, float(round(high)), round(original)), (1.0, high, round(original))]
    for low, high, original in candidates:
        scaling: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": largest,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if high > low and np.allclose(
            llama3_factors(inverse_frequencies, scaling), factors, rtol=_FACTOR_TOLERANCE, atol=0.0
        ):
            return scaling
    raise ValueError("is not a table of Llama 3's rotary scaling; this scaling is not supported")
