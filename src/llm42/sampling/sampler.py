"""One token per row of logits: the order of the sampler's steps, and the promise that rows do not influence each other.

Order: logits (float32) -> logit_bias -> penalties over the row's own prefix -> min_tokens mask -> temperature ->
top_k -> top_p -> min_p -> Gumbel-max (argmax of z + noise, Gumbel 1954; Maddison et al. 2014), or argmax at
temperature 0. The lowest id wins ties.

Invariant: a row's token is a function of its own logits and `SampleRow`, bit for bit. A sampled row is worked on alone,
as a fresh one-dimensional copy, because libraries split and vectorise a batch by its shape. That copy is on the CPU: on
a GPU, sums may depend on timing. Plain greedy rows share operations that are exact (maximum, comparison), in the
model's dtype and on its device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llm42.sampling import noise, penalties
from llm42.sampling.filters import ids_at_least, kept_ids, value_of_k

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm42.sampling.params import SamplingParams

# Part of the contract: raise it with every change that may give some row another token or another log-probability.
SAMPLER_VERSION = 1
UNUSABLE = -1  # returned in place of a token id

_BLOCK = 1024
# Within these, neither the temperature nor its reciprocal is zero, infinite or subnormal in float32.
_COLDEST, _HOTTEST = 2.0**-126, 2.0**126
# Candidates of the Gumbel-max: ids with at least exp(-_BAND) of the best probability, or the best ones of too many.
_BAND = 6.0
_BAND_LIMIT = 2048
_BAND_HEAD = 256
_ROUNDING = 1e-3  # far more than float32 sums of logits and noise can be off


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Everything that one row's token may depend on beside its logits.

    Attributes:
        params: The request's parameters.
        seed: Effective seed of this completion, 0 <= seed < 2**64.
        prompt_token_ids: The request's prompt.
        output_token_ids: The row's own prefix of the output: committed tokens, then the candidates before it.
        stop_token_ids: End-of-sequence and stop ids, masked while the prefix is shorter than `params.min_tokens`.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]

    @property
    def position(self) -> int:
        """Index in the sequence of the token to choose; keys the noise."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def masks_stop_tokens(self) -> bool:
        """Whether min_tokens still forbids the row to stop."""
        return len(self.output_token_ids) < self.params.min_tokens and bool(self.stop_token_ids)

    @property
    def changes_logits(self) -> bool:
        """Whether a bias, a penalty or a mask is in force."""
        p = self.params
        penalized = p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0
        return penalized or p.logit_bias is not None or self.masks_stop_tokens


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Choose one token id per row.

    Args:
        logits: [rows, vocab], any float dtype and device; not changed.
        rows: One per row of `logits`.

    Returns:
        Token ids; -1 for a row whose logits are not usable (NaN or +inf anywhere, or all -inf) or whose mask left none.

    Raises:
        ValueError: `logits` is not two-dimensional with one row per entry of `rows` and at least one column.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"logits must be [{len(rows)} rows, vocab], got {shape}; pass one row per entry of rows")
    tokens = [UNUSABLE] * len(rows)
    plain = [i for i, row in enumerate(rows) if row.params.is_greedy and not row.changes_logits]
    if plain:
        chosen = greedy(logits if len(plain) == len(rows) else logits[plain])
        for i, token in zip(plain, chosen, strict=True):
            tokens[i] = token
    for i in sorted(set(range(len(rows))).difference(plain)):
        row_logits = logits[i].to(device="cpu", dtype=torch.float32, copy=True).contiguous()
        tokens[i] = _sample_row(row_logits, rows[i])
    return tokens


def greedy(logits: torch.Tensor) -> list[int]:
    """Lowest id of the largest logit of each row of `logits` [rows >= 1, vocab >= 1]; -1 if that logit is not finite.

    Maxima and comparisons only: exact in any dtype and grouping. (argmax promises no index on ties and is slower in
    bfloat16.)
    """
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


def _sample_row(x: torch.Tensor, row: SampleRow) -> int:
    """Choose the token of one row of logits `x` [vocab], float32 on the CPU; `x` is used up."""
    best = x.amax().item()
    if not math.isfinite(best):  # amax passes NaN on
        return UNUSABLE
    params = row.params
    if row.changes_logits:
        _change_logits(x, row)
        best = x.amax().item()
        if not math.isfinite(best):
            return UNUSABLE
    if params.is_greedy:
        return int((x == best).nonzero()[0])
    # The maximum is subtracted first so that no temperature, however low, makes an infinity of the best ids.
    z = x.sub_(best).div_(min(max(params.temperature, _COLDEST), _HOTTEST))
    ids = kept_ids(z, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    if ids is None:
        return _gumbel_argmax(z, row.seed, row.position)
    return _best_of(ids, z[ids] + noise.gumbel(row.seed, row.position, ids))[0]


def _change_logits(x: torch.Tensor, row: SampleRow) -> None:
    params = row.params
    if params.logit_bias is not None:
        penalties.add_logit_bias(x, params.logit_bias)
    if params.repetition_penalty != 1.0:
        penalties.penalize_repetition(x, row.prompt_token_ids, row.output_token_ids, params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        penalties.penalize_output(x, row.output_token_ids, params.presence_penalty, params.frequency_penalty)
    if row.masks_stop_tokens:
        penalties.mask_ids(x, row.stop_token_ids)


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
