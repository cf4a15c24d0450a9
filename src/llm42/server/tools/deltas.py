"""What a parser says about an answer, in the shape of OpenAI's streaming deltas, and how deltas add up to a message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

CallIds = Callable[[int], str]
"""The id of the call with this index in its answer."""

_PARALLEL_LIMIT: Final = 1


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The beginning of a call (`id` and `name`, no arguments), or more of the JSON text of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ToolCallDelta


@dataclass
class ToolCall:
    """A whole call. `arguments` is the text of a JSON object, unless the model broke off or wrote something else."""

    id: str
    name: str
    arguments: str


def collect(deltas: Iterable[Delta]) -> tuple[str | None, list[ToolCall]]:
    """The message that `deltas` add up to: its content, None where there is none beside calls, and its calls."""
    content = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[delta.index].arguments += delta.arguments
    return (content or None if calls else content), calls


def call_ids(prompt_token_ids: Sequence[int], seed: int, *, short: bool = False) -> CallIds:
    """Ids that depend on the prompt and on the choice's effective seed only: equal requests get equal ids.

    They differ between the turns of a conversation, because its prompt grows. `short` gives the nine alphanumeric
    characters that Mistral's templates demand.
    """
    prompt = ",".join(map(str, prompt_token_ids))

    def id_of(index: int) -> str:
        digest = hashlib.sha256(f"{prompt};{seed};{index}".encode()).hexdigest()
        return digest[:9] if short else f"call_{digest[:24]}"

    return id_of


class AnswerWriter:
    """Collects deltas. White space between calls, or between a call and the ends of the answer, is not content."""

    def __init__(self, id_of: CallIds, *, parallel: bool) -> None:
        self._id_of = id_of
        self._max_calls = None if parallel else _PARALLEL_LIMIT
        self._deltas: list[Delta] = []
        self._space = ""
        self._last_char = ""
        self._num_begun = 0

    @property
    def num_calls(self) -> int:
        """The number of calls in the deltas."""
        return self._num_begun if self._max_calls is None else min(self._num_begun, self._max_calls)

    @property
    def last_char(self) -> str:
        """The last character of the content; empty while there is only white space since the last call, if any."""
        return self._last_char

    def content(self, text: str) -> None:
        """Add text, as it is."""
        if not self._last_char and (not text or text.isspace()):
            self._space += text
            return
        if text:
            self._last_char = text[-1]
            self._append_content(self._space + text)
            self._space = ""

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self._space = self._last_char = ""
        self._num_begun += 1
        if self._is_wanted:
            index = self._num_begun - 1
            self._deltas.append(ToolCallDelta(index, self._id_of(index), name, ""))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call begun last."""
        if not text or not self._is_wanted:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ToolCallDelta) and last.id is None:
            self._deltas[-1] = ToolCallDelta(last.index, None, None, last.arguments + text)
        else:
            self._deltas.append(ToolCallDelta(self._num_begun - 1, None, None, text))

    def finish(self) -> None:
        """No more comes: white space is content after all, if there is nothing else."""
        if self._space and self._num_begun == 0:
            self._append_content(self._space)
        self._space = ""

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_begun <= self._max_calls

    def _append_content(self, text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ContentDelta):
            self._deltas[-1] = ContentDelta(last.text + text)
        else:
            self._deltas.append(ContentDelta(text))
