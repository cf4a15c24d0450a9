"""Weights of a model directory: safetensors files in, one checked tensor per name out.

Invariant: all that the files' headers can reveal (missing or unknown tensors, shapes, dtypes, truncation) is checked
before the first weight is read, and the tensors returned are copies that no later change of the files can reach.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from llm42.errors import ModelError
from llm42.model.config import read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm42.model.config import ModelConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PREFIX_BYTES = 8  # the header's length, little-endian
_CHUNK_BYTES = 1 << 20
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")

# Tensors that real checkpoints carry and that no result depends on. Any other unknown name means another architecture.
_IGNORED = (
    re.compile(r"(^|\.)rotary_emb\.inv_freq$"),  # a buffer that older transformers saved; computed from the config
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one tensor lies and what its file's header says of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the configuration implies, in the order of the computation."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.v_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(_LAYER_NORMS, (hidden,))
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, (rows, columns, has_bias) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)

    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read exactly `expected_tensors(config)` from the directory's safetensors files, cast to `dtype`, on the CPU.

    Files are mapped, and cast tensor by tensor, so that memory holds one copy of the model. Values are not scanned.

    Raises:
        ModelError: a file or tensor is missing, unexpected, misplaced, truncated, or of the wrong shape or dtype.
        ValueError: `dtype` is not bfloat16, float16 or float32.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}: supported are {', '.join(map(str, _DTYPES))}")
    stored = _stored_tensors(directory)
    _check_against(config, stored, directory)
    if config.tie_word_embeddings and _LM_HEAD in stored:
        _check_tied(stored)
    expected = expected_tensors(config)
    weights: dict[str, torch.Tensor] = {}
    for path in sorted({stored[name].path for name in expected}):
        with safe_open(path, framework="pt") as file:
            for name in (name for name in expected if stored[name].path == path):
                # A copy even where the dtype is right: a mapped tensor would change with its file, and is not aligned.
                weights[name] = file.get_tensor(name).to(dtype, copy=True)
    return {name: weights[name] for name in expected}


def weights_digest(directory: Path) -> str:
    """SHA-256 (hex) over name, size and content of each safetensors file that `load_weights` reads, in order of name.

    Raises:
        ModelError: the directory has no such files, or one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(_locate(directory)[0]):
        _hash_file(path, digest)
    return digest.hexdigest()


def _hash_file(path: Path, digest: hashlib._Hash) -> None:
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            digest.update(f"{path.name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while count := file.readinto(chunk):
                digest.update(chunk[:count])
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _locate(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files in use and, where they are shards, the index's map from tensor to file name (else empty)."""
    if (directory / _SINGLE_FILE).exists():  # before the index, as transformers does
        return [directory / _SINGLE_FILE], {}
    index = directory / _INDEX_FILE
    if not index.exists():
        found = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        advice = (
            f"{found[0]} is a pickle, which could run code: convert it with transformers' save_pretrained"
            if found
            else f"expected {_SINGLE_FILE}, or {_INDEX_FILE} and its shards"
        )
        raise ModelError(f"{directory} has no safetensors weights: {advice}")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: field weight_map must be an object from tensor name to file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: tensor {name} is in {shard!r}, which is not the name of a safetensors file")
        if not (directory / shard).exists():
            raise ModelError(f"{directory / shard} is missing: {_INDEX_FILE} says that it holds tensor {name}")
    return [directory / shard for shard in sorted(set(weight_map.values()))], weight_map


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the weight files, from their headers; the index and the shards must agree."""
    paths, weight_map = _locate(directory)
    stored: dict[str, _Stored] = {}
    for path in paths:
        for name, tensor in _read_header(path).items():
            if name in stored:
                raise ModelError(f"{path}: tensor {name} is also in {stored[name].path.name}, expected it once")
            stored[name] = tensor
    for name, shard in weight_map.items():
        if name not in stored:
            raise ModelError(f"{directory / shard}: tensor {name} is missing, though {_INDEX_FILE} lists it there")
        if stored[name].path.name != shard:
            raise ModelError(f"{stored[name].path}: tensor {name} is here, but {_INDEX_FILE} lists it in {shard}")
    return stored


def _read_header(path: Path) -> dict[str, _Stored]:
    """Parse and check one file's header, a length and JSON. No weight is read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
            is_complete = length <= min(size - _PREFIX_BYTES, _MAX_HEADER_BYTES)
            raw_header = file.read(length) if is_complete else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not is_complete:
        raise ModelError(f"{path} has {size} bytes, its header alone {length}: it is truncated or no safetensors file")
    try:
        header = json.loads(raw_header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a corrupt header ({error}): fetch the file again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a corrupt header (JSON {type(header).__name__}): fetch the file again")
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    for name, (_, end) in sorted(entries.items(), key=lambda item: item[1][1]):
        end_in_file = _PREFIX_BYTES + length + end
        if end_in_file > size:
            raise ModelError(f"{path} is truncated: tensor {name} ends at byte {end_in_file} of {size}")
    try:
        with safe_open(path, framework="pt"):
            pass  # opening checks the rest: no gaps, no overlaps, nothing after the last tensor
    except SafetensorError as error:
        raise ModelError(f"{path} is corrupt ({error}): fetch the file again") from error
    return {name: tensor for name, (tensor, _) in entries.items()}


def _parse_entry(path: Path, name: str, entry: object) -> tuple[_Stored, int]:
    """One tensor of a header, and the end of its bytes, counted from the header's end."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if all(isinstance(dimension, int) and dimension >= 0 for dimension in shape) and 0 <= begin <= end:
                item_bytes = _ITEM_BYTES.get(dtype)
                if item_bytes is None or math.prod(shape) * item_bytes == end - begin:
                    return _Stored(path, dtype, tuple(shape)), end
    raise ModelError(f"{path} has a corrupt header: tensor {name} is described as {entry!r:.200}: fetch the file again")


def _check_against(config: ModelConfig, stored: Mapping[str, _Stored], directory: Path) -> None:
    """Raise `ModelError` unless the stored tensors are those that the configuration implies."""
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in stored]
    if missing:
        source = directory / (_SINGLE_FILE if (directory / _SINGLE_FILE).exists() else _INDEX_FILE)
        raise ModelError(f"{source}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
    if config.tie_word_embeddings:
        expected[_LM_HEAD] = expected[_EMBEDDING]
    for name, tensor in stored.items():
        if any(pattern.search(name) for pattern in _IGNORED):
            continue
        if name not in expected:
            raise ModelError(f"{tensor.path}: tensor {name} is not part of {config.architecture} as config.json has it")
        if tensor.dtype not in _ITEM_BYTES:
            raise ModelError(
                f"{tensor.path}: tensor {name} has dtype {tensor.dtype}: supported are {', '.join(_ITEM_BYTES)}; "
                "quantized models must be dequantized first"
            )
        if tensor.shape != expected[name]:
            raise ModelError(f"{tensor.path}: tensor {name} has shape {tensor.shape}, expected {expected[name]}")


def _check_tied(stored: Mapping[str, _Stored]) -> None:
    """A tied checkpoint may hold the output matrix once more, but not a different one."""
    tensors = []
    for name in (_EMBEDDING, _LM_HEAD):
        with safe_open(stored[name].path, framework="pt") as file:
            tensors.append(file.get_tensor(name))
    embedding, lm_head = tensors
    if embedding.dtype != lm_head.dtype or not torch.equal(embedding, lm_head):
        raise ModelError(
            f"{stored[_LM_HEAD].path}: tensor {_LM_HEAD} differs from {_EMBEDDING}, but config.json ties them: "
            "set tie_word_embeddings to false"
        )
