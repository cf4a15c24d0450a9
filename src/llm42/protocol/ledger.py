"""The ledger of one request: prompt, committed outputs and candidates as one list, and how far KV reaches.

Invariants:
- ``token_ids`` is prompt + committed + candidates, in this order; only the list and one count say where each ends.
- The watermark never passes ``prompt + committed - 1``: the last committed token is always the next input, and KV of a
  candidate is never canonical. Both limits are applied when the number is read, so dropping candidates *is* the whole
  rollback; nothing else has to be restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm42.protocol.verdict import Verdict, judge


class Ledger:
    """Committed tokens, candidates and KV progress of one request.

    Args:
        prompt_token_ids: The prompt, at least one token.
        deterministic: Whether tokens of fast passes are candidates (True) or final (False).
    """

    __slots__ = ("_canonical", "_computed", "deterministic", "num_committed", "prompt_len", "token_ids")

    def __init__(self, prompt_token_ids: Sequence[int], *, deterministic: bool) -> None:
        if not prompt_token_ids:
            raise ValueError("a ledger needs a prompt of at least one token")
        self.token_ids: list[int] = list(prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.deterministic = deterministic
        self.num_committed = 0
        self._canonical = 0
        self._computed = 0

    @property
    def num_tokens(self) -> int:
        """Prompt, committed and candidate tokens together."""
        return len(self.token_ids)

    @property
    def num_stable(self) -> int:
        """Prompt and committed tokens: what no rollback can take away."""
        return self.prompt_len + self.num_committed

    @property
    def num_candidates(self) -> int:
        """Outstanding candidates."""
        return len(self.token_ids) - self.num_stable

    @property
    def committed(self) -> list[int]:
        """The committed output tokens."""
        return self.token_ids[self.prompt_len : self.num_stable]

    @property
    def candidates(self) -> list[int]:
        """The outstanding candidates, oldest first."""
        return self.token_ids[self.num_stable :]

    @property
    def watermark(self) -> int:
        """Number of leading positions whose KV a canonical pass wrote."""
        return min(self._canonical, self.num_stable - 1)

    @property
    def num_computed(self) -> int:
        """Number of leading positions that have KV of any kind; the last token never has."""
        return min(self._computed, self.num_tokens - 1)

    @property
    def is_prefilling(self) -> bool:
        """Whether canonical passes must still build KV (a new prompt, or after preemption) before decoding."""
        return self.num_committed == 0 or self.num_computed < self.num_stable - 1

    def next_rows(self, limit: int) -> range:
        """Positions of the next canonical window: from the watermark on, at most ``limit`` rows."""
        return range(self.watermark, min(self.watermark + limit, self.num_tokens))

    def first_sampled(self, rows: range) -> int:
        """The first position in ``rows`` whose next token is not committed yet; ``rows.stop`` if there is none."""
        return min(max(self.num_stable - 1, rows.start), rows.stop)

    def restore(self, num_positions: int) -> None:
        """Start from canonical KV that the prefix cache holds for the first ``num_positions`` positions."""
        self._canonical = self._computed = num_positions

    def preempt(self) -> int:
        """Forget candidates and all KV; return how many candidates were dropped."""
        dropped = self.num_candidates
        del self.token_ids[self.num_stable :]
        self._canonical = self._computed = 0
        return dropped

    def draft(self, token_id: int) -> None:
        """Take the token of a decode row outside canonical KV: a candidate, or final for an ordinary request.

        Raises:
            ValueError: The request still needs canonical passes first.
        """
        if self.is_prefilling:
            raise ValueError("a request cannot draft before its prompt is computed")
        self._computed = self.num_tokens
        self.token_ids.append(token_id)
        if not self.deterministic:
            self.num_committed += 1

    def advance(self, rows: range, generated: Sequence[int]) -> Verdict | None:
        """Take the result of a canonical pass over ``rows``.

        Args:
            rows: What `next_rows` gave (or a shorter range from the same start).
            generated: The verifier's tokens for the rows from `first_sampled` on.

        Returns:
            The verdict, already applied; None if no row was sampled (a chunk of known tokens).

        Raises:
            ValueError: The rows do not start at the watermark, or the counts disagree.
        """
        if rows.start != self.watermark or len(rows) == 0 or rows.stop > self.num_tokens:
            raise ValueError(f"rows {rows} do not continue the watermark {self.watermark} of {self.num_tokens} tokens")
        if len(generated) != rows.stop - self.first_sampled(rows):
            raise ValueError(f"{len(generated)} generated tokens for rows {rows}")
        self._canonical = rows.stop
        self._computed = max(self._computed, rows.stop)
        if not generated:
            return None
        verdict = judge(self.candidates, generated)
        if verdict.is_rollback or verdict.num_matched == self.num_candidates:
            del self.token_ids[self.num_stable :]
            self.token_ids.extend(verdict.committed)
        self.num_committed += len(verdict.committed)
        return verdict

    def truncate(self, num_committed: int) -> None:
        """Keep the first ``num_committed`` committed tokens and no candidate: a stop rule was met there."""
        if not 0 <= num_committed <= self.num_committed:
            raise ValueError(f"cannot keep {num_committed} of {self.num_committed} committed tokens")
        self.num_committed = num_committed
        del self.token_ids[self.num_stable :]
