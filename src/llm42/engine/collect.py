"""From sequences to outputs: whole results for offline use, and deltas for streams."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llm42.engine.engine import RequestGroup
from llm42.engine.request import FinishReason, Request
from llm42.model.tokenizer import Tokenizer
from llm42.outputs import CompletionOutput, Logprob, LogprobDict, RequestMetrics, RequestOutput
from llm42.sampling.logprobs import TokenLogprobs


class OutputCollector:
    """Builds the outputs of one request group, each token exactly once.

    `take` gives what is new since the last call, so a first call at the end gives the whole.
    """

    def __init__(self, group: RequestGroup, tokenizer: Tokenizer) -> None:
        self.group = group
        self._tokenizer = tokenizer
        # One list for all deltas: a long prompt in each one that a slow reader has not read yet would be much memory.
        self._prompt_token_ids = list(group.sequences[0].spec.prompt_token_ids)
        self._taken = [(0, 0, False) for _ in group.sequences]
        self._cumulative = [0.0 for _ in group.sequences]
        self._prompt_logprobs_taken = False

    @property
    def is_finished(self) -> bool:
        """Whether all sequences of the group have ended."""
        return all(sequence.is_finished for sequence in self.group.sequences)

    def take(self) -> RequestOutput:
        """What is new: tokens, log-probabilities, text, and finish reasons."""
        outputs = [
            output
            for index, sequence in enumerate(self.group.sequences)
            if (output := self._take_sequence(index, sequence)) is not None
        ]
        first = self.group.sequences[0]
        return RequestOutput(
            request_id=self.group.request_id,
            prompt=self.group.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(first),
            outputs=outputs,
            finished=self.is_finished,
            metrics=_metrics(self.group.sequences),
            error=next((sequence.error for sequence in self.group.sequences if sequence.error), None),
        )

    def _take_sequence(self, index: int, sequence: Request) -> CompletionOutput | None:
        num_tokens, num_characters, was_finished = self._taken[index]
        text = sequence.text.visible
        if was_finished or (
            sequence.ledger.num_committed == num_tokens and len(text) == num_characters and not sequence.is_finished
        ):
            return None
        self._taken[index] = (sequence.ledger.num_committed, len(text), sequence.is_finished)
        entries = sequence.logprobs[num_tokens:]
        wants_logprobs = sequence.params.logprobs is not None
        for entry in entries:  # one by one, so that the sum does not depend on how the stream was cut
            self._cumulative[index] += entry.logprob
        return CompletionOutput(
            index=index,
            text=text[num_characters:],
            token_ids=sequence.ledger.committed[num_tokens:],
            cumulative_logprob=self._cumulative[index] if wants_logprobs else None,
            logprobs=[self._logprob_dict(entry) for entry in entries] if wants_logprobs else None,
            finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
            stop_reason=sequence.stop_reason,
            seed=sequence.spec.seed,
        )

    def _take_prompt_logprobs(self, sequence: Request) -> list[LogprobDict | None] | None:
        if sequence.params.prompt_logprobs is None or self._prompt_logprobs_taken or sequence.wants_prompt_logprobs:
            return None
        self._prompt_logprobs_taken = True
        return [None, *(self._logprob_dict(entry) for entry in sequence.prompt_logprobs)]

    def _logprob_dict(self, entry: TokenLogprobs) -> LogprobDict:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
        ranked = {entry.token_id: (entry.logprob, entry.rank)} | ranked
        return {
            token_id: Logprob(logprob, rank, self._tokenizer.token_text(token_id))
            for token_id, (logprob, rank) in ranked.items()
        }


def _metrics(sequences: Sequence[Request]) -> RequestMetrics:
    stats = [sequence.stats for sequence in sequences]
    arrived = min(stat.arrived for stat in stats)
    now = time.monotonic()
    first_tokens = [stat.first_token for stat in stats if stat.first_token is not None]
    return RequestMetrics(
        queue_time_s=min(stat.scheduled or stat.finished or now for stat in stats) - arrived,
        time_to_first_token_s=min(first_tokens) - arrived if first_tokens else None,
        total_time_s=max(stat.finished or now for stat in stats) - arrived,
        num_windows=sum(stat.num_windows for stat in stats),
        num_rollbacks=sum(stat.num_rollbacks for stat in stats),
        num_recomputed_tokens=sum(stat.num_recomputed_tokens for stat in stats),
        num_cached_tokens=sum(stat.num_cached_tokens for stat in stats),
        num_preemptions=sum(stat.num_preemptions for stat in stats),
    )


def failure(group: RequestGroup) -> str | None:
    """Why the group failed, or None."""
    for sequence in group.sequences:
        if sequence.finish_reason is FinishReason.ERROR:
            return f"{group.request_id}: {sequence.error}"
    return None
