"""What model text may do to a terminal: nothing but appear.

Invariant: no control character that a model (or a server) emits reaches a terminal, newline and tab excepted: escape
sequences could move the cursor, change the window's title or the clipboard, or fake what was said before. Text that
goes to a file or a pipe is left as it is.
"""

from __future__ import annotations

import sys

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}  # Unicode's pictures of them
_CONTROLS[0x7F] = 0x2421
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # eight-bit controls: some terminals take U+009B for an escape


def visible(text: str) -> str:
    """The text with control characters replaced by visible ones, each by itself: pieces may end anywhere."""
    return text.translate(_CONTROLS)


def write_answer(text: str) -> None:
    """Write a piece of model text to stdout, at once."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
