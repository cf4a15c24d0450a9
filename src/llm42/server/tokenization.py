"""/tokenize, /detokenize, /tokenizer_info: the model's tokenizer over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from llm42.server.conversation import render, tools_of
from llm42.server.responses import JSON
from llm42.server.schemas import DetokenizeBody, TokenizeBody
from llm42.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["Tokenizer"])
    tokenizer = state.llm.tokenizer

    @routes.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeBody) -> Response:
        state.check_model(body.model)
        token_ids = await asyncio.to_thread(_tokenize, body)
        texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return JSON(
            {
                "count": len(token_ids),
                "max_model_len": state.llm.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    @routes.post("/detokenize", summary="Text of token ids")
    async def detokenize(body: DetokenizeBody) -> Response:
        state.check_model(body.model)
        for index, token_id in enumerate(body.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise ValueError(f"tokens[{index}] must be in 0..{tokenizer.vocab_size - 1}, not {token_id}")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSON({"prompt": text})

    @routes.get("/tokenizer_info", summary="What the tokenizer is")
    async def tokenizer_info() -> Response:
        info: dict[str, Any] = {
            **tokenizer.special_tokens,
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "max_model_len": state.llm.max_model_len,
            "chat_template": tokenizer.chat_template,
        }
        return JSON(info)

    def _tokenize(body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        if body.messages is not None:
            return render(tokenizer, body, tools_of(body), state.llm.max_model_len)
        return tokenizer.encode(
            body.prompt or "",
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=state.llm.max_model_len,
        )

    return routes
