"""KV memory: what a slot holds is the same for every backend, how it lies in memory is the backend's choice."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """How much KV memory there is."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    head_dim: int


class KVPool(ABC):
    """KV memory of all layers, zero at the start, laid out as a backend likes it.

    A slot holds the keys and values of one position: position p of block b is slot ``b * block_size + p``.
    """

    @abstractmethod
    def layer(self, index: int) -> Any:
        """The memory of one layer, in the form that the backend's own operations take."""

    @abstractmethod
    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of what int64 ``slots [n]`` hold: ``[layers, 2, n, kv_heads, head_dim]``, keys before values."""

    @abstractmethod
    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Put into int64 ``slots [n]`` what `read` would give, or what broadcasts to its shape."""


class RowKV(KVPool):
    """Keys and values ``[layers, 2, slots, kv_heads, head_dim]``."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_layers, 2, shape.num_slots, shape.num_kv_heads, shape.head_dim)
        self._data = zeroed(size, dtype, device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each ``[slots, kv_heads, head_dim]``."""
        return self._data[index, 0], self._data[index, 1]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._data[:, :, slots.to(self._data.device)]

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self._data[:, :, slots.to(self._data.device)] = kv.to(self._data)


def zeroed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on a CPU memory that is never used is never taken."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    # Zeroed by the operating system when first touched.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)
