"""`llm42 run`: one prompt, streamed to stdout as its tokens are committed, with a summary line on stderr."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llm42.cli import options
from llm42.cli.errors import reported
from llm42.cli.facts import Facts
from llm42.cli.loading import load
from llm42.cli.terminal import write_answer
from llm42.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm42 import AsyncLLM, RequestOutput, SamplingParams
    from llm42.model.tokenizer import Tokenizer

_PROMPT = "Prompt"


@dataclass(frozen=True, slots=True)
class Result:
    """What the summary line reports: the last item of the stream and the number of tokens of all of them."""

    last: RequestOutput
    num_tokens: int


def run(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; `-` or nothing reads it from stdin.", show_default=False),
    ] = None,
    *,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap the prompt in the model's chat template, or give it to the model as it is.",
            show_default="chat, where the model has a template",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before the prompt (chat only).", rich_help_panel=_PROMPT)
    ] = None,
    deterministic: options.Deterministic = False,
    seed: options.Seed = None,
    max_tokens: Annotated[int, typer.Option(help="Longest output, in tokens.", rich_help_panel=options.SAMPLING)] = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEOS = False,
    mode: options.Mode = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    window_size: options.WindowSize = None,
    verify_batch_size: options.VerifyBatchSize = None,
    num_threads: options.NumThreads = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_bytes: options.KVCacheBytes = None,
    debug: options.Debug = False,
) -> None:
    """Generate text for one prompt and stream it.

    The text goes to stdout as its tokens are committed; a summary line follows on stderr. Greedy unless --temperature
    is given. Ctrl-C cancels.
    """
    with reported(debug=debug):
        text = read_prompt(prompt)
        from llm42 import AsyncLLM, SamplingParams

        given = options.given(
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or None,
        )
        params = SamplingParams(
            **{"temperature": 0.0, **given}, max_tokens=max_tokens, ignore_eos=ignore_eos, deterministic=deterministic
        )
        fields = options.given(
            mode=mode,
            kernels=kernels,
            dtype=dtype,
            window_size=window_size,
            verify_batch_size=verify_batch_size,
            num_threads=num_threads,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_cache_bytes,
        )
        llm = load(AsyncLLM, model, fields)
        line = asyncio.run(_answer(llm, text, chat, system, params))
        Console(stderr=True, soft_wrap=True, highlight=False).print(line, style="dim", markup=False)


def read_prompt(argument: str | None) -> str:
    """The prompt from the argument, or from stdin where it is "-" or missing, without stdin's final newline.

    Raises:
        ValueError: there is no prompt.
    """
    if argument is None and sys.stdin.isatty():
        raise ValueError("prompt is missing; give it as an argument or on stdin")
    text = sys.stdin.read().removesuffix("\n") if argument in {None, "-"} else argument
    if not text:
        raise ValueError("prompt is empty; give it as an argument or on stdin")
    return text


def prompt_for(tokenizer: Tokenizer, text: str, chat: bool | None, system: str | None) -> str | dict[str, list[int]]:
    """The prompt as `generate` takes it: chat-template token ids, or the plain text.

    Raises:
        ValueError: a chat was asked for and the model has no chat template, or `system` was given with a raw prompt.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        if system is not None:
            raise ValueError("system needs a chat; this prompt is raw: leave --system away or put it into the prompt")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    return {"prompt_token_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True)}


async def _answer(llm: AsyncLLM, text: str, chat: bool | None, system: str | None, params: SamplingParams) -> str:
    try:
        result = await stream(llm, prompt_for(llm.tokenizer, text, chat, system), params, write_answer)
        return summary(result, llm.system_fingerprint)
    finally:
        await llm.aclose()


async def stream(
    llm: AsyncLLM, prompt: str | dict[str, list[int]], params: SamplingParams, write: Callable[[str], None]
) -> Result:
    """Generate, passing each piece of new text to `write`, and a final newline unless the text ends with one.

    Raises:
        RequestError: the engine accepted the request and did not complete it.
    """
    last, num_tokens, newline = None, 0, True
    try:
        async for output in llm.generate(prompt, params):
            last = output
            for completion in output.outputs:  # one, or none where a step committed nothing for this request
                num_tokens += len(completion.token_ids)
                if completion.text:
                    write(completion.text)
                    newline = completion.text.endswith("\n")
    finally:
        if not newline:
            write("\n")
    if last is None or not last.finished:
        raise RequestError("the engine ended the stream before the request was finished")
    return Result(last, num_tokens)


def summary(result: Result, fingerprint: str) -> str:
    """One line: tokens and speed, what determinism cost, and what is needed to get the same output again."""
    return Facts.of(result.last, result.num_tokens, fingerprint).line
