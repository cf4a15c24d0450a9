"""/llm42/events/{request_id}: candidates, commits and rollbacks of a request, while they happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from llm42.engine.watch import TokenEvent
from llm42.server.errors import APIError
from llm42.server.responses import DONE, EventStream, event
from llm42.server.state import ServerState

_PATIENCE_S = 30.0


def router(state: ServerState) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["LLM-42"])

    @routes.get("/llm42/events/{request_id:path}", summary="What happens to the tokens of a request")
    async def events(request_id: str) -> Response:
        return EventStream(_events(request_id), state.settings.keep_alive_s)

    async def _events(request_id: str) -> AsyncGenerator[bytes, None]:
        yield b": watching\n\n"  # so that the client knows when to send its request
        async with aclosing(state.llm.watch(request_id)) as watched:
            patience: float | None = _PATIENCE_S
            while True:
                try:
                    news = await asyncio.wait_for(anext(watched), patience)
                except StopAsyncIteration:
                    break
                except asyncio.TimeoutError:
                    raise APIError(
                        404, f"no request {request_id!r:.80} came within {_PATIENCE_S:g} s", code="request_not_found"
                    ) from None
                patience = None
                yield event(_as_dict(news))
        yield DONE

    def _as_dict(news: TokenEvent) -> dict[str, Any]:
        return {
            "choice": news.choice,
            "position": news.position,
            "committed": _tokens(news.committed),
            "candidates": _tokens(news.candidates),
            "rolled_back": _tokens(news.rolled_back),
            "finished": news.finished,
        }

    def _tokens(token_ids: Iterable[int]) -> list[dict[str, Any]]:
        return [{"id": token_id, "text": state.llm.tokenizer.token_text(token_id)} for token_id in token_ids]

    return routes
