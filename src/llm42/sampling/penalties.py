"""Logit changes of one row before temperature: logit_bias, penalties over the row's own prefix, the min_tokens mask.

All functions change their row `x` [vocab], float32 on the CPU, in place, and touch only the token ids concerned. Counts
are exact integers taken from the row's own prefix, so that a row of a verification window sees what a decode row would.
Each change is computed in float64 and rounded once; one that overflows stays finite, an impossible id stays impossible.
Ids outside the vocabulary are skipped here: `params.validate_for_vocab` is where a user learns about them.

In NumPy, on the row's memory: few ids are concerned, and there PyTorch's cost is that of its calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

_LARGEST = float(np.finfo(np.float32).max)


def add_logit_bias(x: torch.Tensor, logit_bias: Mapping[int, float]) -> None:
    """Add each bias to the logit of its token id."""
    row, ids = x.numpy(), _ids(x, logit_bias)
    logits = row[ids].astype(np.float64)
    _store(row, ids, logits, logits + [logit_bias[token_id] for token_id in ids.tolist()])


def penalize_repetition(
    x: torch.Tensor, prompt_token_ids: Collection[int], output_token_ids: Collection[int], penalty: float
) -> None:
    """Divide positive and multiply negative logits of the ids in prompt or output by `penalty`.

    Keskar et al., "CTRL" (2019).
    """
    # An id that occurs twice gets the same value twice.
    row, ids = x.numpy(), np.concatenate((_ids(x, prompt_token_ids), _ids(x, output_token_ids)))
    logits = row[ids].astype(np.float64)
    with np.errstate(over="ignore"):
        _store(row, ids, logits, np.where(logits > 0.0, logits / penalty, logits * penalty))


def penalize_output(x: torch.Tensor, output_token_ids: Sequence[int], presence: float, frequency: float) -> None:
    """Subtract `frequency` per occurrence and `presence` once from the output's ids, as the OpenAI API does."""
    row, (ids, occurrences) = x.numpy(), np.unique(_ids(x, output_token_ids), return_counts=True)
    logits = row[ids].astype(np.float64)
    _store(row, ids, logits, logits - frequency * occurrences - presence)


def mask_ids(x: torch.Tensor, token_ids: Collection[int]) -> None:
    """Make the ids impossible."""
    x.numpy()[_ids(x, token_ids)] = -np.inf


def _ids(x: torch.Tensor, token_ids: Collection[int]) -> NDArray[np.int64]:
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    return ids[(ids >= 0) & (ids < x.numel())]


def _store(row: NDArray[Any], ids: NDArray[np.int64], before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    """Write the logits `after` a change to the row's `ids`, unless they were impossible `before`."""
    row[ids] = np.where(before == -np.inf, before, after.clip(-_LARGEST, _LARGEST))
