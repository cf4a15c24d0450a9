"""The asynchronous front end: many callers, one engine thread.

Invariant: only the engine thread touches the core. Callers send it commands through a queue and get deltas back on
their own event loops, so that neither can block the other. Leaving a stream early cancels the request.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector, failure
from llm42.engine.engine import Engine, Prompt, RequestGroup
from llm42.engine.frontend import Frontend
from llm42.engine.request import Request
from llm42.errors import LLM42Error, RequestError
from llm42.model.tokenizer import Tokenizer
from llm42.outputs import RequestOutput
from llm42.sampling.params import SamplingParams

logger = logging.getLogger(__name__)


class _Stream:
    """One caller's end: the collector of its group, and the queue of its event loop."""

    def __init__(self, group: RequestGroup, tokenizer: Tokenizer) -> None:
        self.group = group
        self.collector = OutputCollector(group, tokenizer)
        self.items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, item: RequestOutput | Exception) -> bool:
        """Hand an item to the caller, from the engine thread; return False if its event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            logger.debug("the caller's event loop is closed; %s has no reader", self.group.request_id)
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Add:
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Cancel:
    stream: _Stream


class AsyncLLM(Frontend):
    """A model behind an engine thread.

    Args:
        model: As for `LLM`.
        **fields: Fields of `EngineConfig`.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: A field is out of range, or does not fit the model.
    """

    def __init__(self, model: str, **fields: Any) -> None:
        self._loaded = Engine(EngineConfig(model=str(model), **fields), prefers_throughput=False)
        self._commands: queue.SimpleQueue[_Add | _Cancel | None] = queue.SimpleQueue()
        self._streams: dict[Request, _Stream] = {}
        self._lock = threading.Lock()
        self._end: str | None = None
        """Why no more requests are taken; set under the lock, so that no command can follow the last one."""
        self._thread = threading.Thread(target=self._run, name="llm42-engine", daemon=True)
        self._thread.start()

    @property
    def _engine(self) -> Engine:
        return self._loaded

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Stream what is committed, as it is committed.

        Each item holds only what is new; the last one is ``finished``. Breaking out of the iteration, or cancelling the
        task, cancels the request.

        Raises:
            ValueError: The prompt or a parameter is unusable.
            QueueFullError: The waiting queue is full.
            RequestError: The request failed while running, or the engine was closed.
        """
        if self._end is not None:
            raise RequestError(self._end)
        group = self._engine.make_requests(prompt, sampling_params, request_id)
        stream = _Stream(group, self.tokenizer)
        self._submit(_Add(stream))
        is_over = False
        try:
            while not is_over:
                item = await stream.items.get()
                is_over = isinstance(item, Exception) or item.finished
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not is_over:
                self._commands.put(_Cancel(stream))

    async def aclose(self) -> None:
        """Stop the engine thread; running requests end with `RequestError`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, blocking."""
        with self._lock:
            if self._end is None:
                self._end = "the engine is closed"
                self._commands.put(None)
        self._thread.join()

    def _submit(self, command: _Add) -> None:
        with self._lock:
            if self._end is not None:
                raise RequestError(self._end)
            self._commands.put(command)

    def _run(self) -> None:
        self._engine.pin_threads()
        reason = "the engine was closed while the request ran"
        try:
            self._serve()
        except Exception as error:
            logger.exception("the engine thread failed; no more requests are served")
            reason = f"the engine failed with {type(error).__name__}: {error}"
            with self._lock:
                self._end = reason
        self._shut_down(reason)

    def _serve(self) -> None:
        core = self._engine.core
        while True:
            while not (core.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    return
                self._obey(command)
            self._publish(core.step())

    def _obey(self, command: _Add | _Cancel) -> None:
        stream = command.stream
        if isinstance(command, _Cancel):
            self._forget(stream)
            return
        try:
            self._engine.core.add(stream.group.sequences)
        except LLM42Error as error:
            stream.send(error)
        else:
            self._streams.update(dict.fromkeys(stream.group.sequences, stream))

    def _publish(self, changed: list[Request]) -> None:
        """Send each caller what is new, once per step; forget those that have it all, or are gone."""
        for stream in dict.fromkeys(self._streams[request] for request in changed if request in self._streams):
            reason = failure(stream.group)
            output = stream.collector.take()
            is_heard = stream.send(output if reason is None else RequestError(reason, [output]))
            if not is_heard or reason is not None or output.finished:
                self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        """End what still runs of a caller's request; it gets nothing more."""
        for sequence in stream.group.sequences:
            self._engine.core.cancel(sequence)
            self._streams.pop(sequence, None)

    def _shut_down(self, reason: str) -> None:
        streams = dict.fromkeys(self._streams.values())
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                streams[command.stream] = None
        for stream in streams:  # everybody hears of it before anything else can go wrong
            stream.send(RequestError(reason))
        for stream in streams:
            self._forget(stream)
