"""The sampler in plain PyTorch: the reference for others, and the one for every dtype and device.

Invariant: a row that is drawn from is worked on alone, as a one-dimensional tensor, because libraries split and
vectorise a batch by its shape. That is done on the CPU: on a GPU, sums may depend on timing. Greedy rows share
operations that are exact (maximum, comparison), in the model's dtype and on its device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llm42.sampling import noise
from llm42.sampling.backend import UNUSABLE, Draw, SamplerBackend
from llm42.sampling.filters import ids_at_least, kept_ids, value_of_k
from llm42.sampling.logprobs import TokenLogprobs, UnusableLogitsError, token_logprobs

_BLOCK = 1024
# Within these, neither the temperature nor its reciprocal is zero, infinite or subnormal in float32.
_COLDEST, _HOTTEST = 2.0**-126, 2.0**126
# Candidates of the Gumbel-max: ids with at least exp(-_BAND) of the best probability, or the best ones of too many.
_BAND = 6.0
_BAND_LIMIT = 2048
_BAND_HEAD = 256
_ROUNDING = 1e-3  # far more than float32 sums of logits and noise can be off


class TorchSampler(SamplerBackend):
    """Plain PyTorch: any float dtype and device."""

    def greedy(self, logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """Maxima and comparisons only: exact in any dtype and grouping.

        (argmax promises no index on ties and is slower in bfloat16.)
        """
        if len(rows) == 0:
            return []
        return _greedy(logits if list(rows) == list(range(logits.shape[0])) else logits[list(rows)])

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """One row after the other."""
        return [_draw(logits[row], draw) for row, draw in zip(rows, draws, strict=True)]

    def token_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """One row after the other."""
        return [_score(logits[row], token_id, k) for row, token_id, k in zip(rows, token_ids, ks, strict=True)]


TORCH = TorchSampler()


def _greedy(logits: torch.Tensor) -> list[int]:
    rows, vocab = logits.shape
    width = min(_BLOCK, vocab)
    whole = logits[:, : vocab // width * width].reshape(rows, -1, width).amax(-1)
    # The last block is as wide as the others and overlaps its neighbour, which comes first and so wins what they share.
    maxima = torch.cat((whole, logits[:, vocab - width :].amax(-1, keepdim=True)), dim=1)
    best = maxima.amax(-1, keepdim=True)  # NaN if there is one
    start = (_first_true(maxima == best) * width).clamp(max=vocab - width)
    columns = start[:, None] + torch.arange(width, device=logits.device)
    tokens = start + _first_true(logits.gather(1, columns) == best)
    chosen: list[int] = torch.where(best.squeeze(1).isfinite(), tokens, UNUSABLE).tolist()
    return chosen


def _first_true(mask: torch.Tensor) -> torch.Tensor:
    """Index of the first True of each row of `mask` [rows, n], or n - 1 if there is none."""
    last = mask.shape[1] - 1
    return torch.where(mask, torch.arange(last + 1, device=mask.device), last).amin(-1)


def _score(logits: torch.Tensor, token_id: int, k: int) -> TokenLogprobs | None:
    try:
        return token_logprobs(logits, token_id, k)
    except UnusableLogitsError:
        return None


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    """Draw the token of one row of logits [vocab]."""
    x = logits.to(device="cpu", dtype=torch.float32).contiguous()
    best = x.amax().item()
    if not math.isfinite(best):  # amax passes NaN on
        return UNUSABLE
    # The maximum is subtracted first so that no temperature, however low, makes an infinity of the best ids.
    z = (x - best).div_(min(max(draw.temperature, _COLDEST), _HOTTEST))
    ids = kept_ids(z, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    if ids is None:
        return _gumbel_argmax(z, draw.seed, draw.position)
    return _best_of(ids, z[ids] + noise.gumbel(draw.seed, draw.position, ids))[0]


def _gumbel_argmax(z: torch.Tensor, seed: int, position: int) -> int:
    """Lowest id with the largest z + noise in the whole vocabulary: exact, with noise computed for few ids.

    Candidates are the ids from `cut` up and those that may have noise above `target - cut`; no other can score
    `target`. So if the best candidate does, it is the best of all; if it does not, the target was too high. The best
    score is distributed as log(sum(exp(z))) + noise: it reaches the first target in 93 % of draws, the second in all
    but 2e-9.
    """
    cut = -_BAND
    band = ids_at_least(z, cut)
    if band.numel() > _BAND_LIMIT:
        cut = value_of_k(z, _BAND_HEAD)
        band = ids_at_least(z, cut)
    target = math.log(z[band].exp().sum().item()) - 1.0
    while True:
        reaching = noise.ids_reaching(seed, position, z.numel(), target - cut - _ROUNDING)
        ids = torch.cat((band, reaching))  # an id in both does no harm
        token, score = _best_of(ids, z[ids] + noise.gumbel(seed, position, ids))
        if score >= target:
            return token
        target -= 2.0


def _best_of(ids: torch.Tensor, scores: torch.Tensor) -> tuple[int, float]:
    """The lowest of `ids` with the largest score, and that score."""
    best = scores.amax()
    return int(ids[scores == best].amin()), best.item()
