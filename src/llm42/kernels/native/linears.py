"""Linear layers and embeddings of the native backend: the library's own, or oneDNN's.

The library's own give a row the same bits at every row count. oneDNN's, by way of PyTorch, take the place of them where
the CPU has matrix instructions that the library does not use; at which row counts they agree is measured
(`llm42.kernels.atlas`).
Invariant: weights are packed once and kept in no other form, but for what `OneDnnLinears.tied_lm_head` says.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod

import torch

from llm42.kernels.interface import PreparedLinear
from llm42.kernels.portable import has_native_gemm

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers of the dtypes."""

# With which a user can make oneDNN choose other kernels.
_SETTINGS = tuple(
    f"{prefix}_{name}"
    for prefix in ("ONEDNN", "DNNL")
    for name in ("MAX_CPU_ISA", "CPU_ISA_HINTS", "DEFAULT_FPMATH_MODE")
)


class Linears(ABC):
    """Linear layers and embeddings, as `llm42.kernels.Kernels` describes them."""

    @abstractmethod
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """Pack the weights ``[out_features, in_features]``."""

    @abstractmethod
    def prepare_embedding(self, table: torch.Tensor) -> PreparedLinear:
        """Bring the table ``[vocab, hidden]`` into the form that `embedding` reads."""

    @abstractmethod
    def tied_lm_head(self, embedding: PreparedLinear) -> PreparedLinear:
        """The output projection with the weights of an embedding."""

    @abstractmethod
    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        """``x [rows, in_features]`` to ``[rows, out_features]``."""

    @abstractmethod
    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        """Rows of the table for int64 ids ``[rows]``."""


class OwnLinears(Linears):
    """The library's; one packed form serves both uses of a table."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """Pack into panels of outputs; the bias is added in fp32."""
        out_features, in_features = weight.shape
        number = DTYPES[weight.dtype]
        packed = torch.empty(self._library.llm42_packed_size(number, out_features, in_features), dtype=weight.dtype)
        weight = weight.contiguous()
        self._library.llm42_pack(number, weight.data_ptr(), out_features, in_features, packed.data_ptr())
        bias = None if bias is None else bias.float().contiguous()
        return PreparedLinear(packed, bias, weight.dtype, out_features, in_features)

    def prepare_embedding(self, table: torch.Tensor) -> PreparedLinear:
        """Pack as a linear layer."""
        return self.prepare_linear(table, None)

    def tied_lm_head(self, embedding: PreparedLinear) -> PreparedLinear:
        """The embedding itself."""
        return embedding

    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        """Accumulate in fp32, in order of the inputs."""
        out = torch.empty((x.shape[0], linear.out_features), dtype=linear.dtype)
        self._library.llm42_linear(
            DTYPES[linear.dtype],
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            linear.weight.data_ptr(),
            linear.out_features,
            linear.in_features,
            None if linear.bias is None else linear.bias.data_ptr(),
            out.data_ptr(),
        )
        return out

    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        """Gather the rows from the panels."""
        out = torch.empty((token_ids.shape[0], table.in_features), dtype=table.dtype)
        self._library.llm42_embedding(
            DTYPES[table.dtype],
            token_ids.data_ptr(),
            token_ids.shape[0],
            table.weight.data_ptr(),
            table.in_features,
            out.data_ptr(),
        )
        return out


class OneDnnLinears(Linears):
    """oneDNN's, over weights in the blocked form that its kernels want.

    Raises:
        ValueError: oneDNN has no kernels for a weight's dtype on this CPU.
    """

    def __init__(self) -> None:
        # What torch.compile uses; there is no public operation that takes weights packed once.
        self._pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
        self._linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """Pack into blocks, as for any number of rows."""
        if not has_native_gemm(weight.dtype):
            raise ValueError(f"oneDNN has no kernels for {weight.dtype} on this CPU; use linears='own'")
        bias = None if bias is None else bias.to(weight.dtype).contiguous()
        return PreparedLinear(self._pack(weight, None), bias, weight.dtype, *weight.shape)

    def prepare_embedding(self, table: torch.Tensor) -> PreparedLinear:
        """Keep the table as it is: a row cannot be read from oneDNN's blocks."""
        return PreparedLinear(table.contiguous(), None, table.dtype, *table.shape)

    def tied_lm_head(self, embedding: PreparedLinear) -> PreparedLinear:
        """A second copy of the table, in blocks: the one weight that is held twice."""
        return self.prepare_linear(embedding.weight, None)

    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        """Accumulate in fp32, in an order that may depend on the number of rows."""
        out: torch.Tensor = self._linear(x, linear.weight, linear.bias, "none", [], "")
        return out

    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        """Index the table."""
        return table.weight[token_ids]


def has_matrix_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for a 16-bit dtype in instructions that the library does not use: AMX, AVX512-FP16."""
    if dtype == torch.bfloat16:
        # PyTorch hands bf16 to oneDNN on every AVX-512 CPU. With AVX512-BF16 the library is as fast for many rows and
        # faster for few; without, that is emulation.
        return has_native_gemm(dtype) and bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001
    # CPUs with fp16 in AVX2 only convert it, as the library does.
    return dtype == torch.float16 and has_native_gemm(dtype) and bool(torch.cpu._is_avx512_supported())  # noqa: SLF001


def describe(linears: dict[torch.dtype, Linears]) -> dict[str, str]:
    """Whose linears each dtype gets and, where some are oneDNN's, by what it chooses its kernels."""
    onednn = sorted(str(dtype).removeprefix("torch.") for dtype, of in linears.items() if isinstance(of, OneDnnLinears))
    if not onednn:
        return {"linears": "own"}
    rest = "" if len(onednn) == len(linears) else ", own for others"
    return {"linears": f"oneDNN for {', '.join(onednn)}{rest}", "onednn": _onednn_capability()}


def _onednn_capability() -> str:
    """The instructions of this CPU that oneDNN looks for, and the settings that change its choice."""
    cpu = torch.cpu
    supported = {
        "avx2": cpu._is_avx2_supported(),  # noqa: SLF001
        "avx512": cpu._is_avx512_supported(),  # noqa: SLF001
        "avx512_bf16": cpu._is_avx512_bf16_supported(),  # noqa: SLF001
        "amx": cpu._is_amx_tile_supported(),  # noqa: SLF001
        "amx_fp16": cpu._is_amx_fp16_supported(),  # noqa: SLF001
    }
    names = [name for name, is_supported in supported.items() if is_supported]
    # oneDNN's version is PyTorch's, which the contract names.
    return " ".join([*names, *(f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ)])
