"""What a request says about tools: `tools`, `tool_choice` and `parallel_tool_calls`, checked.

Every error is a ValueError that names the field, its value, and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Choice = Literal["none", "auto", "required"]

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_TOOLS: Final = 128  # as in the OpenAI API
_MAX_DEPTH: Final = 64  # of a schema; code that walks it recurses
_REMEDY: Final = 'give {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """The JSON schema of its arguments, an object; None for a function without any."""
    strict: bool
    for_template: Mapping[str, Any]
    """The tool as it is shown to the model: as it was sent, without nulls, and always with parameters."""


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a request and how the model may use them."""

    tools: Sequence[Tool]
    choice: Choice
    named: Tool | None = None
    """The function that must be called, if one was named; `choice` is then ``"required"``."""
    parallel: bool = True


def parse_tools(
    tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolOptions | None:
    """The options that the three fields of a request mean; None where the model may not call anything.

    With ``tool_choice: "none"`` the tools are checked and left out: a model that is not told of them does not try.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise ValueError(f"parallel_tool_calls is {parallel_tool_calls!r}; give true or false")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools is {tools!r}; give a list of functions")
    if not tools:
        if tool_choice is not None and tool_choice != "none":
            raise ValueError(f"tool_choice is {tool_choice!r} but there are no tools; add tools or remove it")
        return None
    parsed = _parse_list(tools)
    options = _apply_choice(parsed, tool_choice, parallel=parallel_tool_calls is not False)
    return None if options.choice == "none" else options


def _parse_list(tools: Sequence[object]) -> list[Tool]:
    if len(tools) > _MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} functions; give at most {_MAX_TOOLS}")
    parsed = [_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [tool.name for tool in parsed]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"tools[{index}].function.name is {name!r}, as in tools[{names.index(name)}]; rename one")
    return parsed


def _parse_tool(tool: object, field: str) -> Tool:
    if not isinstance(tool, dict):
        raise ValueError(f"{field} is {tool!r}; {_REMEDY}")
    if tool.get("type") != "function":
        raise ValueError(f"{field}.type is {tool.get('type')!r}, but only functions are supported; {_REMEDY}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{field}.function is {function!r}; {_REMEDY}")
    field += ".function"
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{field}.name is {name!r}; use 1 to 64 letters, digits, underscores and dashes")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{field}.description is {description!r}; give a string")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{field}.strict is {strict!r}; give true or false")
    parameters = _check_parameters(function.get("parameters"), f"{field}.parameters")
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    shown["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return Tool(name, parameters, strict is True, {"type": "function", "function": shown})


def _check_parameters(parameters: object, field: str) -> dict[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ValueError(f"{field} is {parameters!r}; give a JSON schema, or leave it out for a function without any")
    if parameters.get("type", "object") != "object":
        raise ValueError(f'{field}.type is {parameters["type"]!r}; arguments are an object: use "object"')
    if not isinstance(parameters.get("properties", {}), dict):
        raise ValueError(f"{field}.properties is {parameters['properties']!r}; give an object of schemas")
    level: list[Any] = [parameters]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"{field} is nested more than {_MAX_DEPTH} deep; flatten it")
    return parameters


def _apply_choice(tools: Sequence[Tool], choice: object, *, parallel: bool) -> ToolOptions:
    if choice is None:
        return ToolOptions(tools, "auto", parallel=parallel)
    if choice == "none" or choice == "auto" or choice == "required":  # noqa: PLR1714  narrows the type
        return ToolOptions(tools, choice, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        tool = _find(tools, choice, "tool_choice")
        return ToolOptions(tools, "required", tool, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if not isinstance(entries, list) or not entries or mode not in ("auto", "required"):
            raise ValueError(
                f"tool_choice.allowed_tools is {allowed!r}; "
                'give {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}'
            )
        found = [
            _find(tools, entry, f"tool_choice.allowed_tools.tools[{index}]") for index, entry in enumerate(entries)
        ]
        return _apply_choice([tool for tool in tools if tool in found], mode, parallel=parallel)
    raise ValueError(
        f'tool_choice is {choice!r}; use "none", "auto", "required", '
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
    )


def _find(tools: Sequence[Tool], choice: object, field: str) -> Tool:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise ValueError(
        f"{field} names {name!r}, which is not among the tools; use one of {[tool.name for tool in tools]}"
    )
