"""Tool calls in the text of an answer, found while it arrives.

One parser reads one answer. Invariant: the deltas of a text add up to the same message however the text is cut, and
every character of it ends up in a call, or in the content, or is white space, a marker or punctuation around calls.

What is not a call as the family writes it (broken JSON, unknown structure, cut off before its arguments begin) is
content, exactly as the model wrote it, markers included. Once the arguments of a call have begun they have been
streamed: a call that breaks or ends then keeps what it has, and the rest of its text up to the next marker; that the
text is no JSON object tells the client, as with OpenAI. A name that is not among the tools is passed on.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from llm42.server.tools.call_reader import CallReader
from llm42.server.tools.deltas import AnswerWriter, CallIds, Delta
from llm42.server.tools.json_scanner import JSON_SPACE, JsonScanner

_BETWEEN_CALLS: Final = frozenset(JSON_SPACE + "[],;}")  # with a bracket too many, as small models write it

State = Literal["content", "between", "call", "arguments", "tail"]


class ToolParser:
    """The machine that all families share: text, then after a marker calls as JSON objects, alone or in a list.

    Args:
        id_of: The id of the call with a given index.
        parallel: Whether an answer may have more than one call; if not, later ones are dropped.
    """

    open_markers: ClassVar[tuple[str, ...]] = ()
    close_marker: ClassVar[str | None] = None

    def __init__(self, id_of: CallIds, *, parallel: bool = True) -> None:
        self._writer = AnswerWriter(id_of, parallel=parallel)
        self._state: State = "content"
        self._pending = ""  # text that is not understood yet
        self._raw = ""  # text that is understood, and content if no call comes of it
        self._marker = ""  # the last open marker
        self._has_calls = False  # since then
        self._is_list = False
        self._reader = CallReader()
        self._scanner = JsonScanner()
        self._is_begun = False  # the call being read

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._writer.num_calls

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of the answer; what is certain now."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """The answer is over: what was held back."""
        if self._state == "tail":
            self._writer.arguments(self._pending)
        elif self._state != "between" or not self._has_calls or not (self.close_marker or "").startswith(self._pending):
            self._writer.content(self._raw + self._pending)
        self._raw = self._pending = ""
        self._writer.finish()
        return self._writer.take()

    def _advance(self) -> bool:
        """Take some of the pending text; False when that needs more text to decide."""
        if self._state == "content":
            return self._read_content()
        if self._state == "between":
            return self._read_between()
        if self._state == "call":
            return self._read_call()
        if self._state == "arguments":
            return self._read_arguments()
        return self._read_tail()

    def _read_content(self) -> bool:
        start, marker = self._find_call()
        if marker is None:
            self._writer.content(self._take(_certain_length(self._pending, self.open_markers)))
            return False
        self._writer.content(self._take(start))
        self._raw = self._take(len(marker))
        self._marker = marker
        self._has_calls = self._is_list = False
        self._state = "between"
        return True

    def _find_call(self) -> tuple[int, str | None]:
        """Where calls begin in the pending text, and the marker there; None when there is none."""
        return _find_first(self._pending, self.open_markers)

    def _read_between(self) -> bool:
        """Read what stands before, between and after the calls of one marker."""
        closes = self.close_marker is not None and self._pending.startswith(self.close_marker)
        if closes or self._pending.startswith(self.open_markers):
            if closes:
                self._raw += self._take(len(self.close_marker or ""))
            self._leave(self._raw if not self._has_calls else "")
            return True
        if _certain_length(self._pending, self._markers) == 0:
            return False
        char = self._pending[0]
        if char == "{":
            self._reader = self._new_reader()
            self._is_begun = False
            self._state = "call"
        elif char not in _BETWEEN_CALLS:
            return self._read_other()
        elif char == "]" and self._is_list:
            self._end_list()
        else:
            self._is_list = self._is_list or (char == "[" and not self._has_calls)
            self._raw += self._take(1)
        return True

    def _end_list(self) -> None:
        self._raw += self._take(1)
        if self.close_marker is None:
            self._leave(self._raw if not self._has_calls else "")
        elif self._has_calls:
            self._raw = ""
        self._is_list = False

    def _read_other(self) -> bool:
        """Read on where no JSON object begins."""
        self._leave(self._raw)
        return True

    def _new_reader(self) -> CallReader:
        return CallReader()

    def _read_call(self) -> bool:
        reader = self._reader
        text = self._take(reader.feed(self._pending))
        if not self._is_begun:
            self._raw += text
            if reader.name and reader.has_arguments:
                self._begin(reader.name)
        if self._is_begun:
            self._writer.arguments(reader.take_arguments())
        if reader.status == "reading":
            return False
        if reader.status == "complete" or (self._is_begun and reader.has_all_arguments):
            self._state = "between"
        elif self._is_begun:
            self._state = "tail"
        else:
            self._leave(self._raw)
        return True

    def _read_arguments(self) -> bool:
        """Read the arguments of a call whose name stands before them."""
        end, piece = self._scanner.scan(self._pending, 0)
        self._take(end)
        self._writer.arguments(piece)
        if self._scanner.is_complete:
            self._leave("")
        elif self._scanner.is_broken:
            self._state = "tail"
        return self._state != "arguments"

    def _read_tail(self) -> bool:
        """Give a broken call the rest of its text."""
        start, marker = _find_first(self._pending, self._markers)
        if marker is None:
            start = _certain_length(self._pending, self._markers)
        else:
            self._state = "between"
        self._writer.arguments(self._take(start))
        return marker is not None

    def _begin(self, name: str) -> None:
        self._writer.begin_call(name)
        self._raw = ""
        self._has_calls = self._is_begun = True

    def _begin_arguments(self, name: str) -> None:
        self._begin(name)
        self._scanner = JsonScanner()
        self._state = "arguments"

    def _leave(self, content: str) -> None:
        """Go back to reading content, `content` first."""
        self._writer.content(content)
        self._raw = ""
        self._state = "content"

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    @property
    def _markers(self) -> tuple[str, ...]:
        return self.open_markers if self.close_marker is None else (*self.open_markers, self.close_marker)


def _find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    found = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(found) if found else (len(text), None)


def _certain_length(text: str, markers: tuple[str, ...]) -> int:
    """How much of `text`, which has no marker, is before anything that may become one."""
    longest = max(map(len, markers), default=1)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
