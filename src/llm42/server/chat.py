"""/v1/chat/completions: messages in, a message out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llm42.model.tokenizer import Tokenizer
from llm42.outputs import CompletionOutput, RequestOutput
from llm42.server.conversation import ToolUse, render, tools_of
from llm42.server.logprobs import chat_logprobs, prompt_logprobs
from llm42.server.responses import DONE, JSON, EventStream, answer, event
from llm42.server.runs import Run
from llm42.server.schemas import ChatBody
from llm42.server.state import ServerState, name_of
from llm42.server.tools import ContentDelta, Delta, ToolCallDelta, ToolParser, collect


def router(state: ServerState) -> APIRouter:
    """The endpoint."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", tags=["OpenAI"], summary="Answer a conversation")
    async def complete_chat(body: ChatBody, request: Request) -> Response:
        name = name_of(request, body.request_id)
        # In another thread: a long conversation must not hold up the streams of others.
        chat = await asyncio.to_thread(_Chat, state, name, body)
        if body.stream:
            return EventStream(chat.stream(), state.settings.keep_alive_s)
        return JSON(await answer(request, chat.whole()))

    return routes


class _Chat:
    """One request of this endpoint."""

    def __init__(self, state: ServerState, name: str, body: ChatBody) -> None:
        self._body = body
        self._tokenizer = state.llm.tokenizer
        tools = tools_of(body)
        self._tools = ToolUse(self._tokenizer, state.tool_call_parser, tools)
        token_ids = render(self._tokenizer, body, tools, state.llm.max_model_len)
        params = body.to_params(
            deterministic_default=state.settings.deterministic_default,
            max_tokens=body.limit,
            logprobs=body.num_logprobs,
            tool_constraint=self._tools.constraint,
            **self._tools.replaced_params,
        )
        self._run = Run(
            state, "chatcmpl", name, [{"prompt_token_ids": token_ids}], body, params, prompt_field="messages"
        )
        self._choices: dict[int, _Choice] = {}

    async def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        (output,) = await self._run.whole()
        choices = [self._choice(output, completion).whole(completion) for completion in output.outputs]
        body = {**self._head("chat.completion"), "choices": choices, "usage": self._run.usage.as_dict()}
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a response that is streamed."""
        head = self._head("chat.completion.chunk")
        usage: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._run.deltas()) as deltas:
            async for _, output in deltas:
                if self._body.continuous_usage:
                    usage = {"usage": self._run.usage.as_dict()}
                extra = self._prompt_facts(output)
                for completion in output.outputs:
                    for choice in self._choice(output, completion).chunks(completion):
                        yield event({**head, "choices": [choice], **usage, **extra})
                        extra = {}
        if self._body.include_usage:
            yield event({**head, "choices": [], "usage": self._run.usage.as_dict()})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        tier = {"service_tier": "default"} if self._body.service_tier is not None else {}
        return {**self._run.head(kind), **tier}

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> _Choice:
        if completion.index not in self._choices:
            parser = self._tools.new_parser(output.prompt_token_ids, completion.seed)
            self._choices[completion.index] = _Choice(self._body, self._tokenizer, parser, self._tools)
        return self._choices[completion.index]

    def _prompt_facts(self, output: RequestOutput) -> dict[str, Any]:
        """What is told of the prompt, with the first chunk, or as soon as it is known."""
        facts: dict[str, Any] = {}
        if self._body.return_token_ids and not self._choices:
            facts["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return facts


class _Choice:
    """One of the n messages of a response."""

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, parser: ToolParser | None, tools: ToolUse) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._parser = parser
        self._is_named = tools.is_named
        self._has_begun = False
        self._has_calls = False

    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        content, calls = collect(self._deltas(completion))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return {"index": completion.index, "message": message, **self._facts(completion)}

    def chunks(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of the chunks that say what is new."""
        deltas = [_as_dict(delta) for delta in self._deltas(completion)]
        if not self._has_begun:
            self._has_begun = True
            # A message that may turn out to be calls has no content yet.
            first = {"role": "assistant", "content": "" if self._parser is None else None, "refusal": None}
            deltas = [first | (deltas[0] if deltas else {}), *deltas[1:]]
        facts = self._facts(completion)
        has_facts = facts["finish_reason"] or facts.get("token_ids") or facts["logprobs"]
        if not deltas:
            if not has_facts:
                return []
            deltas = [{}]
        # What is told of the tokens goes with the last piece that they brought.
        choices: list[dict[str, Any]] = [
            {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        choices[-1].update(facts)
        return choices

    def _deltas(self, completion: CompletionOutput) -> list[Delta]:
        """The new text as content and tool calls."""
        if self._parser is None:
            return [ContentDelta(completion.text)] if completion.text else []
        deltas = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            deltas = [*deltas, *self._parser.finish()]
        self._has_calls = self._has_calls or any(isinstance(delta, ToolCallDelta) for delta in deltas)
        return deltas

    def _facts(self, completion: CompletionOutput) -> dict[str, Any]:
        """Everything about a choice but its text."""
        reason = completion.finish_reason
        if reason == "stop" and self._has_calls and not self._is_named:
            reason = "tool_calls"
        facts: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            "seed": completion.seed,
        }
        if completion.logprobs:
            facts["logprobs"] = chat_logprobs(
                self._tokenizer,
                completion.token_ids,
                completion.logprobs,
                self._body.num_logprobs or 0,
                as_ids=bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            facts["token_ids"] = completion.token_ids
        return facts


def _as_dict(delta: Delta) -> dict[str, Any]:
    """A delta of the API."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    function: dict[str, Any] = {"arguments": delta.arguments}
    call: dict[str, Any] = {"index": delta.index}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, **function}
    return {"tool_calls": [{**call, "function": function}]}
