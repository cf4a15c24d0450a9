"""KV memory as the native library wants it: what `src/kv.h` says, for tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm42.kernels.kv import KVPool, KVShape, zeroed

STRIPE = 16
"""Slots that lie side by side, whatever the block size."""


class StripedKV(KVPool):
    """Stripes of `STRIPE` slots, each with the keys and then the values of one KV head after the other.

    Keys are ``[dim / step, STRIPE, step]`` and values ``[STRIPE / step, dim, step]``, where brain floats lie in pairs
    (step 2) and other numbers alone, and the head's dimensions are filled up with zeros to a multiple of `STRIPE`.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        step = 2 if dtype == torch.bfloat16 else 1
        dim = -(-shape.head_dim // STRIPE) * STRIPE
        heads = (shape.num_layers, -(-shape.num_slots // STRIPE), shape.num_kv_heads)
        self._data = zeroed((*heads, 2, STRIPE * dim), dtype, device)
        self._keys = self._data[:, :, :, 0].view(*heads, dim // step, STRIPE, step)
        self._values = self._data[:, :, :, 1].view(*heads, STRIPE // step, dim, step)
        self._head_dim = shape.head_dim
        self._step = step

    def layer(self, index: int) -> torch.Tensor:
        """The stripes of a layer, ``[stripes, kv_heads, 2, STRIPE * dim]``."""
        return self._data[index]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        stripe, slot = slots // STRIPE, slots % STRIPE
        keys = self._keys[:, stripe, :, :, slot].flatten(3)  # [slots, layers, kv_heads, dim]
        values = self._values[:, stripe, :, slot // self._step, :, slot % self._step]
        return torch.stack((keys, values))[..., : self._head_dim].permute(2, 0, 1, 3, 4)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        num_layers, _, num_heads, *_ = self._data.shape
        kv = kv.to(self._data.dtype).expand(num_layers, 2, len(slots), num_heads, self._head_dim)
        keys, values = kv.permute(1, 2, 0, 3, 4)  # [slots, layers, kv_heads, head_dim]
        keys = F.pad(keys, (0, -self._head_dim % self._step))
        keys = keys.reshape(*keys.shape[:-1], keys.shape[-1] // self._step, self._step)
        stripe, slot = slots // STRIPE, slots % STRIPE
        self._keys[:, stripe, :, : keys.shape[-2], slot] = keys
        self._values[:, stripe, :, slot // self._step, : self._head_dim, slot % self._step] = values
