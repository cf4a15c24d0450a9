"""Answers that must be calls: the schema that structured output holds the model to, and the parser of what comes out.

`tool_choice: "required"` gives a list of `{"name": ..., "parameters": ...}`, a named function its arguments alone.
`strict` functions under `tool_choice: "auto"` get a structural tag: text is free, and calls are held to the schemas.
"""

from __future__ import annotations

import json
from typing import Any, Final

from llm42.server.tools.deltas import CallIds
from llm42.server.tools.families import HermesParser
from llm42.server.tools.json_scanner import JSON_SPACE
from llm42.server.tools.parser import ToolParser
from llm42.server.tools.request import Tool, ToolOptions

Schema = dict[str, Any]

_NO_PARAMETERS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}


class ForcedToolParser(ToolParser):
    """Reads an answer that follows `forced_schema`; `name` is that of the named function, if one was named."""

    def __init__(self, id_of: CallIds, *, name: str | None = None, parallel: bool = True) -> None:
        super().__init__(id_of, parallel=parallel)
        self._name = name
        self._state = "between"

    def _read_between(self) -> bool:
        if self._name is None or self._has_calls:
            return super()._read_between()
        char = self._pending[0]
        if char == "{":
            self._begin_arguments(self._name)
        elif char in JSON_SPACE:
            self._raw += self._take(1)
        else:
            self._leave(self._raw)
        return True


def forced_schema(options: ToolOptions) -> Schema | None:
    """The JSON schema of the whole answer; None where the choice of a call is the model's."""
    if options.named is not None:
        return _arguments_schema(options.named)
    if options.choice != "required":
        return None
    calls = [_call_schema(tool, f"#/items/anyOf/{index}") for index, tool in enumerate(options.tools)]
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if options.parallel else {**schema, "maxItems": 1}


def strict_structural_tag(options: ToolOptions, parser: type[ToolParser]) -> Schema | None:
    """The structural tag (as xgrammar reads it) for `strict` functions that the model may call; None if there are none.

    Functions that are not strict may then have any object as arguments. Raises ValueError for families whose calls
    have no marker of ordinary text, because nothing could be held to the schema there.
    """
    if options.choice != "auto" or not any(tool.strict for tool in options.tools):
        return None
    if parser is not HermesParser:
        raise ValueError(
            'tools has strict true, which this model supports with tool_choice "required" or a named function only; '
            "set one of these, or strict to false"
        )
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": _arguments_schema(tool) if tool.strict else {"type": "object"},
            },
            "end": "}\n</tool_call>",
        }
        for tool in options.tools
    ]
    trigger = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": tags,
        "stop_after_first": not options.parallel,
    }
    return {"type": "structural_tag", "format": trigger}


def _call_schema(tool: Tool, place: str) -> Schema:
    parameters = _moved(_arguments_schema(tool), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool) -> Schema:
    return dict(_NO_PARAMETERS) if tool.parameters is None else {"type": "object", **tool.parameters}


def _moved(schema: Any, place: str) -> Any:
    """`schema` with its references to itself as they must be at `place` of another one."""
    if isinstance(schema, list):
        return [_moved(element, place) for element in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
