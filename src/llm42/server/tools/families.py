"""The ways in which model families write tool calls, and how to tell from a chat template which one a model uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from llm42.model.tokenizer import Tokenizer
from llm42.server.tools.call_reader import ARGUMENT_KEYS, CallReader
from llm42.server.tools.parser import ToolParser


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, SmolLM3; SmolLM2: a list."""

    open_markers = ("<tool_call>",)
    close_marker = "</tool_call>"


class Llama3JsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several separated by ";", after `<|python_tag|>` or without: Llama 3.1 on.

    Without the tag only an object at the beginning of the answer or of a line is tried, and one with another key than
    those of a call, or without arguments, is content.
    """

    open_markers = ("<|python_tag|>",)
    _KNOWN_KEYS: ClassVar = frozenset({"name", "type", "id", *ARGUMENT_KEYS})

    def _find_call(self) -> tuple[int, str | None]:
        start, marker = super()._find_call()
        last_char = self._writer.last_char
        if not last_char and (opening := re.match(r"\s*\{", self._pending)):
            brace = opening.end() - 1
        elif last_char == "\n" and self._pending.startswith("{"):
            brace = 0
        else:
            brace = self._pending.find("\n{") + 1 or start
        return (brace, "") if brace < start else (start, marker)

    def _new_reader(self) -> CallReader:
        return CallReader() if self._marker else CallReader(known_keys=self._KNOWN_KEYS, needs_arguments=True)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or since tokenizer v11 `[TOOL_CALLS]name[ARGS]{...}` per call.

    v11 has `[CALL_ID]` and the model's own id before `[ARGS]`, some conversions lose `[ARGS]`: all are read.
    """

    open_markers = ("[TOOL_CALLS]",)
    _HEADER: ClassVar = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*(?:\w+\s*)?)?(?:\[ARGS\]\s*)?")
    _HEADER_PREFIX: ClassVar = re.compile(r"[\w.-]+\s*(?:\[[A-Z_]*(?:\]\s*(?:\w+\s*)?)?){0,2}")

    def _read_other(self) -> bool:
        header, brace, _ = self._pending.partition("{")
        if self._raw.strip() not in self.open_markers:
            return super()._read_other()
        if brace and (match := self._HEADER.fullmatch(header)):
            self._take(len(header))
            self._begin_arguments(match[1])
            return True
        if not brace and self._HEADER_PREFIX.fullmatch(header):
            return False
        return super()._read_other()


PARSERS: Final[Mapping[str, type[ToolParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""The parsers by the names that users give them."""


def needs_special_tokens(parser: type[ToolParser], tokenizer: Tokenizer) -> bool:
    """Whether text must be decoded with its special tokens: those of `tokenizer` include the parser's markers."""
    markers = (*parser.open_markers, parser.close_marker or "")
    return any(marker not in tokenizer.decode(tokenizer.encode(marker, add_special_tokens=False)) for marker in markers)


def knows_tools(chat_template: str) -> bool:
    """Whether the template shows tools to the model. If not, `messages.describe_tools` does."""
    return re.search(r"\b(?:xml_)?tools\b", chat_template) is not None


def parser_name_for(chat_template: str | None) -> str | None:
    """The parser for the answers of a model with this chat template; None where the format is another one.

    A template that knows nothing of tools gets the format that `messages.describe_tools` asks for.
    """
    if chat_template is None:
        return None
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:  # Qwen3-Coder and GLM have other things than JSON inside
        return None if "<function=" in chat_template or "<arg_key>" in chat_template else "hermes"
    if "<|python_tag|>" in chat_template or '{"name": function name, "parameters"' in chat_template:
        return "llama3_json"
    return None if knows_tools(chat_template) else "hermes"
