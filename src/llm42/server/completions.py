"""/v1/completions: text or token ids in, text out; prompts may be scored with echo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llm42.engine.engine import Prompt
from llm42.outputs import CompletionOutput, LogprobDict, RequestOutput
from llm42.server.logprobs import CompletionLogprobs, prompt_logprobs
from llm42.server.responses import DONE, JSON, EventStream, answer, event
from llm42.server.runs import Run
from llm42.server.schemas import CompletionBody
from llm42.server.state import ServerState, name_of


def router(state: ServerState) -> APIRouter:
    """The endpoint."""
    routes = APIRouter()

    @routes.post("/v1/completions", tags=["OpenAI"], summary="Complete a text")
    async def complete(body: CompletionBody, request: Request) -> Response:
        name = name_of(request, body.request_id)
        # In another thread: long prompts must not hold up the streams of others.
        completion = await asyncio.to_thread(_Completion, state, name, body)
        if body.stream:
            return EventStream(completion.stream(), state.settings.keep_alive_s)
        return JSON(await answer(request, completion.whole()))

    return routes


class _Completion:
    """One request of this endpoint."""

    def __init__(self, state: ServerState, name: str, body: CompletionBody) -> None:
        self._body = body
        self._tokenizer = state.llm.tokenizer
        self._max_model_len = state.llm.max_model_len
        self._scores_only = body.max_tokens == 0
        if self._scores_only and not body.echo:
            raise ValueError("max_tokens must be at least 1, not 0, unless echo is true")
        # The prompt that is echoed has log-probabilities like the output.
        scored: dict[str, Any] = (
            {"prompt_logprobs": body.logprobs} if body.echo and body.prompt_logprobs is None else {}
        )
        params = body.to_params(
            deterministic_default=state.settings.deterministic_default,
            # Scoring needs no token; the engine gives one at least, which is not shown.
            max_tokens=1 if self._scores_only else body.max_tokens,
            logprobs=body.logprobs,
            **scored,
        )
        self._run = Run(
            state, "cmpl", name, [self._prompt(prompt) for prompt in body.prompts], body, params, prompt_field="prompt"
        )
        self._logprobs: dict[int, CompletionLogprobs] = {}
        """By choice: offsets go on from chunk to chunk."""
        self._begun: set[int] = set()
        """Choices of which something was sent."""
        self._prompt_scores: dict[int, list[LogprobDict | None]] = {}
        """By prompt: they come once, with one output."""
        self._waiting: dict[int, list[CompletionOutput]] = {}

    def _prompt(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str) and self._body.add_special_tokens is not False:
            return prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False, max_tokens=self._max_model_len)
        return {"prompt_token_ids": prompt}

    async def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choices = [
            choice for index, output in enumerate(await self._run.whole()) for choice in self._choices(index, output)
        ]
        return {**self._run.head("text_completion"), "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a response that is streamed."""
        head = self._run.head("text_completion")
        usage: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._run.deltas()) as deltas:
            async for index, output in deltas:
                if self._body.continuous_usage:
                    usage = {"usage": self._usage()}
                for choice in self._choices(index, output):
                    if _has_news(choice):
                        yield event({**head, "choices": [choice], **usage})
        if self._body.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage.as_dict()
        if self._scores_only:
            usage.update(completion_tokens=0, total_tokens=usage["prompt_tokens"])
        return usage

    def _choices(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The choices of an output, or what is new of them."""
        if output.prompt_logprobs is not None:
            self._prompt_scores[index] = output.prompt_logprobs
        waiting = self._waiting.setdefault(index, [])
        waiting += output.outputs
        if self._run.params.prompt_logprobs is not None and index not in self._prompt_scores:
            return  # another of the n outputs will bring them
        for new in waiting:
            yield self._choice(index, output, new)
        waiting.clear()

    def _choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> dict[str, Any]:
        """A choice, or what is new of it; the first part of an echoing one begins with the prompt."""
        choice_index = index * self._run.params.n + new.index
        is_first = choice_index not in self._begun
        self._begun.add(choice_index)
        with_prompt = bool(self._body.echo) and is_first
        text = "" if self._scores_only else new.text
        token_ids = [] if self._scores_only else new.token_ids
        choice: dict[str, Any] = {
            "index": choice_index,
            "text": (self._prompt_text(output) if with_prompt else "") + text,
            "logprobs": None,
            "finish_reason": "length" if self._scores_only else new.finish_reason,
            "stop_reason": new.stop_reason,
            "seed": new.seed,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._scores(index, output, new, with_prompt=with_prompt)
        if self._body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_scores[index])
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            choice |= {"prompt_token_ids": output.prompt_token_ids} if is_first else {}
        return choice

    def _scores(self, index: int, output: RequestOutput, new: CompletionOutput, *, with_prompt: bool) -> dict[str, Any]:
        choice_index = index * self._run.params.n + new.index
        as_ids = bool(self._body.return_tokens_as_token_ids)
        if choice_index not in self._logprobs:
            text = self._tokenizer.new_stream(self._run.params.skip_special_tokens)
            self._logprobs[choice_index] = CompletionLogprobs(as_ids, text)
        scores = self._logprobs[choice_index]
        if with_prompt:
            for token_id, entry in zip(output.prompt_token_ids, self._prompt_scores[index], strict=True):
                scores.add(token_id, self._tokenizer.token_text(token_id), entry)
        if not self._scores_only:
            for token_id, entry in zip(new.token_ids, new.logprobs or (), strict=True):
                scores.add(token_id, entry[token_id].decoded_token, entry)
        return scores.take()

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skips = self._run.params.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skips)


def _has_news(choice: dict[str, Any]) -> bool:
    return bool(
        choice["text"] or choice["finish_reason"] or choice.get("token_ids") or (choice["logprobs"] or {}).get("tokens")
    )
