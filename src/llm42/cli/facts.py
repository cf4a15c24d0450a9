"""What there is to say about one answer: its cost, what determinism cost, and what is needed to get it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm42 import RequestOutput


@dataclass(frozen=True, slots=True)
class Verification:
    """What verifying an answer took."""

    windows: int
    rollbacks: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """About one answer; None is what its server did not tell."""

    finish_reason: str | None
    num_tokens: int | None
    seconds: float
    """From the start of the work to the last token."""
    first_token_s: float
    """Time to the first token, waiting included."""
    seed: int | None
    fingerprint: str | None
    verification: Verification | None

    @classmethod
    def of(cls, last: RequestOutput, num_tokens: int, fingerprint: str) -> Facts:
        """The facts of an engine's stream: its last item, and the tokens of all items."""
        completion, metrics = last.outputs[0], last.metrics
        return cls(
            finish_reason=completion.finish_reason,
            num_tokens=num_tokens,
            seconds=metrics.total_time_s - metrics.queue_time_s,
            first_token_s=metrics.time_to_first_token_s or 0.0,
            seed=completion.seed,
            fingerprint=fingerprint,
            verification=Verification(metrics.num_windows, metrics.num_rollbacks, metrics.num_recomputed_tokens),
        )

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = []
        if self.num_tokens is not None:
            rate = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
            parts += [f"{self.num_tokens} tokens ({self.finish_reason})", f"{rate:.1f} tok/s"]
        parts.append(f"first token {self.first_token_s:.2f} s")
        if (cost := self.verification) is not None:
            parts += [f"{cost.windows} windows", f"{cost.rollbacks} rollbacks", f"{cost.recomputed_tokens} recomputed"]
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.fingerprint is not None:
            parts.append(f"fingerprint {self.fingerprint}")
        return " · ".join(parts)
