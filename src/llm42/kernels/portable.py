"""Plain PyTorch kernels for any device: the reference, and what runs where nothing faster is to be had.

Invariant: every operation is one of fixed shape per row or per tile of rows, so that a row's bits depend on the number
of rows of the pass at most. Attention (see `attention`) does not even depend on that.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F

from llm42.kernels.attention import KEY_TILE, QUERY_TILE, AttentionPlan, tiled_attention
from llm42.kernels.interface import Kernels, PreparedLinear, RowBatch


class PortableKernels(Kernels):
    """Plain PyTorch operations."""

    name = "portable"

    def versions(self) -> dict[str, str]:
        return {
            "kernels": self.name,
            "torch": torch.__version__,
            "isa": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "attention": f"tiles of {QUERY_TILE} queries and {KEY_TILE} keys",
            "gemm": f"bf16 native: {has_native_gemm(torch.bfloat16)}, fp16 native: {has_native_gemm(torch.float16)}",
        }

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        dtype = weight.dtype
        if weight.device.type == "cpu" and not has_native_gemm(dtype):
            # Products of 16-bit values are exact in fp32, so an fp32 GEMM over widened weights computes the same
            # function; on a CPU without 16-bit instructions it is several times faster than PyTorch's own fallback.
            weight = weight.float()
            bias = None if bias is None else bias.float()
        return PreparedLinear(weight.contiguous(), bias, dtype, *weight.shape)

    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        return F.linear(x.to(linear.weight.dtype), linear.weight, linear.bias).to(linear.dtype)

    def embedding(self, token_ids: torch.Tensor, table: PreparedLinear) -> torch.Tensor:
        return table.weight[token_ids].to(table.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        return _rms_norm(residual, weight, eps), residual

    def rms_norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm(x, weight, eps)

    def begin_pass(self, batch: RowBatch, device: torch.device) -> AttentionPlan:
        return AttentionPlan(batch, device)

    def rope_and_store_kv(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: torch.Tensor | None,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        if rope is not None:
            cos, sin = rope[plan.positions].unsqueeze(2).unbind(1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # The pool holds finite values only: a masked position contributes 0 * value, and 0 * inf would be NaN, which
        # would let one row's overflow reach rows that must not see it.
        kv[0].index_copy_(0, plan.slots, torch.nan_to_num(k))
        kv[1].index_copy_(0, plan.slots, torch.nan_to_num(v))
        return q

    def paged_attention(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return tiled_attention(plan, q, kv, scale, window)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        # Spelled out: F.silu computes the end of a tensor with other instructions than its body.
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def has_native_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU's GEMM library has real kernels for the dtype, rather than a scalar fallback."""
    # What torch itself asks before it dispatches to oneDNN; there is no public name for it.
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001
    return True


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight``, normalised in fp32 and scaled in the model's dtype (as in Llama's reference code)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864) in the half-split order of Hugging Face checkpoints, computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
