"""The kernel interface: what a backend implements, and the data it is handed.

A backend keeps two promises, which the start-up self-test checks: at one fixed number of rows a row's result does not
depend on its index or its neighbours, and attention of a row depends on nothing but its own query, its position and the
KV of the positions up to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llm42.cache.block_pool import PADDING_SLOT
from llm42.kernels.kv import KVPool, KVShape, RowKV
from llm42.sampling.backend import SamplerBackend
from llm42.sampling.torch_sampler import TORCH


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Consecutive rows of one request in a pass."""

    row: int
    """Index of the first row in the pass."""
    start: int
    """Position of the first row in its sequence."""
    length: int
    blocks: Sequence[int]
    """The request's page table, as far as the segment's last position."""


class RowBatch:
    """The rows of one pass, on the host: where each lies in its sequence and in KV memory.

    Rows past the last segment are padding: position 0, writing to the padding slot, attended by nobody.

    Args:
        segments: In row order, without gaps from row 0 on.
        num_rows: Rows of the pass, padding included.
        block_size: Positions of one KV block.
    """

    def __init__(self, segments: Sequence[RowSegment], num_rows: int, block_size: int) -> None:
        self.segments = segments
        self.num_rows = num_rows
        self.block_size = block_size
        self.positions = np.zeros(num_rows, dtype=np.int64)
        self.slots = np.full(num_rows, PADDING_SLOT, dtype=np.int64)
        for segment in segments:
            rows = slice(segment.row, segment.row + segment.length)
            positions = np.arange(segment.start, segment.start + segment.length)
            blocks = np.asarray(segment.blocks, dtype=np.int64)
            self.positions[rows] = positions
            self.slots[rows] = blocks[positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class PreparedLinear:
    """A linear layer in the form its backend wants it."""

    weight: torch.Tensor
    """The weights, laid out as the backend likes."""
    bias: torch.Tensor | None
    dtype: torch.dtype
    """The model's dtype: what goes in and comes out, whatever the weight is stored as."""
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; norms are ``[hidden]``, or ``[head_dim]`` for the QK norm."""

    input_norm: torch.Tensor
    qkv: PreparedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PreparedLinear
    post_attention_norm: torch.Tensor
    gate_up: PreparedLinear
    down: PreparedLinear
    window: int | None
    has_rope: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStack:
    """The layers of a decoder and what they share."""

    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor
    rope: torch.Tensor
    """``[max_positions, 2, head_dim / 2]`` (cos, sin) in fp32."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.head_dim**-0.5)


class Kernels(ABC):
    """A backend. All activations are ``[rows, features]`` in the model's dtype."""

    name: str

    @property
    def sampler(self) -> SamplerBackend:
        """What turns logits of this backend into tokens; plain PyTorch, unless the backend has its own."""
        return TORCH

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Everything about this backend and this machine that may change bits; part of the contract."""

    @abstractmethod
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        """Bring a linear layer's weights into the backend's form, once."""

    def prepare_embedding(self, table: torch.Tensor) -> PreparedLinear:
        """Bring the table ``[vocab, hidden]`` into the form that `embedding` reads, once."""
        return self.prepare_linear(table)

    def tied_lm_head(self, embedding: PreparedLinear) -> PreparedLinear:
        """The output projection with the weights of an embedding: the same object where one form serves both uses."""
        return embedding

    def new_kv_pool(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> KVPool:
        """KV memory for the operations below."""
        return RowKV(shape, dtype, device)

    @abstractmethod
    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        """``x [rows, in_features]`` to ``[rows, out_features]``, accumulated in fp32 at least."""

    @abstractmethod
    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        """Rows of a table that `prepare_embedding` gave, for int64 ids ``[rows]``."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``, both ``[rows, hidden]``."""

    @abstractmethod
    def rms_norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension of ``[rows, heads, head_dim]`` (QK norm)."""

    @abstractmethod
    def begin_pass(self, batch: RowBatch, device: torch.device) -> Any:
        """Prepare what all layers of a pass share; the value is handed back to the two operations below."""

    @abstractmethod
    def rope_and_store_kv(
        self,
        plan: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: torch.Tensor | None,
        kv: Any,
    ) -> torch.Tensor:
        """Rotate ``q [rows, heads, head_dim]`` and ``k``, write k and v to the rows' slots, return the rotated q.

        ``rope`` is ``[max_positions, 2, head_dim / 2]`` (cos, sin) in fp32; None for layers without rotary embedding.
        ``kv`` is a layer of a pool of this backend.
        """

    @abstractmethod
    def paged_attention(self, plan: Any, q: torch.Tensor, kv: Any, scale: float, window: int | None) -> torch.Tensor:
        """Attention of each row over positions 0..p of its own sequence (the last ``window`` of them, if given).

        Returns ``[rows, heads * head_dim]``; padding rows get zeros.
        """

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``[rows, 2 * intermediate]`` to ``[rows, intermediate]``."""

    def run_layers(self, stack: DecoderStack, x: torch.Tensor, batch: RowBatch, kv: KVPool) -> torch.Tensor:
        """All layers over one pass: embeddings ``[rows, hidden]`` to hidden states after the final norm; writes KV."""
        plan = self.begin_pass(batch, x.device)
        sizes = [heads * stack.head_dim for heads in (stack.num_heads, stack.num_kv_heads, stack.num_kv_heads)]
        residual: torch.Tensor | None = None
        for index, layer in enumerate(stack.layers):
            x, residual = self.add_rms_norm(x, residual, layer.input_norm, stack.eps)
            parts = torch.split(self.linear(x, layer.qkv), sizes, dim=-1)
            q, k, v = (part.view(part.shape[0], -1, stack.head_dim) for part in parts)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = self.rms_norm_heads(q, layer.q_norm, stack.eps)
                k = self.rms_norm_heads(k, layer.k_norm, stack.eps)
            layer_kv = kv.layer(index)
            q = self.rope_and_store_kv(plan, q, k, v, stack.rope if layer.has_rope else None, layer_kv)
            x = self.linear(self.paged_attention(plan, q, layer_kv, stack.scale, layer.window), layer.o)
            x, residual = self.add_rms_norm(x, residual, layer.post_attention_norm, stack.eps)
            x = self.linear(self.silu_mul(self.linear(x, layer.gate_up)), layer.down)
        return self.add_rms_norm(x, residual, stack.final_norm, stack.eps)[0]
