"""One token per row of logits: the order of the sampler's steps, and the promise that rows do not influence each other.

Order: logits (float32) -> logit_bias -> penalties over the row's own prefix -> grammar mask -> min_tokens mask ->
temperature -> top_k -> top_p -> min_p -> Gumbel-max (argmax of z + noise, Gumbel 1954; Maddison et al. 2014), or
argmax at temperature 0. The lowest id wins ties.

Invariant: a row's token is a function of its own logits and `SampleRow`, bit for bit. Bias, penalties and masks are
applied here, to a float32 copy of a row that has any; the rest is a backend's work, on the model's own logits wherever
a row leaves them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm42.sampling import penalties
from llm42.sampling.backend import UNUSABLE, Draw, SamplerBackend
from llm42.sampling.grammar import Grammar
from llm42.sampling.params import SamplingParams
from llm42.sampling.torch_sampler import TORCH

__all__ = ["SAMPLER_VERSION", "UNUSABLE", "SampleRow", "sample"]

# Part of the contract: raise it with every change that may give some row another token or another log-probability.
SAMPLER_VERSION = 2


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Everything that one row's token may depend on beside its logits.

    Attributes:
        params: The request's parameters.
        seed: Effective seed of this completion, 0 <= seed < 2**64.
        prompt_token_ids: The request's prompt.
        output_token_ids: The row's own prefix of the output: committed tokens, then the candidates before it.
        stop_token_ids: End-of-sequence and stop ids, masked while the prefix is shorter than `params.min_tokens`.
        grammar: What the output must follow, if anything.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]
    grammar: Grammar | None = None

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
        return penalized or p.logit_bias is not None or self.masks_stop_tokens or self.grammar is not None

    @property
    def dead_end(self) -> str | None:
        """Why the grammar leaves no token, if it does."""
        if self.grammar is None:
            return None
        length, kind = len(self.output_token_ids), getattr(self.params.structured_outputs, "kind", "grammar")
        allowed = self.grammar.allowed(self.output_token_ids, self.stop_token_ids)
        if self.grammar.is_exhausted:
            return f"structured_outputs.{kind} takes too long to match after {length} tokens; simplify it"
        if allowed is not None and self.masks_stop_tokens:
            allowed[list(self.stop_token_ids)] = False
            if not allowed.any():
                minimum = self.params.min_tokens
                return (
                    f"structured_outputs.{kind} is complete after {length} tokens; lower min_tokens, which is {minimum}"
                )
        if allowed is None or not allowed.any():
            return f"structured_outputs.{kind} allows no token of this model after {length} tokens"
        return None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], backend: SamplerBackend = TORCH) -> list[int]:
    """Choose one token id per row.

    Args:
        logits: [rows, vocab], of a float dtype and on a device that the backend takes; not changed.
        rows: One per row of `logits`.
        backend: What does the work over the vocabulary.

    Returns:
        Token ids; -1 for a row whose logits are not usable (NaN or +inf anywhere, or all -inf), or whose masks left
        none.

    Raises:
        ValueError: `logits` is not two-dimensional with one row per entry of `rows` and at least one column.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"logits must be [{len(rows)} rows, vocab], got {shape}; pass one row per entry of rows")
    tokens = [UNUSABLE] * len(rows)
    greedy: list[int] = []
    drawn: list[int] = []
    for index, row in enumerate(rows):
        if row.changes_logits:
            tokens[index] = _sample_changed(logits[index], row, backend)
        else:
            (greedy if row.params.is_greedy else drawn).append(index)
    if greedy:
        for index, token in zip(greedy, backend.greedy(logits, greedy), strict=True):
            tokens[index] = token
    if drawn:
        draws = [_draw_of(rows[index]) for index in drawn]
        for index, token in zip(drawn, backend.draw(logits, drawn, draws), strict=True):
            tokens[index] = token
    return tokens


def _sample_changed(logits_row: torch.Tensor, row: SampleRow, backend: SamplerBackend) -> int:
    """The token of a row [vocab] that changes its logits; one row at a time, so that one float32 copy exists."""
    allowed = None
    if row.grammar is not None:
        allowed = row.grammar.allowed(row.output_token_ids, row.stop_token_ids)
        if allowed is None:  # below a candidate that breaks the grammar: the row's token is never committed
            return UNUSABLE
    x = logits_row.to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    if not math.isfinite(x.amax().item()):  # before a mask can hide it; amax passes NaN on
        return UNUSABLE
    _change_logits(x, row, allowed)
    tokens = backend.greedy(x[None], [0]) if row.params.is_greedy else backend.draw(x[None], [0], [_draw_of(row)])
    return tokens[0]


def _draw_of(row: SampleRow) -> Draw:
    p = row.params
    return Draw(p.temperature, p.top_k, p.top_p, p.min_p, row.seed, row.position)


def _change_logits(x: torch.Tensor, row: SampleRow, allowed: torch.Tensor | None) -> None:
    params = row.params
    if params.logit_bias is not None:
        penalties.add_logit_bias(x, params.logit_bias)
    if params.repetition_penalty != 1.0:
        penalties.penalize_repetition(x, row.prompt_token_ids, row.output_token_ids, params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        penalties.penalize_output(x, row.output_token_ids, params.presence_penalty, params.frequency_penalty)
    if allowed is not None:
        x.masked_fill_(~allowed, -math.inf)
    if row.masks_stop_tokens:
        penalties.mask_ids(x, row.stop_token_ids)
