"""The text of one output: incremental decoding, stop strings, and what may be shown before the end.

Invariant: depends on the sequence of committed tokens only, never on how many were committed at a time.
"""

from __future__ import annotations

from llm42.model.tokenizer import Tokenizer
from llm42.sampling.params import SamplingParams


class OutputText:
    """Decodes committed tokens one by one and finds the first stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = tokenizer.new_stream(skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        # Text that could be the beginning of a stop string is not shown until it is known not to be.
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._search_from = 0
        self._is_closed = False

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Append a token; return the stop string that its text completes, if any.

        Args:
            token_id: The next committed token.
            may_stop: Whether a stop string counts already (it does not before ``min_tokens``).
        """
        self._text += self._stream.step(token_id)
        if not may_stop:
            self._search_from = len(self._text)
            return None
        found = [
            (start, stop)
            for stop in self._stops
            if (start := self._text.find(stop, max(0, self._search_from - len(stop) + 1))) >= 0
        ]
        if not found:
            self._search_from = len(self._text)
            return None
        start, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        self._text = self._text[: start + (len(stop) if self._keep_stop else 0)]
        self._is_closed = True
        return stop

    def push_stop_token(self, token_id: int) -> None:
        """Take the token that ends the output: shown only if stop strings are."""
        if self._keep_stop:
            self._text += self._stream.step(token_id)

    def finish(self) -> None:
        """No token follows: complete the text with what was waiting for one."""
        if not self._is_closed:
            self._text += self._stream.flush()
            self._is_closed = True

    @property
    def visible(self) -> str:
        """The text that is certain: a prefix of the final text."""
        if self._is_closed or self._held_back == 0:
            return self._text
        return self._text[: -self._held_back]
