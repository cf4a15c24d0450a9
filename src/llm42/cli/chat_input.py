'''Reading messages from a terminal: line editing and history where there is readline, and messages of several lines.

A line that ends with a backslash goes on in the next one; a message between """ and """ may have any lines. Text that
is pasted is one message.
'''

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FIRST, _NEXT = ">>> ", "... "
_FENCE = '"""'
_HISTORY_LENGTH = 1000


@contextlib.contextmanager
def history(path: Path) -> Iterator[None]:
    """Edit lines with readline, and keep what was entered in a file that only its owner may read."""
    try:
        import readline
    except ImportError:  # not on Windows
        yield
        return
    if os.environ.get("TERM", "dumb") != "dumb":  # a dumb terminal would show the escape sequences
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    with contextlib.suppress(OSError):  # there is none yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LENGTH)
        with contextlib.suppress(OSError):  # a chat without history is still a chat
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def read_message() -> tuple[str, bool]:
    """The next message that is not empty, and whether it was typed as a single line.

    Raises:
        EOFError, KeyboardInterrupt: The user ends the chat. (Ctrl-C in the middle of a message drops the message.)
    """
    while True:
        first = _read_line(_FIRST)
        try:
            lines = list(_lines(first))
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        text = "\n".join(lines)
        if text.strip():
            return text, lines == [first] and "\n" not in first


def _lines(line: str) -> Iterator[str]:
    if line.lstrip().startswith(_FENCE):
        line, is_first = line.lstrip().removeprefix(_FENCE), True
        while not line.rstrip().endswith(_FENCE):
            if line or not is_first:  # the fences may stand on lines of their own
                yield line
            line, is_first = _read_line(_NEXT), False
        if last := line.rstrip().removesuffix(_FENCE):
            yield last
        return
    while line.endswith("\\"):
        yield line.removesuffix("\\")
        line = _read_line(_NEXT)
    yield line


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    # `input` would put its prompt among the answers.
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
