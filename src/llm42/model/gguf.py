"""Converting a GGUF file into a model directory in Hugging Face's layout.

The directory appears complete or not at all: everything is checked and planned first, written into a temporary
directory beside the target, and renamed. Weights are dequantized a slice at a time, so memory stays near one slice
whatever the size of the model. llama.cpp stores the rows of Llama's Q and K projections in interleaved rotary order
(0, h, 1, h + 1, .. for a head of 2h rows); they are put back into the order 0, 1, 2, .. of Hugging Face's layout.
"""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llm42.errors import ModelError
from llm42.model.gguf_config import ROPE_FACTORS_TENSOR, Architecture, architecture_of, build_config
from llm42.model.gguf_file import GGUFFile, TensorInfo, dequantize
from llm42.model.gguf_tokenizer import TokenizerFiles, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

Progress = Callable[[int, int], None]
"""Called as (elements done, elements in all), from 0 up to all of them."""

_SLICE_ELEMENTS: Final = 1 << 22
_DTYPES: Final = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}  # safetensors' name, bytes
_IGNORED_TENSORS: Final = (ROPE_FACTORS_TENSOR,)  # read as part of the configuration


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the result: its name, where it comes from, and the heads whose rows are un-permuted (0: none)."""

    name: str
    source: TensorInfo
    interleaved_heads: int = 0


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Progress | None = None) -> None:
    """Convert `gguf_path` into the new directory `out_dir`, which holds a complete model or does not exist.

    The stored dtype is bfloat16 if any matrix is quantized or bfloat16, float16 if all matrices are F16, else float32.
    Raises `ModelError` naming the file and the key or tensor for anything unreadable or unsupported, before anything is
    written, and FileExistsError if `out_dir` exists. When another process finishes the same directory first, that one
    is kept.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists; remove it to convert again")
    with GGUFFile(gguf_path) as file:
        architecture = architecture_of(file)
        config = build_config(file)
        outputs = _plan(file, config, architecture)
        dtype = _stored_dtype(outputs)
        config["torch_dtype"] = dtype
        tokenizer = build_tokenizer(file, config["vocab_size"])
        partial = _partial_directory(out_dir)
        partial.mkdir(parents=True)
        try:
            _write_json_files(partial, config, tokenizer)
            _write_weights(partial / "model.safetensors", file, outputs, dtype, progress)
            _publish(partial, out_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _partial_directory(out_dir: Path) -> Path:
    """A fresh name beside `out_dir` for a conversion in progress; `stale_partials` finds what a killed one left."""
    return out_dir.with_name(f".{out_dir.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def stale_partials(out_dir: Path) -> list[Path]:
    """Directories that conversions into `out_dir` have not finished; only to be removed while none can be running."""
    return sorted(out_dir.parent.glob(f".{glob.escape(out_dir.name)}.*.partial"))


def _publish(partial: Path, out_dir: Path) -> None:
    try:
        partial.rename(out_dir)
    except OSError:
        if not (out_dir / "config.json").exists():
            raise


def _plan(file: GGUFFile, config: Mapping[str, Any], architecture: Architecture) -> list[_Output]:
    """Every tensor of the result with its source, checked for presence, shape, type, and nothing left over."""
    outputs = []
    used = set(_IGNORED_TENSORS)
    for name, source_name, shape, interleaved_heads in _expected(config, architecture):
        source = file.tensors.get(source_name)
        if source is None:
            raise ModelError(f"{file.path}: the tensor {source_name!r} is missing; the file is not a complete model")
        if source.shape != shape:
            raise ModelError(f"{file.path}: tensor {source_name!r} has shape {source.shape}, expected {shape}")
        used.add(source_name)
        outputs.append(_Output(name, source, interleaved_heads))
    if unknown := [name for name in file.tensors if name not in used]:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]!r} ({len(unknown)} such) has no place in a {config['model_type']} model;"
            " this variant of the architecture is not supported"
        )
    for tensor_type in {output.source.type for output in outputs}:
        _check_readable(file.path, tensor_type)
    return outputs


def _expected(config: Mapping[str, Any], architecture: Architecture) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(name, name in the GGUF, shape, heads with interleaved rows) of every tensor that the configuration implies."""
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    all_biases, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = architecture.qkv_bias or all_biases
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden), 0
    yield "model.norm.weight", "output_norm.weight", (hidden,), 0
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (config["vocab_size"], hidden), 0
    linears = (
        ("self_attn.q_proj", "attn_q", heads * head_dim, hidden, qkv_bias, heads),
        ("self_attn.k_proj", "attn_k", kv_heads * head_dim, hidden, qkv_bias, kv_heads),
        ("self_attn.v_proj", "attn_v", kv_heads * head_dim, hidden, qkv_bias, 0),
        ("self_attn.o_proj", "attn_output", hidden, heads * head_dim, all_biases, 0),
        ("mlp.gate_proj", "ffn_gate", intermediate, hidden, mlp_bias, 0),
        ("mlp.up_proj", "ffn_up", intermediate, hidden, mlp_bias, 0),
        ("mlp.down_proj", "ffn_down", hidden, intermediate, mlp_bias, 0),
    )
    norms = [("input_layernorm", "attn_norm", hidden), ("post_attention_layernorm", "ffn_norm", hidden)]
    if architecture.qk_norm:
        norms += [("self_attn.q_norm", "attn_q_norm", head_dim), ("self_attn.k_norm", "attn_k_norm", head_dim)]
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for name, source, rows, columns, has_bias, rotary_heads in linears:
            interleaved = rotary_heads if architecture.interleaved_rope else 0
            yield f"{ours}.{name}.weight", f"{theirs}.{source}.weight", (rows, columns), interleaved
            if has_bias:
                yield f"{ours}.{name}.bias", f"{theirs}.{source}.bias", (rows,), interleaved
        for name, source, size in norms:
            yield f"{ours}.{name}.weight", f"{theirs}.{source}.weight", (size,), 0


def _check_readable(path: Path, tensor_type: GGMLQuantizationType) -> None:
    block = np.zeros((1, GGML_QUANT_SIZES[tensor_type][1]), np.uint8)
    try:
        dequantize(block, tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"{path}: tensors of type {tensor_type.name} cannot be dequantized; re-quantize the model,"
            " for example to Q8_0"
        ) from error


def _stored_dtype(outputs: list[_Output]) -> str:
    types = {output.source.type for output in outputs if len(output.source.shape) > 1}
    if types == {GGMLQuantizationType.F16}:
        return "float16"
    if types <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32, GGMLQuantizationType.F64}:
        return "float32"
    return "bfloat16"


def _halves_order(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """int64 [num_rows]: for each row in halves order, its row in llama.cpp's interleaved order."""
    head_dim = num_rows // num_heads
    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    order: npt.NDArray[np.int64] = pairs.swapaxes(1, 2).reshape(-1)
    return order


def _slices(file: GGUFFile, output: _Output) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values in order, as float32 slices of whole rows."""
    info = output.source
    num_rows, columns = math.prod(info.shape[:-1]), info.shape[-1]
    if output.interleaved_heads:
        order = _halves_order(info.shape[0], output.interleaved_heads)
        raw = file.raw_rows(info, 0, num_rows)
        # Rows are quantized one by one, so they may change places before dequantization; a bias is a single row.
        yield dequantize(raw, info.type)[:, order] if num_rows == 1 else dequantize(raw[order], info.type)
        return
    step = max(1, _SLICE_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        yield file.rows(info, start, min(start + step, num_rows))


def _write_weights(path: Path, file: GGUFFile, outputs: list[_Output], dtype: str, progress: Progress | None) -> None:
    """Write the safetensors file: a 64-bit header length, a JSON header, then the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stored_name, item_bytes = _DTYPES[dtype]
    offset = 0
    for output in outputs:
        end = offset + math.prod(output.source.shape) * item_bytes
        header[output.name] = {
            "dtype": stored_name,
            "shape": list(output.source.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    done, total = 0, offset // item_bytes
    with path.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for output in outputs:
            for values in _slices(file, output):
                stream.write(_encode(file.path, output.source, values, dtype))
                done += values.size
                if progress is not None:
                    progress(done, total)
        _flush(stream)


def _encode(path: Path, info: TensorInfo, values: npt.NDArray[np.float32], dtype: str) -> bytes:
    with np.errstate(over="ignore"):
        encoded = _round_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
    finite = (encoded & 0x7F80) != 0x7F80 if dtype == "bfloat16" else np.isfinite(encoded)
    if not (finite.all() and np.isfinite(values).all()):
        raise ModelError(f"{path}: tensor {info.name!r} has values that are not finite in {dtype}; the file is corrupt")
    return bytes(np.ascontiguousarray(encoded).data)


def _round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even; meaningless for NaN.

    NumPy has no bfloat16, and torch's conversion would start a thread pool that stalls on a busy machine.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _write_json_files(directory: Path, config: Mapping[str, Any], tokenizer: TokenizerFiles) -> None:
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids),
        "pad_token_id": tokenizer.pad_token_id,
    }
    documents: dict[str, Mapping[str, Any]] = {
        "config.json": {key: value for key, value in config.items() if value is not None},
        "generation_config.json": {key: value for key, value in generation.items() if value not in (None, [])},
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
    }
    for name, document in documents.items():
        with (directory / name).open("wb") as stream:
            stream.write(json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n")
            _flush(stream)


def _flush(stream: BinaryIO) -> None:
    """To the disk, not only to the system: the rename must not survive a power cut that the contents do not."""
    stream.flush()
    os.fsync(stream.fileno())
