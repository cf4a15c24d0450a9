"""JSON that arrives in pieces: which of it is valid so far, and where a value ends.

Invariant: what a scanner accepts, whole, is valid JSON text; how the text was cut into pieces makes no difference. The
one thing it mends is a raw control character inside a string, which models write in multi-line arguments and every
JSON parser refuses: it is escaped.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

JSON_SPACE: Final = " \t\n\r"

_STRING_RUN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS: Final = ("true", "false", "null")

_State = Literal[
    "value", "first_item", "first_key", "key", "colon", "after_value",
    "string", "escape", "unicode", "number", "literal", "complete", "broken",
]  # fmt: skip


class JsonScanner:
    """Reads one JSON value; `scan` per piece of text."""

    def __init__(self) -> None:
        self._state: _State = "value"
        self._containers: list[str] = []
        self._is_key = False
        self._token = ""  # of the number, literal or \u escape being read

    @property
    def is_complete(self) -> bool:
        """Whether the value has ended. A number ends with the first character that is not part of it."""
        return self._state == "complete"

    @property
    def is_broken(self) -> bool:
        """Whether the text is no JSON; `scan` stopped before the first wrong character."""
        return self._state == "broken"

    def scan(self, text: str, start: int) -> tuple[int, str]:
        """Read on in `text` from `start`: the position after what belongs to the value, and that part as valid JSON."""
        position = start
        accepted: list[str] = []
        while position < len(text) and self._state not in {"complete", "broken"}:
            if self._state == "string" and (run := _STRING_RUN.match(text, position)):
                accepted.append(run.group())
                position = run.end()
                continue
            if self._state == "number" and text[position] not in "+-.eE0123456789":
                self._end_number()
                continue
            piece = self._step(text[position])
            if self._state != "broken":
                accepted.append(piece)
                position += 1
        return position, "".join(accepted)

    def _step(self, char: str) -> str:
        """Take one character; what it is in valid JSON."""
        if self._state in {"string", "escape", "unicode"}:
            return self._step_in_string(char)
        if self._state in {"number", "literal"}:
            self._step_in_word(char)
        elif char not in JSON_SPACE:
            self._step_in_structure(char)
        return char

    def _step_in_string(self, char: str) -> str:
        if self._state == "string":
            if char == "\\":
                self._state = "escape"
            elif char == '"':
                self._end_string()
            else:
                return json.dumps(char)[1:-1]  # a control character
        elif self._state == "escape":
            self._token = ""
            self._state = "unicode" if char == "u" else "string" if char in '"\\/bfnrt' else "broken"
        else:
            self._token += char
            if char not in "0123456789abcdefABCDEF":
                self._state = "broken"
            elif len(self._token) == 4:
                self._state = "string"
        return char

    def _step_in_word(self, char: str) -> None:
        self._token += char
        if self._state == "literal":
            if self._token in _LITERALS:
                self._end_value()
            elif not any(literal.startswith(self._token) for literal in _LITERALS):
                self._state = "broken"

    def _step_in_structure(self, char: str) -> None:
        state = self._state
        if char == '"' and state in {"value", "first_item", "first_key", "key"}:
            self._is_key = state in {"first_key", "key"}
            self._state = "string"
        elif char in "{[" and state in {"value", "first_item"}:
            self._containers.append(char)
            self._state = "first_key" if char == "{" else "first_item"
        elif char in "-0123456789tfn" and state in {"value", "first_item"}:
            self._token = char
            self._state = "literal" if char in "tfn" else "number"
        elif char == ":" and state == "colon":
            self._state = "value"
        elif char == "," and state == "after_value":
            self._state = "key" if self._containers[-1] == "{" else "value"
        elif (char == "}" and (state == "first_key" or (state == "after_value" and self._containers[-1] == "{"))) or (
            char == "]" and (state == "first_item" or (state == "after_value" and self._containers[-1] == "["))
        ):
            self._containers.pop()
            self._end_value()
        else:
            self._state = "broken"

    def _end_string(self) -> None:
        if self._is_key:
            self._is_key = False
            self._state = "colon"
        else:
            self._end_value()

    def _end_number(self) -> None:
        if _NUMBER.fullmatch(self._token):
            self._end_value()
        else:
            self._state = "broken"

    def _end_value(self) -> None:
        self._state = "after_value" if self._containers else "complete"


def is_json_object(text: str) -> bool:
    """Whether `text` is exactly one JSON object, without space around it."""
    scanner = JsonScanner()
    return text.startswith("{") and scanner.scan(text, 0) == (len(text), text) and scanner.is_complete
