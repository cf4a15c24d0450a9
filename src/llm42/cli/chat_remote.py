"""An OpenAI-compatible server as `llm42 chat` talks to it, ours or another.

Invariant: a request names only the parameters that the user gave, so that servers which know fewer of them still
answer, and their own defaults hold. Leaving a stream closes its connection, which is how a server hears of it.
"""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx2

from llm42.cli.chat_models import ChatModel, ContextFullError, Message
from llm42.cli.facts import Facts, Verification
from llm42.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

# Servers send something now and then while they work on a long prompt; one that is silent for so long is gone.
_TIMEOUT = httpx2.Timeout(10.0, read=300.0)
_MAX_NAMES = 10


class RemoteModel(ChatModel):
    """One model of a server.

    Args:
        url: The server, or its API root where that is not /v1.
        model: The model's name; None takes the only one there is.
        api_key: Sent as a bearer token.

    Raises:
        ValueError: The URL is not one, or the server has several models and none was named.
        RequestError: The server cannot be reached, or does not answer as one.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"URL {url!r} is not one: {error}") from error
        if not parsed.host:
            raise ValueError(f"URL {url!r} has no host; give one such as http://127.0.0.1:8000")
        root = url.rstrip("/")
        self._root = root if parsed.path.strip("/") else f"{root}/v1"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.name = self._only_model() if model is None else model

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Nothing: what a value may be is for the server to say."""

    async def stream(
        self, messages: Sequence[Message], parameters: Mapping[str, Any]
    ) -> AsyncGenerator[str | Facts, None]:
        """Ask the server."""
        body = {
            **parameters,
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = _Answer(self._root)
        try:
            async with (
                httpx2.AsyncClient(timeout=_TIMEOUT, headers=self._headers) as client,
                client.stream("POST", f"{self._root}/chat/completions", json=body) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                async with aclosing(aiter(httpx2.EventSource(response))) as events:  # type: ignore[type-var]
                    async for event in events:
                        if event.data == "[DONE]":
                            break
                        if text := answer.take(event.data):
                            yield text
        except httpx2.HTTPError as error:
            raise _unreachable(self._root, error) from error
        yield answer.facts(is_deterministic=bool(parameters.get("deterministic")))

    def close(self) -> None:
        """Nothing: each request has a connection of its own."""

    def _only_model(self) -> str:
        url = f"{self._root}/models"
        try:
            response = httpx2.get(url, headers=self._headers, timeout=_TIMEOUT)
        except httpx2.HTTPError as error:
            raise _unreachable(self._root, error) from error
        if not response.is_success:
            raise _refusal(response)
        try:
            names = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{url} did not answer with a list of models; name one with --model") from error
        if len(names) != 1:
            listed = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
            raise ValueError(f"the server at {self._root} has {len(names)} models; name one with --model: {listed}")
        return names[0]


class _Answer:
    """What the chunks of a stream have said so far."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._finish_reason: str | None = None
        self._chunk: dict[str, Any] = {}
        """Every field that a chunk had, the latest value of each."""
        self._seed: int | None = None

    def take(self, data: str) -> str:
        """The new text of a chunk.

        Raises:
            RequestError: It is not a chunk, or it is an error.
        """
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise _error(f"the server at {self._root} failed", chunk)
            self._chunk |= {name: value for name, value in chunk.items() if value is not None}
            text = ""
            for choice in chunk.get("choices") or ():
                text += choice["delta"].get("content") or ""
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                self._seed = choice.get("seed", self._seed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"the server at {self._root} sent what is no chunk of a chat completion: {data:.200}"
            ) from error
        if text and self._first_token is None:
            self._first_token = time.perf_counter()
        return text

    def facts(self, *, is_deterministic: bool) -> Facts:
        """About the whole answer.

        Raises:
            RequestError: The stream has ended before the answer.
        """
        if self._finish_reason is None:
            raise RequestError(f"the server at {self._root} ended the stream before the answer was finished")
        ended = time.perf_counter()
        usage = _mapping(self._chunk.get("usage"))
        costs = [_mapping(usage.get("llm42")).get(field) for field in Verification.__slots__]
        windows, rollbacks, recomputed = (value if isinstance(value, int) else 0 for value in costs)
        num_tokens = usage.get("completion_tokens")
        fingerprint = self._chunk.get("system_fingerprint")
        return Facts(
            finish_reason=self._finish_reason,
            num_tokens=num_tokens if isinstance(num_tokens, int) else None,
            seconds=ended - self._started,
            first_token_s=(self._first_token or ended) - self._started,
            seed=self._seed,
            fingerprint=None if fingerprint is None else str(fingerprint),
            verification=Verification(windows, rollbacks, recomputed) if is_deterministic or windows else None,
        )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unreachable(root: str, error: httpx2.HTTPError) -> RequestError:
    return RequestError(f"no answer from {root} ({type(error).__name__}: {error}); is the server running?")


def _refusal(response: httpx2.Response) -> Exception:
    """What a status that is not success means, in the server's words."""
    try:
        document = response.json()
    except ValueError:
        document = response.text
    remedy = "; give --api-key-file" if response.status_code in {401, 403} else ""
    return _error(f"{response.url} answered {response.status_code}", document, remedy)


def _error(what: str, document: object, remedy: str = "") -> Exception:
    """The error of a body in OpenAI's shape, or in any other."""
    error = _mapping(document).get("error", document)
    message = str(_mapping(error).get("message", error))
    # One code, and the words of vLLM and llama.cpp.
    is_full = _mapping(error).get("code") == "context_length_exceeded" or any(
        words in message for words in ("maximum context length", "context size")
    )
    return (ContextFullError if is_full else RequestError)(f"{what}: {message:.500}{remedy}")
