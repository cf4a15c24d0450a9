"""From the messages and tools of a request to a prompt, and what its tools mean for the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from llm42.model.tokenizer import Tokenizer
from llm42.sampling import StructuredOutputs
from llm42.server.schemas import ChatBody, TokenizeBody, constraint
from llm42.server.tools import (
    PARSERS,
    ForcedToolParser,
    ToolOptions,
    ToolParser,
    call_ids,
    demands_short_ids,
    describe_tools,
    forced_schema,
    knows_tools,
    messages_for_template,
    needs_special_tokens,
    parse_tools,
    parser_name_for,
    strict_structural_tag,
    template_arguments,
)

_OWN_FIELDS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "self"}
)
"""What a body says outside of chat_template_kwargs, and what no template can be given."""


def render(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, options: ToolOptions | None, max_model_len: int
) -> list[int]:
    """The prompt of a conversation.

    Args:
        tokenizer: The model's.
        body: The request.
        options: Its tools, or None.
        max_model_len: The most tokens that are of use.

    Raises:
        ValueError: The messages do not fit the model's chat template.
    """
    tools = options.tools if options else ()
    template = tokenizer.tool_chat_template if tools else tokenizer.chat_template
    if template is None:
        raise ValueError("messages need a chat template, and this model has none; use /v1/completions")
    if len(body.messages or ()) > max_model_len:
        raise ValueError(f"messages has {len(body.messages or ())} messages, more than max_model_len {max_model_len}")
    messages = messages_for_template(body.messages or (), template)
    if not knows_tools(template):
        messages = describe_tools(messages, tools)
    kwargs = dict(body.chat_template_kwargs or {})
    if taken := sorted(_OWN_FIELDS & kwargs.keys()):
        raise ValueError(f"chat_template_kwargs must not have {taken[0]}; it cannot be set there")
    kwargs |= template_arguments(tools, template)
    if isinstance(body, ChatBody) and body.documents is not None:
        kwargs["documents"] = body.documents
    if body.continue_final_message:
        kwargs["continue_final_message"] = True
    text = tokenizer.render_chat(
        messages,
        add_generation_prompt=not (body.add_generation_prompt is False or body.continue_final_message),
        **kwargs,
    )
    # Templates write BOS themselves, where a model wants it.
    try:
        return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens), max_tokens=max_model_len)
    except ValueError as error:
        raise ValueError(f"messages: {error}") from None


def warm_up(tokenizer: Tokenizer) -> None:
    """Load what rendering needs, which takes seconds, before the first request does."""
    if tokenizer.chat_template is not None:
        with contextlib.suppress(ValueError):  # a template may want other messages
            tokenizer.render_chat([{"role": "user", "content": "Hello"}])


class ToolUse:
    """What the tools of a chat request ask of the sampler, and how calls are found in its answer.

    Args:
        tokenizer: The model's.
        parser: How the model writes calls; None if it is not known.
        options: The request's tools, or None.

    Raises:
        ValueError: The model cannot be asked for what the request wants.
    """

    def __init__(self, tokenizer: Tokenizer, parser: str | None, options: ToolOptions | None) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._schema = forced_schema(options) if options else None
        self._family: type[ToolParser] | None = None
        if options and self._schema is None:
            if parser is None:
                raise ValueError(
                    'tool_choice "auto" needs a model whose format of tool calls is known; use "required", or start '
                    "the server with --tool-call-parser"
                )
            self._family = PARSERS[parser]

    @property
    def is_named(self) -> bool:
        """Whether the request names the function to call; then the answer ends like any other, not with a call."""
        return self._options is not None and self._options.named is not None

    @property
    def constraint(self) -> StructuredOutputs | None:
        """What the answer must look like."""
        if self._schema is not None:
            return constraint("tools", json=self._schema)
        tag = strict_structural_tag(self._options, self._family) if self._options and self._family else None
        return None if tag is None else constraint("tools", structural_tag=tag)

    @property
    def replaced_params(self) -> dict[str, Any]:
        """Parameters that finding calls needs."""
        needs_special = self._family is not None and needs_special_tokens(self._family, self._tokenizer)
        return {"skip_special_tokens": False} if needs_special else {}

    def new_parser(self, prompt_token_ids: Sequence[int], seed: int) -> ToolParser | None:
        """A parser for one answer; None if it is text and nothing else."""
        options = self._options
        if options is None:
            return None
        short = demands_short_ids(self._tokenizer.tool_chat_template or "")
        ids = call_ids(prompt_token_ids, seed, short=short)
        if self._family is not None:
            return self._family(ids, parallel=options.parallel)
        return ForcedToolParser(ids, name=options.named.name if options.named else None, parallel=options.parallel)


def tool_call_parser(tokenizer: Tokenizer, name: str | None) -> str | None:
    """The name of the parser for a model's tool calls: the given one, or as its chat template shows.

    Raises:
        ValueError: There is no parser of that name.
    """
    if name is not None and name not in PARSERS:
        raise ValueError(f"tool_call_parser must be one of {', '.join(PARSERS)}, not {name!r}")
    return name or parser_name_for(tokenizer.tool_chat_template)


def tools_of(body: ChatBody | TokenizeBody) -> ToolOptions | None:
    """The tools of a request, checked.

    Raises:
        ValueError: A tool, or how it is to be used, is not valid.
    """
    if isinstance(body, TokenizeBody):
        return parse_tools(body.tools)
    return parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
