"""Log-probabilities in the three shapes of the APIs: chat, completions, and vLLM's prompt_logprobs.

The numbers are the engine's, printed so that they read back as the same bits; JSON has no infinity, so the
log-probability of an impossible token is -9999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llm42.model.tokenizer import Tokenizer, TokenStream
from llm42.outputs import Logprob, LogprobDict

_IMPOSSIBLE = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[LogprobDict], num_top: int, *, as_ids: bool
) -> dict[str, Any]:
    """The `logprobs` of a chat choice, for the tokens of a delta or of a whole message."""

    def described(token_id: int, value: Logprob) -> dict[str, Any]:
        return {
            "token": _name(token_id, value.decoded_token, as_ids=as_ids),
            "logprob": _number(value.logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        described(token_id, entry[token_id])
        | {"top_logprobs": [described(other, value) for other, value in _best(entry)[:num_top]]}
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[LogprobDict | None] | None) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` of vLLM: one object a position, by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _number(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token_id, value in entry.items()
        }
        for entry in entries
    ]


@dataclass
class CompletionLogprobs:
    """The `logprobs` of completions: parallel lists, with offsets into the text of the whole output."""

    as_ids: bool
    text: TokenStream
    """Decodes the tokens as they are added: those before a token say where in the text it begins."""
    offset: int = 0
    """Characters of the tokens before."""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, text: str, entry: LogprobDict | None) -> None:
        """Append a token; a prompt's first one has no entry."""
        self.tokens.append(_name(token_id, text, as_ids=self.as_ids))
        self.token_logprobs.append(None if entry is None else _number(entry[token_id].logprob))
        self.top_logprobs.append(
            None
            if entry is None
            else {
                # Two ids may have the same text: the better one is kept.
                _name(other, value.decoded_token, as_ids=self.as_ids): _number(value.logprob)
                for other, value in reversed(_best(entry))
            }
        )
        self.text_offset.append(self.offset)
        self.offset += len(self.text.step(token_id))

    def take(self) -> dict[str, Any]:
        """The lists so far; the next ones begin empty."""
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken


def _best(entry: LogprobDict) -> list[tuple[int, Logprob]]:
    """The tokens of a position, best first."""
    return sorted(entry.items(), key=lambda item: item[1].rank)


def _name(token_id: int, text: str, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
