"""What HTTP costs: the same requests through a server and straight through an engine, interleaved and repeated.

The server is a process of its own, as for its users, and so is the load: the client runs here, on the same cores. Both
engines have the same configuration, without a prefix cache, since every round sends the same prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from llm42.bench.measure import percentile, run_requests
from llm42.bench.workloads import BenchRequest, Workload
from llm42.config import EngineConfig
from llm42.engine.engine import Engine
from llm42.errors import LLM42Error

WAYS = ("offline", "stream", "whole")
"""Straight through the engine; answers streamed; answers in one piece."""
_START_TIMEOUT_S = 300.0
_SINGLE_TURNS = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """What to measure.

    Raises:
        ValueError: A field is out of range; the message names the field, its value and what is allowed.
    """

    model: str
    concurrency: tuple[int, ...] = (1, 32)
    deterministic: bool = False
    repeats: int = 3
    fields: Mapping[str, Any]
    """Other fields of `EngineConfig`, which are options of the server too."""

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1 or self.repeats < 1:
            raise ValueError(f"concurrency {self.concurrency} and repeats {self.repeats} must be at least 1")
        EngineConfig(model=self.model, **self.fields)


@dataclass(frozen=True, slots=True)
class _Answer:
    """One request as its client saw it."""

    time_to_first_token_s: float
    token_ids: list[int]


def run_serving(plan: ServingPlan, workload: Workload, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure; plain data: per concurrency and way output tok/s and times to the first token of each round.

    Raises:
        LLM42Error: The server did not start, a request failed, or deterministic outputs differ.
    """
    engine = Engine(EngineConfig(model=plan.model, enable_prefix_caching=False, **plan.fields))
    runs: list[dict[str, Any]] = []
    with _server(plan) as url:
        for index in range(plan.repeats + 1):  # the first one warms up
            for concurrency, requests in _turns(plan, workload):
                turn = {way: _run(engine, url, plan, requests, concurrency, way) for way in WAYS}
                if plan.deterministic and any(run["outputs"] != turn["offline"]["outputs"] for run in turn.values()):
                    raise LLM42Error(
                        "DETERMINISM BROKEN: the server's outputs are not the engine's; please report this"
                    )
                rates = ", ".join(f"{way} {run['tok_s']:.1f}" for way, run in turn.items())
                say(f"round {index}/{plan.repeats}  concurrency {concurrency}: output tok/s {rates}")
                if index:
                    runs += [{name: run[name] for name in run if name != "outputs"} for run in turn.values()]
    return {"model": plan.model, "workload": workload.describe(), "deterministic": plan.deterministic, "runs": runs}


def _turns(plan: ServingPlan, workload: Workload) -> Iterator[tuple[int, Sequence[BenchRequest]]]:
    """What is run through all ways before anything else is: little at a time, because machines drift."""
    for concurrency in plan.concurrency:
        if concurrency == 1:
            yield from ((1, [request]) for request in workload.requests[:_SINGLE_TURNS])
        else:
            yield concurrency, workload.requests[: 2 * concurrency]


def _run(
    engine: Engine, url: str, plan: ServingPlan, requests: Sequence[BenchRequest], concurrency: int, way: str
) -> dict[str, Any]:
    """One run of requests, with its figures."""
    started = time.perf_counter()
    if way == "offline":
        answers = _offline(engine, requests, concurrency, deterministic=plan.deterministic)
    else:
        answers = asyncio.run(_served(url, plan, requests, concurrency, way))
    seconds = time.perf_counter() - started
    outputs = [answer.token_ids for answer in answers]
    return {
        "concurrency": concurrency,
        "way": way,
        "tok_s": sum(map(len, outputs)) / seconds,
        "ttft_ms": 1e3 * percentile([answer.time_to_first_token_s for answer in answers], 50),
        "outputs": outputs,
    }


def summarize_serving(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per concurrency and way the medians, and the median ratio to offline, round by round."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    rows = []
    for concurrency in dict.fromkeys(run["concurrency"] for run in runs):
        by_way = {way: [run for run in runs if (run["concurrency"], run["way"]) == (concurrency, way)] for way in WAYS}
        for way, own in by_way.items():
            pairs = list(zip(own, by_way["offline"], strict=True))
            rows.append(
                {
                    "concurrency": concurrency,
                    "way": way,
                    "tok_s": statistics.median(run["tok_s"] for run in own),
                    "vs_offline": statistics.median(run["tok_s"] / base["tok_s"] for run, base in pairs),
                    "ttft_ms": statistics.median(run["ttft_ms"] for run in own),
                    "added_ttft_ms": statistics.median(run["ttft_ms"] - base["ttft_ms"] for run, base in pairs),
                }
            )
    return rows


def _offline(
    engine: Engine, requests: Sequence[BenchRequest], concurrency: int, *, deterministic: bool
) -> list[_Answer]:
    flags = [deterministic] * len(requests)
    trace = run_requests(engine, requests, flags, concurrency, in_batches=False)
    return [_Answer(line.time_to_first_token_s, line.request.ledger.committed) for line in trace.timelines]


async def _served(
    url: str, plan: ServingPlan, requests: Sequence[BenchRequest], concurrency: int, way: str
) -> list[_Answer]:
    """All requests through the server, each as soon as one of the clients is free."""
    limit = asyncio.Semaphore(concurrency)

    async def ask(request: BenchRequest) -> _Answer:
        body = {
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "seed": 0,
            "deterministic": plan.deterministic,
            "return_token_ids": True,
            "stream": way == "stream",
        }
        async with limit:
            return await _post(url, json.dumps(body).encode())

    return await asyncio.gather(*map(ask, requests))


async def _post(url: str, body: bytes) -> _Answer:
    """Send a completion and read its answer, streamed or whole.

    By hand: a client library takes milliseconds of its own for each request, on the cores that the server needs.
    """
    host, port = url.removeprefix("http://").split(":")
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    first = None
    token_ids: list[int] = []
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        # The answers that matter are one line each: an event, or the whole body.
        async for line in reader:
            data = line.removeprefix(b"data: ")
            if not data.startswith(b"{"):
                continue
            answer = json.loads(data)
            if "choices" not in answer:
                raise LLM42Error(f"the server refused a request of the benchmark: {answer}")
            first = first or time.perf_counter()
            token_ids += [token_id for choice in answer["choices"] for token_id in choice["token_ids"]]
    finally:
        writer.close()
    return _Answer((first or time.perf_counter()) - started, token_ids)


@contextlib.contextmanager
def _server(plan: ServingPlan) -> Iterator[str]:
    """A server of the plan's model in a process of its own; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in plan.fields.items()]
    command = [sys.executable, "-m", "llm42", "serve", plan.model, f"--port={port}", "--no-enable-prefix-caching"]
    process = subprocess.Popen([*command, *options, "--log-level=warning"])  # noqa: S603  this program
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LLM42Error(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/ready").status_code == httpx2.codes.OK
    return False
