"""Log-probabilities of one row: log_softmax in float32 of the raw logits, before any of the sampler's changes.

Invariant: the numbers depend on the row's logits and on nothing else, so re-scoring prompt + output gives exactly
what generation gave. The row is copied to the CPU first: there the one-row log_softmax has one order of summation, on
whatever memory or device the logits were. Ranks and lists are in the sampler's order, (logit descending, id
ascending): rank 1 is the greedy token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llm42.sampling.filters import in_order, top_k_ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural logarithm) and rank of one token, and the best tokens at its position.

    Attributes:
        token_id: The token.
        logprob: Its log-probability, a float32 value; -inf for an impossible token.
        rank: 1 for the best id; ties are ranked by ascending id.
        top: (token id, log-probability) of the best ids, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class UnusableLogitsError(ValueError):
    """A row with NaN, +inf or nothing but -inf has no probabilities."""


def token_logprobs(logits_row: torch.Tensor, token_id: int, k: int) -> TokenLogprobs:
    """Score `token_id` under `logits_row` [vocab] (any float dtype and device), with the min(k, vocab) best ids.

    Raises `ValueError` for a token id outside the row, and `UnusableLogitsError` for a row with NaN, +inf or nothing
    but -inf.
    """
    logits = logits_row.to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    if not 0 <= token_id < logits.numel():
        raise ValueError(f"token_id must be in 0..{logits.numel() - 1}, got {token_id}; use an id of the vocabulary")
    best = logits.amax().item()
    if not math.isfinite(best):
        message = f"logits_row must have a finite maximum, got {best}; drop the row, it has no probabilities"
        raise UnusableLogitsError(message)
    scores = logits.log_softmax(-1)
    value = logits[token_id]
    rank = 1 + int((logits > value).sum()) + int((logits[:token_id] == value).sum())
    return TokenLogprobs(token_id, scores[token_id].item(), rank, _best(logits, scores, k))


def _best(logits: torch.Tensor, scores: torch.Tensor, k: int) -> tuple[tuple[int, float], ...]:
    if k == 0:
        return ()
    ids = top_k_ids(logits, k)
    ids = ids[in_order(logits[ids])]
    return tuple(zip(ids.tolist(), scores[ids].tolist(), strict=True))
