"""Turning token strings into text one at a time, with the result of `tokenizers` decoding all of them at once.

`tokenizers` decodes a list by a chain of steps. Each step here is its streaming twin: it takes one string, returns the
strings that no later token can change any more, and gives the rest when the sequence ends. So the concatenation of a
stream always equals the text of the whole, invalid byte sequences included, and a step's cost does not grow with the
length of the text. Text is held back only while it is really open: an incomplete UTF-8 character, or a run of
SentencePiece byte tokens, which becomes text or replacement characters as a whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Step(Protocol):
    """One link of the chain."""

    def push(self, token: str) -> list[str]:
        """Take the next string; return the strings that are complete now."""

    def finish(self) -> list[str]:
        """Return what was held back; the sequence has ended."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table of printable characters that stand for bytes: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF: Final = byte_level_alphabet()


def piece_bytes(token: str) -> bytes | None:
    """The bytes that a string of a byte-level or byte-fallback vocabulary stands for; None if it is of no such kind."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return None


class _ByteLevel:
    """Bytes behind the characters, as UTF-8; a string with any other character (an added token) stands for itself."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str) -> list[str]:
        try:
            raw = bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            raw = token.encode("utf-8")
        return [self._utf8.decode(raw)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback:
    """A run of byte tokens <0xNN> becomes its UTF-8 text, or one replacement character per byte if it is not valid."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        if match := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(match[1], 16))
            return []
        return [*self.finish(), token]

    def finish(self) -> list[str]:
        if not self._run:
            return []
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return [text]


class _Map:
    """A function of each string alone."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def push(self, token: str) -> list[str]:
        return [self._function(token)]

    def finish(self) -> list[str]:
        return []


class _First:
    """A function of the first string; the others stay as they are."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function
        self._at_start = True

    def push(self, token: str) -> list[str]:
        if not self._at_start:
            return [token]
        self._at_start = False
        return [self._function(token)]

    def finish(self) -> list[str]:
        return []


class _StripStart:
    """Up to `count` leading `content` characters of the whole text (after Fuse) are dropped."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def push(self, token: str) -> list[str]:
        while self._left and token:
            if not token.startswith(self._content):
                self._left = 0
                break
            token = token[1:]
            self._left -= 1
        return [token]

    def finish(self) -> list[str]:
        return []


class _Separator:
    """A space before every string but the first, which is what `tokenizers` does where there is no decoder."""

    def __init__(self) -> None:
        self._at_start = True

    def push(self, token: str) -> list[str]:
        separator = "" if self._at_start else " "
        self._at_start = False
        return [separator + token]

    def finish(self) -> list[str]:
        return []


StepFactory = Callable[[], Step]


def build_steps(decoder: Mapping[str, Any] | None) -> list[StepFactory]:
    """The chain for the `decoder` entry of a tokenizer.json. Raises ValueError naming a step that is not supported."""
    if decoder is None:
        return [_Separator]
    factories: list[StepFactory] = []
    fused = False
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if step["type"] == "Fuse":
            fused = True
            continue
        factories.append(_step_factory(step, fused=fused))
    return factories


def _step_factory(step: Mapping[str, Any], *, fused: bool) -> StepFactory:
    kind = step["type"]
    if kind == "ByteFallback" and not fused:
        return _ByteFallback
    if kind == "ByteLevel" and not fused:
        return _ByteLevel
    if kind == "Metaspace" and not fused:
        return _metaspace(step)
    if kind == "Replace" and not fused and (old := step["pattern"].get("String")):
        new = str(step["content"])
        return lambda: _Map(lambda token: token.replace(old, new))
    if kind == "Strip" and fused and not step["stop"]:
        content, count = str(step["content"]), int(step["start"])
        return lambda: _StripStart(content, count)
    raise ValueError(f"the decoder step {dict(step)} is not supported")


def _metaspace(step: Mapping[str, Any]) -> StepFactory:
    """The marker becomes a space; in the first token it is dropped where one was put in front while encoding."""
    marker = str(step["replacement"])
    if step.get("prepend_scheme", "always") == "never":
        return lambda: _Map(lambda token: token.replace(marker, " "))
    return lambda: _Chain(
        [_First(lambda token: token.replace(marker, "")), _Map(lambda token: token.replace(marker, " "))]
    )


class _Chain:
    """Steps one after the other, as one step."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def push(self, token: str) -> list[str]:
        return self._run([token], 0)

    def finish(self) -> list[str]:
        held: list[str] = []
        for index, step in enumerate(self._steps):
            held += self._run(step.finish(), index + 1)
        return held

    def _run(self, strings: list[str], first: int) -> list[str]:
        for step in self._steps[first:]:
            strings = [output for string in strings for output in step.push(string)]
        return strings


class TokenDecoder:
    """One sequence being decoded: `step` takes the next token's string, `flush` ends the sequence."""

    def __init__(self, factories: Sequence[StepFactory]) -> None:
        self._chain = _Chain([factory() for factory in factories])

    def step(self, token: str) -> str:
        """The text that this token completes; "" while it is still open."""
        return "".join(self._chain.push(token))

    def flush(self) -> str:
        """The text held back, decoded as the end of the sequence."""
        return "".join(self._chain.finish())
