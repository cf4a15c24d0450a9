"""The runner: executes one planned pass and samples the rows that need a token.

Invariant: a canonical pass always has the contract's row counts, for the layers and for the lm_head; what the pass
carries besides never changes a row's logits, and sampling is row-local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from llm42.engine.request import Request
from llm42.engine.scheduler import Pass, Segment
from llm42.kernels import KVPool, RowBatch, RowSegment
from llm42.model.decoder import Decoder
from llm42.protocol import ShapeClass
from llm42.sampling.backend import SamplerBackend
from llm42.sampling.logprobs import TokenLogprobs
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
    violation: str | None = None
    """What a spot check found to differ."""
    num_rows: int = 0
    """Rows of the pass."""


@dataclass(frozen=True, slots=True)
class _LogitRow:
    """A row of the pass that needs logits."""

    row: int
    segment: int
    position: int
    is_sampled: bool


class Runner:
    """Runs passes of a decoder over a KV pool."""

    def __init__(self, decoder: Decoder, kv: KVPool, block_size: int, logit_rows: ShapeClass) -> None:
        self._logit_rows = logit_rows
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
        token_ids.extend([0] * (work.num_rows - len(token_ids)))
        batch = RowBatch(segments, work.num_rows, self._block_size)
        checks = [
            _SpotCheck(segment, batch, index, self._kv)
            for index, segment in enumerate(work.segments)
            if segment.num_checked
        ]
        device = self._decoder.device
        hidden = self._decoder.forward(torch.tensor(token_ids, device=device), batch, self._kv)
        results = [SegmentResult(num_rows=work.num_rows) for _ in work.segments]
        for group, logits in self._logits(hidden, logit_rows, is_canonical=work.is_canonical):
            _sample_group(group, logits, work.segments, results, self._decoder.kernels.sampler)
        for check in checks:
            check.conclude(results)
        if any(result.violation is not None for result in results):
            # The scheduler does the same for the layers: from now on, logits too come from one row count.
            self._logit_rows = ShapeClass([self._logit_rows.largest])
        return results

    def _logits(
        self, hidden: torch.Tensor, rows: Sequence[_LogitRow], *, is_canonical: bool
    ) -> Iterator[tuple[Sequence[_LogitRow], torch.Tensor]]:
        """Logits of the rows; in a canonical pass in groups padded to the lm_head's own row count."""
        size = self._logit_rows.largest if is_canonical else max(1, len(rows))
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            selected = hidden[torch.tensor([row.row for row in group], device=hidden.device)]
            padding = self._logit_rows.pad(len(group)) - len(group) if is_canonical else 0
            if padding:
                selected = torch.cat((selected, selected.new_zeros(padding, selected.shape[1])))
            yield group, self._decoder.logits(selected)[: len(group)]


class _SpotCheck:
    """Rows that were committed directly and are run again, in a pass of another shape: what they gave must come again.

    Made before the pass, which overwrites their KV.
    """

    def __init__(self, segment: Segment, batch: RowBatch, index: int, kv: KVPool) -> None:
        self._segment = segment
        self._index = index
        self._kv = kv
        first = batch.segments[index].row
        self._slots = torch.from_numpy(batch.slots[first : first + segment.num_checked])
        self._before = self._read()

    def conclude(self, results: Sequence[SegmentResult]) -> None:
        """Compare, and leave the segment's result as if its first rows had not been there."""
        result, count = results[self._index], self._segment.num_checked
        start = self._segment.rows.start
        again = result.generated[:count]
        del result.generated[:count]
        if again != self._segment.request.ledger.token_ids[start + 1 : start + 1 + count]:
            result.violation = f"other tokens at positions {start + 1}..{start + count}"
        elif not torch.equal(self._read(), self._before):
            result.violation = f"other KV at positions {start}..{start + count - 1}"

    def _read(self) -> torch.Tensor:
        """The KV of the rows, as integers: bits are compared, and NaN equals itself."""
        return self._kv.read(self._slots).contiguous().view(torch.uint8)


def _rows_with_logits(segment: Segment, index: int, row: int) -> Iterator[_LogitRow]:
    """Rows whose next token must be sampled, and prompt rows whose next token must be scored."""
    request, rows = segment.request, segment.rows
    # The rows of a spot check are sampled once more.
    is_all_sampled = segment.is_draft or segment.num_checked
    first_sampled = rows.start if is_all_sampled else request.ledger.first_sampled(rows)
    if request.wants_prompt_logprobs:
        scored = len(request.prompt_logprobs)
        for position in range(max(rows.start, scored), min(rows.stop, request.ledger.prompt_len - 1)):
            yield _LogitRow(row + position - rows.start, index, position, is_sampled=False)
    for position in range(first_sampled, rows.stop):
        yield _LogitRow(row + position - rows.start, index, position, is_sampled=True)


def _sample_group(
    group: Sequence[_LogitRow],
    logits: torch.Tensor,
    segments: Sequence[Segment],
    results: Sequence[SegmentResult],
    sampler: SamplerBackend,
) -> None:
    """Choose tokens for the rows that need one, then score those and the prompt rows, all in two calls."""
    sampled = [index for index, row in enumerate(group) if row.is_sampled]
    rows = [segments[group[index].segment].request.sample_row(group[index].position) for index in sampled]
    tokens = sample(logits if len(sampled) == len(group) else logits[sampled], rows, sampler)
    scores: list[tuple[int, int, int]] = []
    for token, index in zip(tokens, sampled, strict=True):
        row = group[index]
        segment, result = segments[row.segment], results[row.segment]
        if token != UNUSABLE and _wants_logprobs(segment, row.position, result):
            scores.append((index, token, segment.request.params.logprobs or 0))
        result.generated.append(token)
    for index, row in enumerate(group):
        if not row.is_sampled:
            request = segments[row.segment].request
            scores.append((index, request.ledger.token_ids[row.position + 1], request.params.prompt_logprobs or 0))
    if not scores:
        return
    indices, token_ids, counts = zip(*scores, strict=True)
    for index, score in zip(indices, sampler.token_logprobs(logits, indices, token_ids, counts), strict=True):
        row = group[index]
        result = results[row.segment]
        if score is None:
            result.error = f"logprobs at position {row.position + 1}: the logits have no finite maximum"
        elif row.is_sampled:
            result.logprobs.append(score)
        else:
            result.prompt_logprobs.append(score)


def _wants_logprobs(segment: Segment, position: int, result: SegmentResult) -> bool:
    """Only tokens that are going to be committed need log-probabilities."""
    request = segment.request
    if request.params.logprobs is None or (segment.is_draft and request.ledger.deterministic):
        return False
    if position < segment.rows.start + segment.num_checked:
        return False
    generated = result.generated[segment.num_checked :]
    return UNUSABLE not in generated and _agrees(request, position, generated)


def _agrees(request: Request, position: int, generated: Sequence[int]) -> bool:
    """Whether all tokens generated so far in this window equal the candidates they check."""
    count = len(generated)
    return generated == request.ledger.token_ids[position + 1 - count : position + 1] if count else True
