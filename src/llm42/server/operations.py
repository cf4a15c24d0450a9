"""What operators ask: is it alive, is it ready, what is it, how is it doing."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import llm42
from llm42.server.errors import APIError
from llm42.server.responses import JSON
from llm42.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()
    settings, llm = state.settings, state.llm

    @routes.get("/v1/models", tags=["OpenAI"], summary="The models that are served")
    async def models() -> Response:
        return JSON({"object": "list", "data": [_model(name) for name in settings.model_names]})

    @routes.get("/v1/models/{name:path}", tags=["OpenAI"], summary="One model")
    async def model(name: str) -> Response:
        return JSON(_model(state.check_model(name)))

    @routes.get("/health", tags=["Operations"], summary="200 while the engine runs")
    async def health() -> Response:
        if llm.failure is not None:
            raise APIError(503, llm.failure, code="engine_failed")
        return JSON({"status": "ok"})

    @routes.get("/ready", tags=["Operations"], summary="200 while requests should be sent here")
    async def ready() -> Response:
        if llm.failure is not None or state.is_draining():
            raise APIError(503, llm.failure or "the server is shutting down", code="not_ready")
        return JSON({"status": "ready"})

    @routes.get("/version", tags=["Operations"], summary="The version of this software")
    async def version() -> Response:
        return JSON({"version": llm42.__version__})

    @routes.get("/metrics", tags=["Operations"], summary="Metrics for Prometheus")
    def metrics(request: Request) -> Response:
        body, media_type = state.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    @routes.get("/llm42/status", tags=["LLM-42"], summary="What the server is and does right now")
    async def status() -> Response:
        return JSON(_status())

    def _model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "llm42",
            "root": settings.model_names[0],
            "parent": None,
            "max_model_len": llm.max_model_len,
        }

    def _status() -> dict[str, Any]:
        return {
            "model": settings.model_names[0],
            "mode": llm.config.mode,
            "summary": llm.summary,
            "system_fingerprint": llm.system_fingerprint,
            "accepts_deterministic": llm.refusal is None,
            "refusal": llm.refusal,
            "deterministic_default": settings.deterministic_default,
            "uptime_s": round(time.monotonic() - state.started, 3),
            **llm.stats().describe(),
        }

    return routes
