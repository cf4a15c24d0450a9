"""Logit changes of one row before temperature: logit_bias, penalties over the row's own prefix, the min_tokens mask.

All functions change their row `x` [vocab], float32 on the CPU, in place, and touch only the token ids concerned. Counts
are exact integers taken from the row's own prefix, so that a row of a verification window sees what a decode row would.
Each change is computed in float64 and rounded once; one that overflows stays finite, an impossible id stays impossible.
Ids outside the vocabulary are skipped here: `params.validate_for_vocab` is where a user learns about them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_LARGEST = torch.finfo(torch.float32).max


def add_logit_bias(x: torch.Tensor, logit_bias: Mapping[int, float]) -> None:
    """Add each bias to the logit of its token id."""
    ids = _ids(x, logit_bias)
    bias = torch.tensor([logit_bias[token_id] for token_id in ids.tolist()], dtype=torch.float64)
    _store(x, ids, x[ids] + bias)


def penalize_repetition(
    x: torch.Tensor, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int], penalty: float
) -> None:
    """Divide positive and multiply negative logits of the ids in prompt or output by `penalty`.

    Keskar et al., "CTRL" (2019).
    """
    ids = _ids(x, set(prompt_token_ids).union(output_token_ids))
    logits = x[ids].double()
    _store(x, ids, torch.where(logits > 0, logits / penalty, logits * penalty))


def penalize_output(x: torch.Tensor, output_token_ids: Sequence[int], presence: float, frequency: float) -> None:
    """Subtract `frequency` per occurrence and `presence` once from the output's ids, as the OpenAI API does."""
    counts = Counter(output_token_ids)
    ids = _ids(x, counts)
    occurrences = torch.tensor([counts[token_id] for token_id in ids.tolist()], dtype=torch.float64)
    _store(x, ids, x[ids] - frequency * occurrences - presence)


def mask_ids(x: torch.Tensor, token_ids: Iterable[int]) -> None:
    """Make the ids impossible."""
    x[_ids(x, token_ids)] = -torch.inf


def _ids(x: torch.Tensor, token_ids: Iterable[int]) -> torch.Tensor:
    return torch.tensor([token_id for token_id in token_ids if 0 <= token_id < x.numel()], dtype=torch.int64)


def _store(x: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Write float64 `logits` of `ids` into the row."""
    x[ids] = torch.where(x[ids] == -torch.inf, -torch.inf, logits.clamp(-_LARGEST, _LARGEST)).float()
