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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
    cases: list[dict[str, Any]] = []
    with _server(plan) as url:
        for index in range(plan.repeats + 1):  # the first one warms up
            for concurrency in plan.concurrency:
                requests = workload.requests[: 4 * concurrency]
                outputs: dict[str, list[list[int]]] = {}
                for way in WAYS:
                    started = time.perf_counter()
                    if way == "offline":
                        answers = _offline(engine, requests, concurrency, deterministic=plan.deterministic)
                    else:
                        answers = asyncio.run(_served(url, plan, requests, concurrency, way))
                    seconds = time.perf_counter() - started
                    outputs[way] = [answer.token_ids for answer in answers]
                    rate = sum(map(len, outputs[way])) / seconds
                    first_ms = 1e3 * percentile([answer.time_to_first_token_s for answer in answers], 50)
                    if index:
                        say(f"round {index}/{plan.repeats}  concurrency {concurrency}, {way}: {rate:.1f} output tok/s")
                        cases.append({"concurrency": concurrency, "way": way, "tok_s": rate, "ttft_ms": first_ms})
                if plan.deterministic and any(outputs[way] != outputs["offline"] for way in WAYS):
                    raise LLM42Error(
                        "DETERMINISM BROKEN: the server's outputs are not the engine's; please report this"
                    )
    return {"model": plan.model, "workload": workload.describe(), "deterministic": plan.deterministic, "runs": cases}


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
    """All requests through the server, each as soon as one of the connections is free."""
    limit = asyncio.Semaphore(concurrency)
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

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
                return await (_stream(client, body) if way == "stream" else _whole(client, body))

        return await asyncio.gather(*map(ask, requests))


async def _stream(client: httpx2.AsyncClient, body: Mapping[str, Any]) -> _Answer:
    started, first = time.perf_counter(), None
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for choice in _choices(response):
            token_ids += choice["token_ids"]
            first = first or time.perf_counter()
    return _Answer((first or time.perf_counter()) - started, token_ids)


async def _choices(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The choices of a streamed answer."""
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        data = json.loads(line[len("data: ") :])
        if "choices" not in data:
            raise LLM42Error(f"the server refused a request of the benchmark: {data}")
        for choice in data["choices"]:
            yield choice


async def _whole(client: httpx2.AsyncClient, body: Mapping[str, Any]) -> _Answer:
    started = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    if response.status_code != httpx2.codes.OK:
        raise LLM42Error(f"the server refused a request of the benchmark: {response.text}")
    return _Answer(time.perf_counter() - started, response.json()["choices"][0]["token_ids"])


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
