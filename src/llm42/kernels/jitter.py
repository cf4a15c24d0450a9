"""Adversarial kernels: a real backend whose linear layers depend visibly on the number of rows.

Every row count has its own fixed perturbation, as every row count may have its own reduction order on a GPU, only much
larger. So these kernels keep the promise of shape-consistent kernels (a fixed row count gives fixed bits) and break
batch invariance as badly as one likes: without verification outputs change with the batch, with it they must not.
"""

from __future__ import annotations

import torch

from llm42.kernels.interface import PreparedLinear
from llm42.kernels.portable import PortableKernels

DEFAULT_AMPLITUDE = 2.0**-6


class JitterKernels(PortableKernels):
    """Portable kernels with a relative perturbation of ``amplitude`` at most, fixed per row count and column."""

    name = "jitter"

    def __init__(self, amplitude: float = DEFAULT_AMPLITUDE) -> None:
        self.amplitude = amplitude
        self._factors: dict[tuple[int, int], torch.Tensor] = {}

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "amplitude": repr(self.amplitude)}

    def linear(self, x: torch.Tensor, linear: PreparedLinear) -> torch.Tensor:
        y = super().linear(x, linear)
        return (y.float() * self._factor(x.shape[0], y.shape[1], y.device)).to(y.dtype)

    def _factor(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        key = (rows, columns)
        if key not in self._factors:
            generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
            noise = torch.rand(columns, generator=generator) * 2.0 - 1.0
            self._factors[key] = (1.0 + self.amplitude * noise).to(device)
        return self._factors[key]
