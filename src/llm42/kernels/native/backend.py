"""The native backend: the kernel interface on top of the C++ library.

Invariant: whatever a row is computed with, and in which order, is written down in the sources; only where the CPU has
matrix instructions that these do not use are linear layers oneDNN's (`linears`), and their shape classes are measured.
Tensors that go to the library are contiguous in their last dimension and on the CPU.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from llm42.kernels.interface import DecoderStack, Kernels, PreparedLinear, RowBatch
from llm42.kernels.kv import KVPool, KVShape
from llm42.kernels.native import build
from llm42.kernels.native.kv import StripedKV
from llm42.kernels.native.layers import NativeStack, PassRows
from llm42.kernels.native.linears import (
    DTYPES,
    Linears,
    OneDnnLinears,
    OwnLinears,
    describe,
    has_matrix_instructions,
)
from llm42.kernels.native.sampler import NativeSampler

_INT, _SIZE, _POINTER, _FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "packed_size": [_INT, _SIZE, _SIZE],
    "pack": [_INT, _POINTER, _SIZE, _SIZE, _POINTER],
    "linear": [_INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER],
    "embedding": [_INT, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER],
    "add_rms_norm": [_INT, _POINTER, _POINTER, _POINTER, _FLOAT, _SIZE, _SIZE, _POINTER, _POINTER],
    "rms_norm_heads": [_INT, _POINTER, _POINTER, _FLOAT, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER],
    "rope_and_store_kv": [_INT, _POINTER, _POINTER, *[_SIZE] * 4, *[_POINTER, _SIZE] * 3, *[_POINTER] * 3],
    "silu_mul": [_INT, _POINTER, _SIZE, _SIZE, _POINTER],
    "attention": [
        *[_INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER],
        *[_SIZE, _SIZE, _FLOAT, _POINTER],
    ],
}


@lru_cache
def _library(flags: tuple[str, ...] | None) -> ctypes.CDLL:
    library = build.load_library(flags)
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"llm42_{name}")
        function.argtypes = arguments
        function.restype = _SIZE if name == "packed_size" else None
    return library


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers of a pass share: int64 positions, slots and ``segments [n, 4]``, and int32 page tables."""

    positions: np.ndarray
    slots: np.ndarray
    segments: np.ndarray
    blocks: np.ndarray
    block_size: int


class NativeKernels(Kernels):
    """C++ kernels for the CPU.

    Args:
        flags: Instruction set flags for the compiler; by default this machine's.
        linears: Whose linear layers to use for every dtype, the library's own or oneDNN's; by default oneDNN's for
            those dtypes that this CPU has matrix instructions for which the library does not use.

    Raises:
        NativeBuildError: The library cannot be built here.
    """

    name = "native"

    def __init__(self, flags: tuple[str, ...] | None = None, linears: Literal["own", "onednn"] | None = None) -> None:
        self._library = _library(flags)
        own = OwnLinears(self._library)
        self._linears: dict[torch.dtype, Linears] = {
            dtype: OneDnnLinears()
            if linears == "onednn" or (linears is None and has_matrix_instructions(dtype))
            else own
            for dtype in DTYPES
        }
        self._sampler = NativeSampler(self._library)
        self._flags = build.target_flags() if flags is None else flags
        self._stack: NativeStack | None = None
        """The layers that ran last, over the KV memory they ran over."""

    @property
    def sampler(self) -> NativeSampler:
        return self._sampler

    def versions(self) -> dict[str, str]:
        return {
            "kernels": self.name,
            "sources": build.sources_digest(),
            "compiler": build.compiler_version(),
            "flags": " ".join(self._flags),
            "target": build.target_digest(self._flags),
            "torch": torch.__version__,
            "isa": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            **describe(self._linears),
        }

    def new_kv_pool(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> StripedKV:
        return StripedKV(shape, dtype, device)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        return self._linears_for(weight).prepare_linear(weight, bias)

    def prepare_embedding(self, table: torch.Tensor) -> PreparedLinear:
        return self._linears_for(table).prepare_embedding(table)

    def tied_lm_head(self, embedding: PreparedLinear) -> PreparedLinear:
        return self._linears[embedding.dtype].tied_lm_head(embedding)

    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        return self._linears[linear.dtype].linear(x, linear)

    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        return self._linears[table.dtype].embedding(token_ids, table)

    def _linears_for(self, weight: torch.Tensor) -> Linears:
        if weight.device.type != "cpu" or weight.dtype not in DTYPES:
            raise ValueError(
                f"native kernels take weights in bfloat16, float16 or float32 on the CPU, not {weight.dtype} on "
                f"{weight.device}; use kernels='portable'"
            )
        return self._linears[weight.dtype]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self._library.llm42_add_rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            *x.shape,
            out.data_ptr(),
            total.data_ptr(),
        )
        return out, total

    def rms_norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, heads, size = x.shape
        out = torch.empty((rows, heads, size), dtype=x.dtype)
        self._library.llm42_rms_norm_heads(
            DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), eps, rows, x.stride(0), heads, size, out.data_ptr()
        )
        return out

    def begin_pass(self, batch: RowBatch, device: torch.device) -> _Plan:  # noqa: ARG002
        segments = np.empty((len(batch.segments), 4), dtype=np.int64)
        blocks: list[int] = []
        for index, segment in enumerate(batch.segments):
            segments[index] = segment.row, segment.start, segment.length, len(blocks)
            blocks.extend(segment.blocks)
        return _Plan(batch.positions, batch.slots, segments, np.asarray(blocks, dtype=np.int32), batch.block_size)

    def run_layers(self, stack: DecoderStack, x: torch.Tensor, batch: RowBatch, kv: KVPool) -> torch.Tensor:
        if not isinstance(self._linears[x.dtype], OwnLinears):
            return super().run_layers(stack, x, batch, kv)
        plan = self.begin_pass(batch, x.device)
        if self._stack is None or not self._stack.is_of(stack, kv, batch.block_size):
            self._stack = NativeStack(self._library, DTYPES[x.dtype], stack, kv, batch.block_size)
        rows = PassRows(
            batch.num_rows,
            plan.positions.ctypes.data,
            plan.slots.ctypes.data,
            plan.segments.ctypes.data,
            len(plan.segments),
            plan.blocks.ctypes.data,
        )
        return self._stack(rows, x)

    def rope_and_store_kv(
        self,
        plan: _Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: torch.Tensor | None,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        rows, heads, head_dim = q.shape
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype)
        self._library.llm42_rope_and_store_kv(
            DTYPES[q.dtype],
            plan.positions.ctypes.data,
            plan.slots.ctypes.data,
            rows,
            heads,
            k.shape[1],
            head_dim,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            None if rope is None else rope.data_ptr(),
            kv.data_ptr(),
            out.data_ptr(),
        )
        return out

    def paged_attention(
        self, plan: _Plan, q: torch.Tensor, kv: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        rows, heads, head_dim = q.shape
        out = torch.empty((rows, heads * head_dim), dtype=q.dtype)
        self._library.llm42_attention(
            DTYPES[q.dtype],
            q.data_ptr(),
            rows,
            q.stride(0),
            kv.data_ptr(),
            heads,
            kv.shape[1],
            head_dim,
            plan.segments.ctypes.data,
            len(plan.segments),
            plan.blocks.ctypes.data,
            plan.block_size,
            window or 0,
            scale,
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._library.llm42_silu_mul(DTYPES[gate_up.dtype], gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out
