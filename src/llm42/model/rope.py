"""Rotary position embedding: the frequencies of each variant, as in transformers' `modeling_rope_utils`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over all of a head; `type` says which of the numbers below `theta` count."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int | None = None  # llama3, yarn: positions before the context was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: replaces the formula of `attention_scaling`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions

    @property
    def attention_scaling(self) -> float:
        """The factor on cos and sin: 1, except for yarn.

        There it is sqrt(1/t) = 0.1 ln(factor) + 1 (YaRN, arXiv 2309.00071, section 3.4); DeepSeek's variant divides
        that term weighted by `mscale` by the one weighted by `mscale_all_dim`.
        """
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._yarn_mscale(self.mscale) / self._yarn_mscale(self.mscale_all_dim)
        return self._yarn_mscale(1.0)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each rotated pair, float32 [head_dim / 2]: theta ** (-2i / head_dim), then scaled.

        Bit for bit `ROPE_INIT_FUNCTIONS` of transformers. Sources: RoFormer (arXiv 2104.09864) for the base, position
        interpolation (arXiv 2306.15595) for linear, Meta's reference code of Llama 3.1 for llama3, YaRN (arXiv
        2309.00071, section 3.2) for yarn.
        """
        wavelengths = self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
        inverse = 1.0 / wavelengths
        if self.type == "linear":
            return inverse / self.factor
        if self.type == "llama3":
            return self._llama3(inverse)
        if self.type == "yarn":
            # 1 keeps a pair's frequency (extrapolation), 0 divides it by the factor (interpolation).
            keep = 1 - self._yarn_ramp(head_dim)
            return 1.0 / (self.factor * wavelengths) * (1 - keep) + inverse * keep
        return inverse

    def _original_length(self) -> int:
        if self.original_max_position_embeddings is None:
            raise ValueError(f"rope type {self.type!r} needs original_max_position_embeddings, which is None")
        return self.original_max_position_embeddings

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        length = self._original_length()
        wavelengths = 2 * math.pi / inverse
        long = wavelengths > length / self.low_freq_factor
        short = wavelengths < length / self.high_freq_factor
        scaled = torch.where(long, inverse / self.factor, inverse)
        smooth = (length / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        return torch.where(~short & ~long, smoothed, scaled)

    def _yarn_mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _yarn_ramp(self, head_dim: int) -> torch.Tensor:
        length = self._original_length()

        def dimension(rotations: float) -> float:
            """The (fractional) dimension that turns `rotations` times over the original length."""
            return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # as transformers does, so that the ramp is a step and not 0/0
        return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
