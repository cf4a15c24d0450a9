"""What of a regular expression xgrammar would leave out silently, and how large it would make it.

xgrammar matches the whole output and drops anchors with no more than a warning; here an anchor that means anything
else than "the start" or "the end" is an error.
"""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!]|<[=!]?))?|\)|\{(\d{1,15})(?:,(\d{0,15}))?\}|.", re.DOTALL
)
_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfvb0cxu]')
_MOST_UNROLLED = 128  # longer repetitions are counted by the matcher, not unrolled


def check_regex(pattern: str, where: str) -> None:
    """Raise `ValueError` for an anchor in the middle: xgrammar would ignore it."""
    pieces = [match[0] for match in _PIECE.finditer(pattern)]
    for index, piece in enumerate(pieces):
        starts = all(before.startswith("(") or before in "^|" for before in pieces[:index][-1:])
        ends = all(after in ")|$" for after in pieces[index + 1 : index + 2])
        if (piece == "^" and not starts) or (piece == "$" and not ends):
            raise ValueError(
                f"{where} has {piece!r} in the middle of {pattern!r:.80}, which is not supported; the whole output is "
                "matched, so remove it"
            )


def needs_escape(pattern: str) -> str | None:
    """The first piece that matches a character which JSON strings do not have as it is; None if there is none.

    xgrammar then matches a pattern with the text of the JSON string, escapes and all, and else with its value.
    """
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if not piece.startswith("[^") and _ESCAPED.search(piece):
            return piece
    return None


def unrolled_states(pattern: str) -> int:
    """About how many states the bounded repetitions of a regular expression or grammar add."""
    groups = [0]  # states of the groups that are open
    last = 0
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if piece.startswith("("):
            groups.append(0)
            last = 0
        elif piece == ")":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif match[1] is not None:
            count = max(int(match[1]), int(match[2] or 0))
            added = max(last, 1) * min(count, _MOST_UNROLLED)
            groups[-1] += added
            last += added
        else:
            last = 0
    return sum(groups)
