"""Real servers on loopback for the tests of the server: uvicorn in a thread, a tiny model behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from openai import OpenAI

from harness import CANONICAL
from llm42 import AsyncLLM
from llm42.server.app import create_app
from llm42.server.http import BoundedHTTP
from llm42.server.settings import ServerSettings

SMALL = {
    **CANONICAL,
    "mode": "verify",
    "kernels": "jitter",
    "window_size": 8,
    "verify_batch_size": 4,
    "kv_cache_bytes": 8 << 20,
    "num_threads": 1,
}
"""Jittery kernels: ordinary requests change with the batch, so a comparison of bits can fail."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    llm: AsyncLLM
    url: str
    port: int
    loop: asyncio.AbstractEventLoop

    def client(self, **fields) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60.0, **fields})

    def assert_clean(self, within_s: float = 10.0) -> None:
        """Assert that soon no block is taken, no request left, and nobody listened to."""
        core, deadline = self.llm._engine.core, time.monotonic() + within_s
        while core.has_work or core.pool.num_free != core.pool.num_usable or self.llm._streams or self.llm._watchers:
            assert time.monotonic() < deadline, "the engine still holds something for a request that is over"
            time.sleep(0.01)
        core.pool.check()


@contextmanager
def run_server(model, settings=None, **fields):
    """Serve a model on a free port; engine fields as for `AsyncLLM`."""
    llm = AsyncLLM(model, **{**SMALL, **fields})
    app = create_app(llm, ServerSettings(model_names=("tiny",), **(settings or {})))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHTTP, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Server(llm, f"http://127.0.0.1:{port}", port, server.servers[0].get_loop())
    finally:
        server.should_exit = True
        thread.join()
