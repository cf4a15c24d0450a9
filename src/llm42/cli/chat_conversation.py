"""The conversation of `llm42 chat`: what was said, how answers are asked for, and how it is kept.

Invariant: a question that got no answer leaves the conversation as it was; one that was cut short counts as far as the
user saw it.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llm42.cli.chat_models import ChatModel, Message
    from llm42.cli.facts import Facts


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer; the facts are None where the answer was cut short."""

    question: str
    answer: str
    facts: Facts | None


@dataclass(slots=True)
class Conversation:
    """What was said to a model, and the parameters of the next answer."""

    system: str | None
    parameters: dict[str, Any]
    """The fields of SamplingParams that the user gave."""
    exchanges: list[Exchange] = field(default_factory=list)
    unanswered: str | None = None
    """The last question, if it got no answer."""

    async def ask(self, model: ChatModel, question: str, write: Callable[[str], None]) -> Facts:
        """Get an answer, passing its pieces to `write`, and a final newline unless it ends with one."""
        self.unanswered = question
        return await self._ask(model, question, self.exchanges, write)

    async def retry(self, model: ChatModel, write: Callable[[str], None]) -> Facts:
        """Ask the last question again; a new answer replaces the old one.

        Raises:
            ValueError: Nothing was asked yet.
        """
        if self.unanswered is not None:
            return await self.ask(model, self.unanswered, write)
        if not self.exchanges:
            raise ValueError("there is no question to ask again")
        return await self._ask(model, self.exchanges[-1].question, self.exchanges[:-1], write)

    async def _ask(
        self, model: ChatModel, question: str, before: Sequence[Exchange], write: Callable[[str], None]
    ) -> Facts:
        answer, facts = "", None
        messages = [*self._messages(before), {"role": "user", "content": question}]
        try:
            async with aclosing(model.stream(messages, self.parameters)) as stream:
                async for item in stream:
                    if isinstance(item, str):
                        answer += item
                        write(item)
                    else:
                        facts = item
        finally:
            if answer and not answer.endswith("\n"):
                write("\n")
            if answer or facts is not None:
                self.exchanges = [*before, Exchange(question, answer, facts)]
                self.unanswered = None
        assert facts is not None, "a stream ends with facts or an error"  # noqa: S101
        return facts

    def clear(self) -> None:
        """Forget what was said."""
        self.exchanges, self.unanswered = [], None

    def save(self, path: Path, model: str) -> None:
        """Write the conversation as JSON: messages as the API takes them, and what is needed to get them again."""
        document = {
            "model": model,
            "parameters": self.parameters,
            "messages": self._messages(self.exchanges),
            "answers": [exchange.facts and dataclasses.asdict(exchange.facts) for exchange in self.exchanges],
        }
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _messages(self, exchanges: Sequence[Exchange]) -> list[Message]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return messages
