"""The application: endpoints, the page, errors in one shape, and the middleware around them."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import llm42
from llm42.engine.async_llm import AsyncLLM
from llm42.errors import LLM42Error
from llm42.server import chat, completions, documents, events, operations, tokenization
from llm42.server.conversation import warm_up
from llm42.server.errors import APIError, as_api_error, invalid_body
from llm42.server.middleware import REQUEST_ID_HEADER, AccessLog, Guard
from llm42.server.responses import JSON, ClientGoneError, error_response
from llm42.server.settings import ServerSettings
from llm42.server.state import ServerState

logger = logging.getLogger(__name__)

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_DESCRIPTION = "The OpenAI API, with a determinism switch: `deterministic` requests return the same bits in any batch."


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The server's application. It closes the engine when it ends.

    Args:
        llm: The engine.
        settings: Everything about HTTP.

    Returns:
        The ASGI application; its `state.server` is the `ServerState`.

    Raises:
        ValueError: A setting does not fit the model.
    """
    state = ServerState(llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(warm_up, llm.tokenizer)
        yield
        await llm.aclose()

    app = FastAPI(
        title="LLM-42",
        version=llm42.__version__,
        description=_DESCRIPTION,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.server = state
    app.include_router(chat.router(state), responses=documents.COMPLETIONS)
    app.include_router(completions.router(state), responses=documents.COMPLETIONS)
    app.include_router(tokenization.router(state), responses=documents.WRITES)
    app.include_router(events.router(state), responses=documents.EVENTS)
    app.include_router(operations.router(state), responses=documents.READS)
    mimetypes.add_type("text/javascript", ".js")  # some systems say otherwise, and browsers then refuse modules
    # Not mounted: then a wrong method of an endpoint would be an unknown path.
    app.router.default = _Page(directory=Path(__file__).parent / "ui", html=True)
    _handle_errors(app)
    app.add_middleware(Guard, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.add_middleware(AccessLog, count=state.metrics.count_http_request)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error in the shape of the OpenAI API."""

    async def known(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101  what it is registered for
        return error_response(invalid_body(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  what it is registered for
        where = f"{request.method} {request.url.path}"
        message = f"{where}: {error.detail}"
        return JSON(APIError(error.status_code, message).body, error.status_code, headers=error.headers)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    for kind in (APIError, LLM42Error, ValueError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(ClientGoneError, gone)


class _Page(StaticFiles):
    """The page at / and its files; every other path that is no endpoint is not found, whatever the method."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The response for a path."""
        if scope["method"] not in {"GET", "HEAD"}:
            raise HTTPException(404, "Not Found")
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response
