"""What a fast sampler replaces: the work over a whole vocabulary, for many rows of logits in one call.

A backend keeps the promise of this package: what it returns for a row is a function of that row's logits and of its
own entry in the call, bit for bit, whatever else the call holds and however many threads it uses. Tokens are exact in
their definition (`filters`, `noise`), so two backends may differ only where the rounding of a probability decides.

Every operation takes logits [n, vocab], which it does not change, and the indices of the rows to work on, in any
order: a batch with all kinds of rows is never copied to be sorted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm42.sampling.logprobs import TokenLogprobs

UNUSABLE = -1  # returned in place of a token id


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token of one row.

    Attributes:
        temperature: What logits are divided by, > 0.
        top_k: Keep that many best ids; 0 or -1 keeps all.
        top_p: Keep the smallest set of best ids whose probability reaches it, in (0, 1].
        min_p: Keep ids at least that probable relative to the best one, in [0, 1].
        seed: 0 <= seed < 2**64.
        position: Index in the sequence of the token being chosen, >= 0; keys the noise together with the seed.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


class SamplerBackend(ABC):
    """The operations over whole rows of logits."""

    @abstractmethod
    def greedy(self, logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """The lowest id of the largest logit of each row; -1 where that is not finite or there is a NaN."""

    @abstractmethod
    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """The id that each draw of a row gives; -1 where the largest logit is not finite or there is a NaN."""

    @abstractmethod
    def token_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """`logprobs.token_logprobs` of a token id and a k for each row; None where the logits are not usable.

        Raises `ValueError` for a token id outside the vocabulary.
        """
