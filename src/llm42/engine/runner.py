"""The runner: executes one planned pass and samples the rows that need a token.

Invariant: a canonical pass always has the contract's row counts, for the layers and for the lm_head; what the pass
carries besides never changes a row's logits, and sampling is row-local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from llm42.config import EngineConfig
from llm42.engine.request import Request
from llm42.engine.scheduler import Pass, Segment
from llm42.kernels import KVPool, RowBatch, RowSegment
from llm42.model.decoder import Decoder
from llm42.sampling.logprobs import TokenLogprobs, token_logprobs
from llm42.sampling.sampler import UNUSABLE, sample


@dataclass(slots=True)
class SegmentResult:
    """What a pass gave for one segment."""

    generated: list[int] = field(default_factory=list)
    """One token for each row whose next token is not committed yet; `UNUSABLE` where the logits were not."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For the generated tokens up to the first that contradicts a candidate, if the request wants them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    """Why this segment's rows could not be scored; no other segment is concerned."""


@dataclass(frozen=True, slots=True)
class _LogitRow:
    """A row of the pass that needs logits."""

    row: int
    segment: int
    position: int
    is_sampled: bool


class Runner:
    """Runs passes of a decoder over a KV pool."""

    def __init__(self, config: EngineConfig, decoder: Decoder, kv: KVPool, block_size: int) -> None:
        self._config = config
        self._decoder = decoder
        self._kv = kv
        self._block_size = block_size

    @torch.inference_mode()
    def execute(self, work: Pass) -> list[SegmentResult]:
        """Run the pass; one result per segment, in order."""
        segments: list[RowSegment] = []
        logit_rows: list[_LogitRow] = []
        token_ids: list[int] = []
        for index, segment in enumerate(work.segments):
            ledger, rows = segment.request.ledger, segment.rows
            row = len(token_ids)
            segments.append(RowSegment(row, rows.start, len(rows), segment.request.pages.blocks))
            token_ids.extend(ledger.token_ids[rows.start : rows.stop])
            logit_rows.extend(_rows_with_logits(segment, index, row))
        num_rows = self._config.canonical_rows if work.is_canonical else len(token_ids)
        token_ids.extend([0] * (num_rows - len(token_ids)))
        batch = RowBatch(segments, num_rows, self._block_size)
        device = self._decoder.device
        hidden = self._decoder.forward(torch.tensor(token_ids, device=device), batch, self._kv)
        results = [SegmentResult() for _ in work.segments]
        for group, logits in self._logits(hidden, logit_rows, is_canonical=work.is_canonical):
            _sample_group(group, logits, work.segments, results)
        return results

    def _logits(
        self, hidden: torch.Tensor, rows: Sequence[_LogitRow], *, is_canonical: bool
    ) -> Iterator[tuple[Sequence[_LogitRow], torch.Tensor]]:
        """Logits of the rows; in a canonical pass in groups padded to the lm_head's own row count."""
        size = self._config.canonical_logit_rows if is_canonical else max(1, len(rows))
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            selected = hidden[torch.tensor([row.row for row in group], device=hidden.device)]
            if is_canonical and len(group) < size:
                selected = torch.cat((selected, selected.new_zeros(size - len(group), selected.shape[1])))
            yield group, self._decoder.logits(selected)[: len(group)]


def _rows_with_logits(segment: Segment, index: int, row: int) -> Iterator[_LogitRow]:
    """Rows whose next token must be sampled, and prompt rows whose next token must be scored."""
    request, rows = segment.request, segment.rows
    first_sampled = rows.start if segment.is_draft else request.ledger.first_sampled(rows)
    if request.wants_prompt_logprobs:
        scored = len(request.prompt_logprobs)
        for position in range(max(rows.start, scored), min(rows.stop, request.ledger.prompt_len - 1)):
            yield _LogitRow(row + position - rows.start, index, position, is_sampled=False)
    for position in range(first_sampled, rows.stop):
        yield _LogitRow(row + position - rows.start, index, position, is_sampled=True)


def _sample_group(
    group: Sequence[_LogitRow], logits: torch.Tensor, segments: Sequence[Segment], results: Sequence[SegmentResult]
) -> None:
    sampled = [index for index, row in enumerate(group) if row.is_sampled]
    rows = [segments[group[index].segment].request.sample_row(group[index].position) for index in sampled]
    tokens = sample(logits if len(sampled) == len(group) else logits[sampled], rows)
    for token, index in zip(tokens, sampled, strict=True):
        row = group[index]
        segment, result = segments[row.segment], results[row.segment]
        if token != UNUSABLE and _wants_logprobs(segment, row.position, result):
            result.logprobs.append(token_logprobs(logits[index], token, segment.request.params.logprobs or 0))
        result.generated.append(token)
    for index, row in enumerate(group):
        if not row.is_sampled:
            request = segments[row.segment].request
            following = request.ledger.token_ids[row.position + 1]
            try:
                score = token_logprobs(logits[index], following, request.params.prompt_logprobs or 0)
            except ValueError as error:
                results[row.segment].error = f"prompt_logprobs at position {row.position + 1}: {error}"
            else:
                results[row.segment].prompt_logprobs.append(score)


def _wants_logprobs(segment: Segment, position: int, result: SegmentResult) -> bool:
    """Only tokens that are going to be committed need log-probabilities."""
    request = segment.request
    if request.params.logprobs is None or (segment.is_draft and request.ledger.deterministic):
        return False
    return UNUSABLE not in result.generated and _agrees(request, position, result.generated)


def _agrees(request: Request, position: int, generated: Sequence[int]) -> bool:
    """Whether all tokens generated so far in this window equal the candidates they check."""
    count = len(generated)
    return generated == request.ledger.token_ids[position + 1 - count : position + 1] if count else True
