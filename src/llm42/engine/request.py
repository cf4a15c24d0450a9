"""One output sequence on its way through the engine, and the stop rules.

Invariant: everything a caller sees (tokens, text, log-probabilities, finish reason) is derived from committed tokens,
in order, one at a time; candidates touch the ledger only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from llm42.cache import BlockPool, PageTable
from llm42.engine.text import OutputText
from llm42.protocol import Ledger, WindowState
from llm42.sampling.grammar import Grammar
from llm42.sampling.logprobs import TokenLogprobs
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import SampleRow


class FinishReason(str, Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class RequestStats:
    """What happened to one sequence; times are `time.monotonic` seconds."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_windows: int = 0
    num_rollbacks: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a sequence is asked to be; validated before it comes here."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    priority: int = 0
    """Lower is served first. When, not what: it cannot change the bits of a deterministic request."""
    grammar: Grammar | None = None
    """What the output must follow; this sequence's own."""


class Request:
    """One sequence: the spec, its ledger, its pages, and what its caller may see."""

    def __init__(self, spec: SequenceSpec, pool: BlockPool, text: OutputText) -> None:
        self.spec = spec
        self.params = spec.params
        self.ledger = Ledger(spec.prompt_token_ids, deterministic=spec.params.deterministic)
        self.pages = PageTable(pool)
        self.text = text
        self.stats = RequestStats()
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        """For prompt positions 1, 2, ...; position 0 has none."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.last_step = 0
        """The engine step in which it last had a row."""
        self.drafting_since: int | None = None
        self.ready_since: int | None = None
        self._eos = frozenset() if spec.params.ignore_eos else spec.eos_token_ids
        self._stop_ids = frozenset(spec.params.stop_token_ids or ())

    @property
    def max_positions(self) -> int:
        """Positions the sequence can ever have."""
        return self.ledger.prompt_len + self.spec.max_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the output has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt still have to be scored."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.ledger.prompt_len - 1

    def window_state(self, step: int) -> WindowState:
        """What grouping may know, at an engine step."""
        return WindowState(
            num_candidates=self.ledger.num_candidates,
            is_finished=self._newest_candidate_ends(),
            steps_drafting=0 if self.drafting_since is None else step - self.drafting_since,
            steps_ready=0 if self.ready_since is None else step - self.ready_since,
        )

    def sample_row(self, position: int) -> SampleRow:
        """What the sampler needs for the row at a position: this row's own prefix, and nobody else's."""
        return SampleRow(
            params=self.params,
            seed=self.spec.seed,
            prompt_token_ids=self.spec.prompt_token_ids,
            output_token_ids=self.ledger.token_ids[self.ledger.prompt_len : position + 1],
            stop_token_ids=self._eos | self._stop_ids,
            grammar=self.spec.grammar,
        )

    def why_no_token(self) -> str:
        """Why the sampler had no token to follow the committed ones."""
        reason = self.sample_row(self.ledger.num_stable - 1).dead_end
        return reason or "the model's logits are not finite numbers (overflow?)"

    def accept(self, num_new: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Show the ``num_new`` newest committed tokens, up to the first that ends the output.

        Args:
            num_new: How many tokens the ledger has just committed.
            logprobs: One entry each, if the request asked for them; else empty.
        """
        if self.stats.first_token is None:
            self.stats.first_token = time.monotonic()
        first = self.ledger.num_committed - num_new
        for index in range(first, self.ledger.num_committed):
            if self.params.logprobs is not None:
                self.logprobs.append(logprobs[index - first])
            self._show(self.ledger.token_ids[self.ledger.prompt_len + index], index + 1)
            if self.is_finished:
                self.ledger.truncate(index + 1)
                return

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the output; no token follows."""
        self.finish_reason = reason
        self.error = error
        self.ledger.truncate(self.ledger.num_committed)
        self.text.finish()
        self.stats.finished = time.monotonic()

    def _show(self, token_id: int, num_outputs: int) -> None:
        may_stop = num_outputs > self.params.min_tokens
        if may_stop and token_id in self._eos | self._stop_ids:
            self.text.push_stop_token(token_id)
            self.stop_reason = None if token_id in self._eos else token_id
            self.finish(FinishReason.STOP)
            return
        stop = self.text.push(token_id, may_stop=may_stop)
        if stop is not None:
            self.stop_reason = stop
            self.finish(FinishReason.STOP)
        elif num_outputs >= self.spec.max_tokens:
            self.finish(FinishReason.LENGTH)

    def _newest_candidate_ends(self) -> bool:
        ledger = self.ledger
        if ledger.num_candidates == 0:
            return False
        num_outputs = ledger.num_tokens - ledger.prompt_len
        is_stop = num_outputs > self.params.min_tokens and ledger.token_ids[-1] in self._eos | self._stop_ids
        return is_stop or num_outputs >= self.spec.max_tokens
