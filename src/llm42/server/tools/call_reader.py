"""One call as a JSON object, `{"name": ..., "arguments": {...}}`, read while it arrives.

Keys come in any order; `parameters` is another word for `arguments`; other keys are read over. Invariant: what
`take_arguments` has given so far is a prefix of the text of one JSON object, and all of it once `has_all_arguments`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final, Literal

from llm42.server.tools.json_scanner import JSON_SPACE, JsonScanner, is_json_object

ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})

CallStatus = Literal["reading", "complete", "broken"]


class CallReader:
    """Reads one call object; `feed` per piece of text.

    Args:
        known_keys: Any other key makes the object something that is not a call. None allows all.
        needs_arguments: Whether an object without arguments is not a call; else it is one with the arguments ``{}``.
    """

    def __init__(self, *, known_keys: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        self._known_keys = known_keys
        self._needs_arguments = needs_arguments
        self._expected = "{"
        self._key: str | None = None
        self._scanner: JsonScanner | None = None
        self._scanned = ""
        self._is_streaming = False
        self._arguments = ""
        self.status: CallStatus = "reading"
        self.name: str | None = None
        self.has_arguments = False
        """Whether arguments have begun, so that this is a call if there is a name."""
        self.has_all_arguments = False

    def take_arguments(self) -> str:
        """The text of the arguments since the last time."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def feed(self, text: str) -> int:
        """Read on; the number of characters that belong to the object."""
        position = 0
        while position < len(text) and self.status == "reading":
            if self._scanner is not None:
                position = self._scan(self._scanner, text, position)
            elif text[position] in JSON_SPACE:
                position += 1
            elif self._expected and text[position] not in self._expected:
                self.status = "broken"
            else:
                position += self._step(text[position])
        return position

    def _step(self, char: str) -> int:
        """Take the first character of the next part of the object; how many characters that consumed."""
        if not self._expected or char == '"':  # a value or a key: the scanner reads it, this character first
            self._scanner = JsonScanner()
            self._scanned = ""
            self._is_streaming = self._is_arguments and char == "{"
            self.has_arguments = self.has_arguments or self._is_streaming
            if self._is_arguments and char not in '{"n':
                self.status = "broken"
            return 0
        if char == "}":
            self._end_object()
        self._expected = {"{": '"}', ":": "", ",": '"', "}": "}"}[char]
        return 1

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._expected and not self.has_all_arguments

    def _scan(self, scanner: JsonScanner, text: str, position: int) -> int:
        end, piece = scanner.scan(text, position)
        if self._is_streaming:
            self._arguments += piece
        else:
            self._scanned += piece
        if scanner.is_broken:
            self.status = "broken"
        elif scanner.is_complete:
            self._scanner = None
            if self._expected:
                self._end_key()
            else:
                self._end_value()
        return end

    def _end_key(self) -> None:
        self._key = json.loads(self._scanned)
        if self._known_keys is not None and self._key not in self._known_keys:
            self.status = "broken"
        self._expected = ":"

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = json.loads(self._scanned) if self._scanned.startswith('"') else ""
            if not self.name:
                self.status = "broken"
        elif self._is_arguments:
            self._end_arguments()
        self._expected = ",}"

    def _end_arguments(self) -> None:
        if not self._is_streaming:  # null, or a string: some models put the arguments in one, as the API does
            self._arguments = (json.loads(self._scanned) or "").strip() or "{}"
            if not is_json_object(self._arguments):
                self.status = "broken"
                return
        self._is_streaming = False
        self.has_arguments = self.has_all_arguments = True

    def _end_object(self) -> None:
        if self.name is None or (self._needs_arguments and not self.has_arguments):
            self.status = "broken"
            return
        if not self.has_arguments:
            self._arguments = "{}"
            self.has_arguments = self.has_all_arguments = True
        self.status = "complete"
