"""The asynchronous front end: many callers, one engine thread.

Invariant: only the engine thread touches the core. Callers send it commands through a queue and get deltas back on
their own event loops, so that neither can block the other. Leaving a stream early cancels the request.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector, failure
from llm42.engine.engine import Engine, Prompt, RequestGroup
from llm42.engine.frontend import Frontend
from llm42.engine.request import Request
from llm42.engine.watch import TokenEvent, TokenWatch
from llm42.errors import EngineStoppedError, LLM42Error, RequestError, RequestTimeoutError
from llm42.model.tokenizer import Tokenizer
from llm42.outputs import RequestOutput
from llm42.sampling.params import SamplingParams

logger = logging.getLogger(__name__)


Item = TypeVar("Item")


class _Mailbox(Generic[Item]):
    """From the engine thread to a caller's event loop."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def call_later(self, delay_s: float, item: Item) -> asyncio.TimerHandle:
        """Hand an item to the caller after a while, on the event loop."""
        return self._loop.call_later(delay_s, self.items.put_nowait, item)

    def send(self, item: Item) -> bool:
        """Hand an item to the caller, from the engine thread; return False if its event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            logger.debug("the caller's event loop is closed; nobody reads %r", item)
            return False
        return True


class _Stream(_Mailbox["RequestOutput | Exception"]):
    """One caller's end: the collector of its group, and the mailbox."""

    def __init__(self, group: RequestGroup, tokenizer: Tokenizer, *, is_whole: bool) -> None:
        super().__init__()
        self.group = group
        self.is_whole = is_whole
        self.collector = OutputCollector(group, tokenizer)


class _Watcher(_Mailbox["TokenEvent | None"]):
    """Somebody who watches the tokens of a request, which may not be there yet; None ends it."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id
        self.watches: list[TokenWatch] = []


@dataclass(frozen=True, slots=True)
class _Add:
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Cancel:
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Watch:
    watcher: _Watcher


@dataclass(frozen=True, slots=True)
class _Unwatch:
    watcher: _Watcher


_Command = _Add | _Cancel | _Watch | _Unwatch


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
        config = EngineConfig(model=str(model), **fields)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[Request, _Stream] = {}
        self._watchers: list[_Watcher] = []
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, "llm42-grammars")
        self._end: str | None = None
        """Why no more requests are taken; set under the lock, so that no command can follow the last one."""
        # Loaded in the thread that runs it: OpenMP keeps workers for each thread that ever computed, and where there
        # are more of them than cores, they sleep between parallel regions instead of waiting awake.
        self._loading: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(config,), name="llm42-engine", daemon=True)
        self._thread.start()
        self._loading.result()

    @property
    def _engine(self) -> Engine:
        return self._loading.result()

    @property
    def failure(self) -> str | None:
        """Why no more requests are served; None while they are."""
        return self._end

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        whole: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream what is committed, as it is committed.

        Each item holds only what is new; the last one is ``finished``. Breaking out of the iteration, or cancelling the
        task, cancels the request.

        Args:
            prompt: A text, or ``{"prompt_token_ids": [...]}``.
            sampling_params: How to choose tokens; the defaults if None.
            request_id: A name for messages, logs and `watch`; one is made if None.
            priority: Lower is served first; equal ones in order of arrival.
            whole: Give one item, at the end.
            timeout_s: How long the request may take, waiting included; None has no limit.

        Raises:
            ValueError: The prompt or a parameter is unusable.
            QueueFullError: The waiting queue is full.
            RequestTimeoutError: It took longer than `timeout_s`.
            EngineStoppedError: The engine was closed, or it failed.
            RequestError: The request failed while running.
        """
        if self._end is not None:
            raise EngineStoppedError(self._end)
        # In another thread: tokenizing a long prompt must not hold up the streams of others. Grammars, which may take
        # seconds to compile, have one to themselves, so that prompts do not wait for them.
        has_grammar = sampling_params is not None and sampling_params.structured_outputs is not None
        executor = self._compiling if has_grammar else None
        make = partial(self._engine.make_requests, prompt, sampling_params, request_id, priority)
        group = await asyncio.get_running_loop().run_in_executor(executor, make)
        stream = _Stream(group, self.tokenizer, is_whole=whole)
        self._submit(_Add(stream))
        timer = None if timeout_s is None else stream.call_later(timeout_s, RequestTimeoutError(timeout_s))
        is_over = False
        try:
            while not is_over:
                item = await stream.items.get()
                is_over = not isinstance(item, Exception) and item.finished
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if timer is not None:
                timer.cancel()
            if not is_over:
                self._commands.put(_Cancel(stream))

    async def watch(self, request_id: str) -> AsyncGenerator[TokenEvent, None]:
        """Stream what happens to the tokens of a request, candidates included, until all its outputs have ended.

        A request of that name which is not there yet is waited for; what one that runs has done so far comes first.

        Raises:
            EngineStoppedError: The engine was closed, or it failed.
        """
        watcher = _Watcher(request_id)
        self._submit(_Watch(watcher))
        try:
            while (event := await watcher.items.get()) is not None:
                yield event
        finally:
            self._commands.put(_Unwatch(watcher))

    async def aclose(self) -> None:
        """Stop the engine thread; running requests end with `RequestError`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, blocking."""
        with self._lock:
            if self._end is None:
                self._end = "the engine is closed"
                self._commands.put(None)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    def _submit(self, command: _Add | _Watch) -> None:
        with self._lock:
            if self._end is not None:
                raise EngineStoppedError(self._end)
            self._commands.put(command)

    def _run(self, config: EngineConfig) -> None:
        try:
            self._loading.set_result(Engine(config, prefers_throughput=False))
        except BaseException as error:  # noqa: BLE001  raised where the engine was asked for
            self._loading.set_exception(error)
            return
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
            changed = core.step()
            self._show_watchers()
            self._publish(changed)

    def _obey(self, command: _Command) -> None:
        if isinstance(command, _Add):
            self._add(command.stream)
        elif isinstance(command, _Cancel):
            self._forget(command.stream)
            self._show_watchers()
        elif isinstance(command, _Watch):
            self._watchers.append(command.watcher)
            self._find_watched(command.watcher)
        elif command.watcher in self._watchers:
            self._watchers.remove(command.watcher)

    def _add(self, stream: _Stream) -> None:
        try:
            self._engine.core.add(stream.group.sequences)
        except LLM42Error as error:
            stream.send(error)
        else:
            self._streams.update(dict.fromkeys(stream.group.sequences, stream))
            for watcher in self._watchers:
                self._find_watched(watcher)

    def _find_watched(self, watcher: _Watcher) -> None:
        """Connect a watcher that has nothing to watch to the request it waits for, if that is here."""
        for stream in self._streams.values():
            if not watcher.watches and stream.group.request_id == watcher.request_id:
                watcher.watches = [TokenWatch(sequence) for sequence in stream.group.sequences]

    def _show_watchers(self) -> None:
        for watcher in list(self._watchers):
            events = [event for watch in watcher.watches if (event := watch.look()) is not None]
            is_heard = all(watcher.send(event) for event in events)
            is_over = bool(watcher.watches) and all(watch.sequence.is_finished for watch in watcher.watches)
            if is_over:
                watcher.send(None)
            if is_over or not is_heard:
                self._watchers.remove(watcher)

    def _publish(self, changed: list[Request]) -> None:
        """Send each caller what is new, once per step; forget those that have it all, or are gone."""
        for stream in dict.fromkeys(self._streams[request] for request in changed if request in self._streams):
            reason = failure(stream.group)
            if stream.is_whole and reason is None and not stream.collector.is_finished:
                continue
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
        watchers = list(self._watchers)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                streams[command.stream] = None
            elif isinstance(command, _Watch):
                watchers.append(command.watcher)
        for stream in streams:  # everybody hears of it before anything else can go wrong
            stream.send(EngineStoppedError(reason))
        for stream in streams:
            self._forget(stream)
        for watcher in watchers:
            watcher.send(None)
