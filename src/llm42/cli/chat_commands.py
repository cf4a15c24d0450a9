"""What can be typed into a chat beside messages: lines that begin with a slash and a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm42.cli.terminal import write_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from llm42.cli.chat_conversation import Conversation
    from llm42.cli.chat_models import ChatModel
    from llm42.cli.facts import Facts

_PARAMETERS: dict[str, type] = {
    "deterministic": bool,
    "frequency_penalty": float,
    "ignore_eos": bool,
    "max_tokens": int,
    "min_p": float,
    "min_tokens": int,
    "presence_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "stop": str,
    "temperature": float,
    "top_k": int,
    "top_p": float,
}
_KINDS = {bool: "on or off", int: "an integer", float: "a number"}
_SWITCH = {"on": True, "off": False}


class Commands:
    """The commands of one chat.

    Args:
        model: Who answers.
        conversation: What they change.
        note: Tells the user something.
        answer: Waits for an answer and shows it.
    """

    def __init__(
        self,
        model: ChatModel,
        conversation: Conversation,
        note: Callable[[str], None],
        answer: Callable[[Coroutine[Any, Any, Facts]], None],
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._note = note
        self._answer = answer
        self._table: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list", self._help),
            "/new": ("", "start a new conversation with the same system message and parameters", self._new),
            "/retry": ("", "ask the last question again; the answer replaces the last one", self._retry),
            "/system": ("[TEXT]", "set the system message; without TEXT there is none", self._system),
            "/deterministic": ("on|off", "the same bits every time, whatever else runs", self._deterministic),
            "/seed": ("N|none", "seed of the next answers; none draws a new one for each", self._seed),
            "/set": (
                "[NAME VALUE]",
                "set a parameter such as temperature (none: its default), or list them",
                self._set,
            ),
            "/save": ("FILE", "write the conversation as JSON", self._save),
        }

    def obey(self, line: str) -> bool:
        """Do what the line says, if it is a command.

        Raises:
            ValueError: There is no such command, or its argument is bad; nothing has changed.
        """
        found = re.fullmatch(r"(/[A-Za-z]+)(?:\s+(.*))?", line.strip())
        if found is None:
            return False
        if found[1] not in self._table:
            raise ValueError(f"{found[1]} is no command; /help lists them")
        self._table[found[1]][2]((found[2] or "").strip())
        return True

    def _help(self, _argument: str) -> None:
        rows = [(f"{name} {usage}", meaning) for name, (usage, meaning, _) in self._table.items()]
        rows += [("/quit", "end the chat, as Ctrl-D does"), ("Ctrl-C", "cancel the answer that is being given")]
        rows += [("line \\", "go on in the next line"), ('"""', "begin and end a message of several lines")]
        self._note("\n".join(f"{usage:<20} {meaning}" for usage, meaning in rows))

    def _new(self, _argument: str) -> None:
        self._conversation.clear()
        self._note("a new conversation")

    def _retry(self, _argument: str) -> None:
        self._answer(self._conversation.retry(self._model, write_answer))

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        self._note("system message set" if text else "no system message")

    def _deterministic(self, value: str) -> None:
        self._set(f"deterministic {value}")

    def _seed(self, value: str) -> None:
        self._set(f"seed {value}")

    def _set(self, argument: str) -> None:
        if not argument:
            given = self._conversation.parameters
            listed = "\n".join(f"{name} {_shown(value)}" for name, value in given.items())
            self._note(listed or f"all parameters have their defaults; there are {', '.join(_PARAMETERS)}")
            return
        name, _, text = argument.partition(" ")
        if name not in _PARAMETERS:
            raise ValueError(f"{name} is no parameter; there are {', '.join(_PARAMETERS)}")
        parameters = {key: value for key, value in self._conversation.parameters.items() if key != name}
        if text.strip() != "none":
            parameters[name] = _parse(name, text.strip())
        self._model.check(parameters)
        self._conversation.parameters = parameters
        self._note(f"{name} {_shown(parameters.get(name))}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("FILE is missing; write /save chat.json")
        path = Path(argument).expanduser()
        self._conversation.save(path, self._model.name)
        self._note(f"saved to {path}")


def _parse(name: str, text: str) -> Any:
    kind = _PARAMETERS[name]
    try:
        return _SWITCH[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} is {text!r}; give {_KINDS[kind]}, or none for the default") from None


def _shown(value: object) -> str:
    if value is None:
        return "has its default"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
