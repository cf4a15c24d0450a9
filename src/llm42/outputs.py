"""What a caller gets back: outputs, log-probabilities and metrics, under the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token id at one position."""

    logprob: float
    """Natural logarithm, from the raw logits in fp32."""
    rank: int
    """1 for the most likely token; ties are ordered by token id."""
    decoded_token: str


LogprobDict = dict[int, Logprob]
"""The chosen token and the most likely ones at one position, by token id."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds and counts of one request; counts are summed over its n outputs."""

    queue_time_s: float = 0.0
    time_to_first_token_s: float | None = None
    total_time_s: float = 0.0
    num_windows: int = 0
    """Windows with candidates that were verified."""
    num_rollbacks: int = 0
    num_recomputed_tokens: int = 0
    """Candidates that were dropped, by rollbacks and by preemptions."""
    num_cached_tokens: int = 0
    """Prompt positions that came from the prefix cache."""
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a request (in a stream: what is new of it)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobDict] | None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while the output is unfinished."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS and everything else."""
    seed: int = 0
    """The effective seed: sent again with ``n=1`` it gives this output again."""


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs (in a stream: what is new since the last item)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    """Why the request failed, where an output's finish reason is `error`."""
