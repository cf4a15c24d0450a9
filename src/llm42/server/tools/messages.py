"""Messages of the OpenAI API as chat templates want them.

As in vLLM: text parts are joined by line breaks, the arguments of earlier calls become objects, and keys without a
value are left out, because templates ask whether a key is there. What a template has no place for is told in words:
earlier calls and their results would otherwise be missing from the conversation, or be refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llm42.server.tools.families import knows_tools
from llm42.server.tools.request import Tool

Message = dict[str, Any]

_SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
_TOOL_ROLE: Final = re.compile(r"""["']tool["']""")
_SHORT_ID_TEMPLATE: Final = re.compile(r"\|\s*length\s*(?:!=|<)\s*9\b")


def demands_short_ids(chat_template: str) -> bool:
    """Whether the template refuses ids of calls that have not nine alphanumeric characters, as Mistral's do."""
    return _SHORT_ID_TEMPLATE.search(chat_template) is not None


def template_arguments(tools: Sequence[Tool], chat_template: str) -> dict[str, Any]:
    """What to pass to the template for it to show `tools` to the model; nothing if it cannot (see `describe_tools`)."""
    if not tools or not knows_tools(chat_template):
        return {}
    shown = [tool.for_template for tool in tools]
    return {"tools": shown, **({"xml_tools": shown} if "xml_tools" in chat_template else {})}  # SmolLM3's name


def messages_for_template(messages: Sequence[Mapping[str, Any]], chat_template: str) -> list[Message]:
    """`messages` as this template wants them. Raises ValueError naming what is wrong with which message."""
    converted = [_convert(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for message in converted:
        if message["role"] == "developer" and "developer" not in chat_template:
            message["role"] = "system"
    if demands_short_ids(chat_template):
        _shorten_ids(converted)
    if "tool_calls" not in chat_template:
        converted = [_with_calls_as_text(message) for message in converted]
    if not _TOOL_ROLE.search(chat_template):
        converted = [_with_result_as_text(message) for message in converted]
    if "single tool-calls" in chat_template:  # Llama 3: "only supports single tool-calls at once"
        converted = _one_call_at_a_time(converted)
    return converted


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Message]:
    """Converted `messages` for a template that knows nothing of tools: the system message describes them.

    It asks for calls as `HermesParser` reads them.
    """
    told = [dict(message) for message in messages]
    if not tools:
        return told
    system = told.pop(0)["content"] + "\n\n" if told and told[0]["role"] == "system" else ""
    functions = "\n".join(json.dumps(tool.for_template["function"], ensure_ascii=False) for tool in tools)
    prompt = (
        f"{system}You can call these functions, each given as JSON with the schema of its parameters:\n"
        f"<tools>\n{functions}\n</tools>\n\n"
        "To call functions, answer with one block like this for each call, and nothing else:\n"
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"parameter": "value"}}\n</tool_call>\n'
        "If no function helps, answer in plain text."
    )
    return [{"role": "system", "content": prompt}, *told]


def _convert(message: Mapping[str, Any], field: str) -> Message:
    converted = {key: value for key, value in message.items() if value is not None}
    role = converted.get("role")
    if not isinstance(role, str) or role == "function":
        raise ValueError(f'{field}.role is {role!r}; use "system", "developer", "user", "assistant" or "tool"')
    if "function_call" in converted:
        raise ValueError(f"{field}.function_call is {converted['function_call']!r}; use tool_calls")
    calls = converted.pop("tool_calls", None) or []
    refusal = converted.pop("refusal", None)
    if "content" not in converted and role == "assistant" and (calls or refusal):
        converted["content"] = refusal or ""  # templates add it to a text
    converted["content"] = _text_of(converted.get("content"), f"{field}.content")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{field}.tool_calls is {calls!r}; give a list, in messages of the assistant only")
        converted["tool_calls"] = [
            _convert_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    if role == "tool" and not isinstance(converted.get("tool_call_id"), str):
        raise ValueError(f"{field}.tool_call_id is {converted.get('tool_call_id')!r}; give the id of the call")
    return converted


def _text_of(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{field} is {content!r}; give a string, or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise ValueError(
                f"{field}[{index}] has type {kind!r}, but this server reads text only; "
                'give {"type": "text", "text": ...}'
            )
        texts.append(text)
    return "\n".join(texts)


def _convert_call(call: object, field: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValueError(f'{field} is {call!r}; give {{"id", "type": "function", "function": {{"name", "arguments"}}}}')
    if not isinstance(call.get("id"), str):
        raise ValueError(f"{field}.id is {call.get('id')!r}; give the id that the call came with")
    if not isinstance(function.get("name"), str):
        raise ValueError(f"{field}.function.name is {function.get('name')!r}; give the name of the function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{field}.function.arguments is {function.get('arguments')!r}; give the text of a JSON object")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _shorten_ids(messages: Sequence[Message]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _short_id(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _one_call_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Calls that were made together, told one after the other, each followed by its result."""
    told: list[Message] = []
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            for call in calls:
                told.append({**message, "tool_calls": [call]})
                if call["id"] in results:
                    told.append(results[call["id"]])
                    moved.add(call["id"])
        elif message["role"] != "tool" or message["tool_call_id"] not in moved:
            told.append(message)
    return told


def _with_calls_as_text(message: Message) -> Message:
    calls = message.get("tool_calls", ())
    texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    told = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**told, "content": "\n".join(filter(None, [message["content"], *texts]))}


def _with_result_as_text(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
