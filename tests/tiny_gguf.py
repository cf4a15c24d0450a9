"""Tiny GGUF files for the tests, written with the `gguf` package's own writer, and the weights that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, TokenType

from llm42.errors import ModelError
from llm42.model.gguf import convert_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@dataclass
class Vocabulary:
    """A tokenizer in GGUF terms."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_vocabulary(
    pre: str | None = "smollm", merges: Sequence[str] = ("1 2", "a b", "Ġ a", "Ġ x", "12 3"), **keys: Any
) -> Vocabulary:
    """Ids 0..2 are control tokens, 3..258 the bytes, then the merged tokens; the last one is user-defined."""
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*controls, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<tool>"]
    types = [TokenType.CONTROL] * len(controls) + [TokenType.NORMAL] * (len(tokens) - len(controls))
    types[-1] = TokenType.USER_DEFINED
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Vocabulary("gpt2", tokens, [int(kind) for kind in types], list(merges), None, pre, named | keys)


def sentencepiece_vocabulary(scored: Mapping[str, float] | None = None, **keys: Any) -> Vocabulary:
    """<unk>, <s>, </s>, 256 byte tokens, then the scored pieces in their order."""
    pieces = scored or {"▁h": -1.0, "▁he": -2.0, "ll": -3.0, "▁hell": -4.0, "▁hello": -5.0} | dict.fromkeys(
        "▁helo ab", -9.0
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    scores = [0.0] * 259 + list(pieces.values())
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Vocabulary("llama", tokens, [int(kind) for kind in types], None, scores, "default", named | keys)


def architecture_keys(architecture: str) -> dict[str, Any]:
    """The hyperparameters, without the architecture's prefix."""
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "qwen3":
        keys |= {"attention.key_length": 2 * HEAD_DIM, "attention.value_length": 2 * HEAD_DIM}
    return keys


def random_weights(architecture: str, vocab_size: int, *, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights by their Hugging Face names, rows in Hugging Face's order."""
    generator = np.random.default_rng(seed)
    head_dim = 2 * HEAD_DIM if architecture == "qwen3" else HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (heads * head_dim, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (heads * head_dim,)
            if architecture == "qwen3" and name != "v":
                shapes[f"{prefix}.self_attn.{name}_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * head_dim)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """The name of a Hugging Face tensor in a GGUF file."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


def interleave_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of Q and K: of each head's two halves, one row in turn."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    tied: bool = True,
    vocabulary: Vocabulary | None = None,
    keys: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    omit: Sequence[str] = (),
    weights: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model and return its weights by Hugging Face name, as float32, after the loss of quantization.

    `types` overrides `matrix_type` by GGUF tensor name. `keys` are given without the architecture's prefix, or whole
    when they begin with general, tokenizer or split; None removes one. `omit` names GGUF tensors to leave out.
    """
    vocabulary = vocabulary or byte_level_vocabulary()
    weights = weights or random_weights(architecture, len(vocabulary.tokens), tied=tied)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in _all_keys(architecture, vocabulary, keys or {}).items():
        _add(writer, key, value)
    expected = {}
    for name, values in weights.items():
        stored_name = gguf_name(name)
        kind = (types or {}).get(stored_name, matrix_type if values.ndim > 1 else GGMLQuantizationType.F32)
        expected[name] = gguf.dequantize(gguf.quantize(values, kind).view(np.uint8), kind).reshape(values.shape)
        if stored_name in omit:
            continue
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = interleave_rows(values, heads) if architecture == "llama" and heads else values
        writer.add_tensor(stored_name, gguf.quantize(stored, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def refusal(path: Path, *args: Any, **kwargs: Any) -> str:
    """The message with which the tiny GGUF file written by these arguments is refused."""
    write_tiny_gguf(path, *args, **kwargs)
    return refusal_of(path)


def refusal_of(path: Path) -> str:
    """The message with which the file is refused; it names the file, and nothing is left beside it."""
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, path.parent / "out")
    assert str(path) in str(caught.value)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return str(caught.value)


def _all_keys(architecture: str, vocabulary: Vocabulary, extra: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.types,
        "merges": vocabulary.merges,
        "scores": vocabulary.scores,
        **vocabulary.keys,
    }
    result = {f"{architecture}.{key}": value for key, value in architecture_keys(architecture).items()}
    result |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    result["tokenizer.chat_template"] = CHAT_TEMPLATE
    whole = ("general.", "tokenizer.", "split.")
    result |= {key if key.startswith(whole) else f"{architecture}.{key}": value for key, value in extra.items()}
    return {key: value for key, value in result.items() if value is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
