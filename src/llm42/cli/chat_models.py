"""Whom `llm42 chat` talks to: one interface, and the model in this process; a server is in `chat_remote`.

Invariant: closing a stream early ends the work behind it; a stream that ends by itself ends with the answer's facts.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llm42.cli.facts import Facts
from llm42.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from llm42 import AsyncLLM, SamplingParams

Message = dict[str, str]

LONGEST_ANSWER = 1024
"""Default of max_tokens in this process: a small model may repeat itself until its context is full."""


class ContextFullError(ValueError):
    """The conversation leaves no room for an answer."""


class ChatModel(ABC):
    """A model that answers conversations."""

    name: str

    @abstractmethod
    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise ValueError for parameters that are known to be bad before anything is asked."""

    @abstractmethod
    def stream(self, messages: Sequence[Message], parameters: Mapping[str, Any]) -> AsyncGenerator[str | Facts, None]:
        """The answer's text piece by piece, then its facts.

        `parameters` are fields of SamplingParams; the model's own defaults hold for the others.

        Raises:
            ContextFullError: There is no room for an answer.
            ValueError: A parameter is bad.
            RequestError: The request failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the model holds."""


def local_params(parameters: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a model in this process: greedy, and not endless, unless they say otherwise."""
    from llm42 import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": LONGEST_ANSWER, **parameters})


class LocalModel(ChatModel):
    """A model in this process; it owns the engine.

    Raises:
        ValueError: The model has no chat template.
    """

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self.name = name
        self._llm = llm
        if llm.tokenizer.chat_template is None:
            raise ValueError(f"model {name} has no chat template; give it plain text with `llm42 run --raw`")
        # Renders once now, because the imports behind it would make the first answer late.
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    def check(self, parameters: Mapping[str, Any]) -> None:
        """As SamplingParams checks them."""
        local_params(parameters)

    async def stream(
        self, messages: Sequence[Message], parameters: Mapping[str, Any]
    ) -> AsyncGenerator[str | Facts, None]:
        """Generate; an output never runs past the context."""
        params = local_params(parameters)
        prompt = self._llm.tokenizer.apply_chat_template(messages)
        room = self._llm.max_model_len - len(prompt)
        if room < 1:
            raise ContextFullError(
                f"the conversation has {len(prompt)} tokens, and max_model_len {self._llm.max_model_len} must hold it "
                "and at least one more"
            )
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens or room, room))
        last, num_tokens = None, 0
        async with aclosing(self._llm.generate({"prompt_token_ids": prompt}, params)) as outputs:
            async for output in outputs:
                last = output
                for completion in output.outputs:
                    num_tokens += len(completion.token_ids)
                    if completion.text:
                        yield completion.text
        if last is None or not last.finished:
            raise RequestError("the engine ended the stream before the request was finished")
        facts = Facts.of(last, num_tokens, self._llm.system_fingerprint)
        yield facts if params.deterministic else dataclasses.replace(facts, verification=None)

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()
