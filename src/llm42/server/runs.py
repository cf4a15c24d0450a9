"""The run of one HTTP request: its prompts in the engine, what it has used, and what every answer of it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm42.engine.engine import Prompt
from llm42.outputs import RequestMetrics, RequestOutput
from llm42.sampling.params import SamplingParams
from llm42.server.errors import invalid
from llm42.server.schemas import SamplingBody

if TYPE_CHECKING:
    from llm42.server.state import ServerState


@dataclass
class Usage:
    """Tokens of a run so far."""

    prompts: dict[int, RequestOutput] = field(default_factory=dict)
    """The newest output of each prompt."""
    completion_tokens: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count what is new."""
        self.prompts[index] = output
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        """The `usage` of the API, with what determinism did under `llm42`."""
        prompt_tokens = sum(len(output.prompt_token_ids) for output in self.prompts.values())
        metrics: list[RequestMetrics] = [output.metrics for output in self.prompts.values()]
        cached = sum(metric.num_cached_tokens for metric in metrics)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "llm42": {
                "windows": sum(metric.num_windows for metric in metrics),
                "rollbacks": sum(metric.num_rollbacks for metric in metrics),
                "recomputed_tokens": sum(metric.num_recomputed_tokens for metric in metrics),
                "cached_tokens": cached,
            },
        }


class Run:
    """One request: some prompts with the same parameters.

    Args:
        state: The server.
        kind: The prefix of its id, such as `chatcmpl`.
        request_id: Its name in headers, logs and events.
        prompts: What goes to the engine.
        body: The request.
        params: How to choose tokens.
        prompt_field: The field of the body that the prompts come from.
    """

    def __init__(
        self,
        state: ServerState,
        kind: str,
        request_id: str,
        prompts: Sequence[Prompt],
        body: SamplingBody,
        params: SamplingParams,
        *,
        prompt_field: str,
    ) -> None:
        self._state = state
        self.id = f"{kind}-{request_id}"
        self._request_id = request_id
        self._model = state.check_model(body.model)
        self._priority = body.priority or 0
        self.prompts = prompts
        self.params = params
        self._prompt_field = prompt_field
        self._created = int(time.time())
        num_sequences, room = len(prompts) * params.n, state.llm.config.max_queue_len
        if num_sequences > room:
            field = prompt_field if len(prompts) > 1 else "n"
            raise ValueError(
                f"{field} asks for {num_sequences} outputs, more than the queue holds (max_queue_len is {room}); "
                "send several requests"
            )
        self.usage = Usage()

    def head(self, kind: str) -> dict[str, Any]:
        """What every body of this run begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._state.llm.system_fingerprint,
        }

    async def whole(self) -> list[RequestOutput]:
        """The finished output of each prompt, in order."""
        async with aclosing(self._outputs(whole=True)) as stream:
            outputs = {index: output async for index, output in stream}
        return [outputs[index] for index in range(len(self.prompts))]

    async def deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new, with the index of its prompt."""
        async with aclosing(self._outputs(whole=False)) as stream:
            async for item in stream:
                yield item

    async def _outputs(self, *, whole: bool) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        meters = [self._state.metrics.request(self.params) for _ in self.prompts]
        streams = [
            self._state.llm.generate(
                prompt,
                self.params,
                self._request_id,
                priority=self._priority,
                whole=whole,
                timeout_s=self._state.settings.request_timeout_s,
            )
            for prompt in self.prompts
        ]
        try:
            async with aclosing(_merged(streams)) as merged:
                async for index, output in merged:
                    self.usage.add(index, output)
                    meters[index].observe(output)
                    yield index, output
        except ValueError as error:
            raise invalid(error, dict.fromkeys(("prompt", "prompt_token_ids", "text"), self._prompt_field)) from None


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The items of several streams as they come; the first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def drain(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as error:  # noqa: BLE001  handed on to whoever reads
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(drain(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
