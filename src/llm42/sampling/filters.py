"""Which token ids a row may still choose: top_k, top_p and min_p over one row of scaled logits.

Invariant: ids are ordered by (value descending, id ascending), a total order, and each filter keeps a prefix of it;
so ties are never left to whichever index a library's sort or topk happens to return. All functions take one row `z`
[vocab], float32 on the CPU, and return token ids, int64 and ascending. For top_p and min_p the maximum of the row
must be 0, so that exp(z) is the probability relative to the best id.

A sort of the whole vocabulary costs several milliseconds, so none is made: maxima of blocks of ids bound the k-th
largest value, and a histogram of probability over value finds the narrow range in which top_p ends. Only ids in
question are sorted: the result is exact, and the way to it depends on the row's own values only.
"""

from __future__ import annotations

import math

import torch

_BLOCK = 64
_BINS_PER_NAT = 64.0  # a power of two: bin numbers are then exact, so a lower bin never holds a smaller value
_LAST_BIN = 64 * 64 - 1  # takes everything less likely than exp(-64) too


def kept_ids(z: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """Ids that pass top_k, then top_p (of the probability that top_k left), then min_p; None stands for all ids."""
    ids = None
    if 0 < top_k < z.numel():
        ids = top_k_ids(z, top_k)
    if top_p < 1.0:
        ids = top_p_ids(z, top_p) if ids is None else _top_p_of(z, ids, top_p)
    if min_p > 0.0:
        least = math.log(min_p)  # prob >= min_p * max prob, compared in float32 as logarithms
        ids = ids_at_least(z, least) if ids is None else ids[z[ids] >= least]
    return ids


def top_k_ids(z: torch.Tensor, k: int) -> torch.Tensor:
    """The first min(k, vocab) ids of the order (k >= 1)."""
    if k >= z.numel():
        return torch.arange(z.numel())
    ids = ids_at_least(z, value_of_k(z, k))
    values = z[ids]
    kth = torch.topk(values, k, sorted=False).values.amin()
    kept = values > kth
    tied = (values == kth).nonzero().squeeze(1)
    kept[tied[: k - int(kept.sum())]] = True
    return ids[kept]


def top_p_ids(z: torch.Tensor, top_p: float) -> torch.Tensor:
    """The shortest prefix of the order with at least `top_p` of the row's probability, never empty (0 < top_p < 1).

    Probabilities are float32 exp(z), their sums float64.
    """
    bins = (z * -_BINS_PER_NAT).clamp_(max=_LAST_BIN).long()
    mass = torch.bincount(bins, z.exp().double(), minlength=_LAST_BIN + 1).cumsum(0)
    goal = top_p * mass[-1].item()
    last_bin = int((mass < goal).sum())  # the bin in which the goal is reached
    reached = mass[last_bin - 1].item() if last_bin else 0.0
    ids = (bins <= last_bin).nonzero().squeeze(1)
    in_last = (bins[ids] == last_bin).nonzero().squeeze(1)
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[in_last] = False
    kept[in_last[_shortest_prefix(z[ids[in_last]], goal - reached)]] = True
    return ids[kept]


def in_order(values: torch.Tensor) -> torch.Tensor:
    """Indices that sort `values` [n], given in ascending id order, by (value descending, id ascending)."""
    return torch.sort(values, descending=True, stable=True).indices


def value_of_k(z: torch.Tensor, k: int) -> float:
    """A value, near the k-th largest, that at least k ids reach (1 <= k <= vocab)."""
    num_blocks = z.numel() // _BLOCK
    if k <= num_blocks:  # k blocks whose maxima reach a value have k ids that do
        z = z[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).amax(-1)
    return torch.topk(z, k, sorted=False).values.amin().item()


def ids_at_least(z: torch.Tensor, value: float) -> torch.Tensor:
    """Every id with z >= value, compared in float32."""
    return (z >= value).nonzero().squeeze(1)


def _top_p_of(z: torch.Tensor, ids: torch.Tensor, top_p: float) -> torch.Tensor:
    """top_p among `ids` alone."""
    values = z[ids]
    goal = top_p * values.exp().sum(dtype=torch.float64).item()
    return ids[_shortest_prefix(values, goal).sort().values]


def _shortest_prefix(values: torch.Tensor, goal: float) -> torch.Tensor:
    """Indices of the shortest prefix of the order whose exp(value) add up to `goal`; all, if rounding leaves less."""
    order = in_order(values)
    mass = values[order].exp().cumsum(0, dtype=torch.float64)
    return order[: int((mass < goal).sum()) + 1]
