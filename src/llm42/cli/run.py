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
from llm42.cli.loading import load
from llm42.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm42 import AsyncLLM, RequestOutput, SamplingParams
    from llm42.model.tokenizer import Tokenizer

_PROMPT = "Prompt"
_SAMPLING = "Sampling"


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
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="The same bits every time, whatever else runs.", rich_help_panel=_SAMPLING
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed, 0 to 2**64 - 1.", show_default="drawn, and shown", rich_help_panel=_SAMPLING),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest output, in tokens.", rich_help_panel=_SAMPLING)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; higher is more varied.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Smallest set of tokens with this probability; 1 is off.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="The k most likely tokens; 0 is off.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[
        float,
        typer.Option(help="Least probability relative to the most likely token; 0 is off.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 discourages tokens that have occurred.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be repeated.", show_default=False, rich_help_panel=_SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after the end-of-text token.", rich_help_panel=_SAMPLING),
    ] = False,
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

        params = SamplingParams(
            deterministic=deterministic,
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or None,
            ignore_eos=ignore_eos,
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
        result = await stream(llm, prompt_for(llm.tokenizer, text, chat, system), params, _write)
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
    completion, metrics = result.last.outputs[0], result.last.metrics
    seconds = metrics.total_time_s - metrics.queue_time_s
    rate = result.num_tokens / seconds if seconds > 0 else 0.0
    parts = [
        f"{result.num_tokens} tokens ({completion.finish_reason})",
        f"{rate:.1f} tok/s",
        f"first token {metrics.time_to_first_token_s or 0.0:.2f} s",
        f"{metrics.num_windows} windows",
        f"{metrics.num_rollbacks} rollbacks",
        f"{metrics.num_recomputed_tokens} recomputed",
        f"seed {completion.seed}",
        f"fingerprint {fingerprint}",
    ]
    return " · ".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
