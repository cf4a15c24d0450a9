"""`llm42 chat`: a conversation in the terminal, with a model in this process or with a server.

On a terminal it asks for messages until the user ends it; Ctrl-C cancels an answer. From a pipe it answers once.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from llm42.cli import options
from llm42.cli.chat_commands import Commands
from llm42.cli.chat_conversation import Conversation
from llm42.cli.chat_input import history, read_message
from llm42.cli.chat_models import LONGEST_ANSWER, ContextFullError, LocalModel, local_params
from llm42.cli.errors import reported, show_error
from llm42.cli.loading import load
from llm42.cli.terminal import visible, write_answer
from llm42.errors import LLM42Error
from llm42.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from llm42.cli.chat_models import ChatModel
    from llm42.cli.facts import Facts

_CONVERSATION, _SERVER = "Conversation", "Server"


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|URL",
            help="A model as for `llm42 run`, or a server that speaks the OpenAI API (`http://127.0.0.1:8000`).",
            show_default=False,
        ),
    ],
    *,
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", rich_help_panel=_CONVERSATION)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the server's model.", show_default="the only one it has", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of the server; other users can see it in the process list.", rich_help_panel=_SERVER),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File whose first key is the server's.", rich_help_panel=_SERVER)
    ] = None,
    deterministic: options.Deterministic = False,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer, in tokens.",
            show_default=f"{LONGEST_ANSWER}, or the server's",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
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
    """Chat with a model, or with a server.

    Answers go to stdout as they come, one line about each to stderr. /help lists what can be typed beside messages;
    Ctrl-C cancels an answer, Ctrl-D ends. A message on stdin (not a terminal) is answered once.

    A server is told only the options that are given; its own defaults hold for the others.
    """
    with reported(debug=debug):
        message = None if sys.stdin.isatty() else _read_stdin()
        parameters = options.given(
            deterministic=deterministic or None,
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or None,
            ignore_eos=ignore_eos or None,
        )
        engine = options.given(
            mode=mode,
            kernels=kernels,
            dtype=dtype,
            window_size=window_size,
            verify_batch_size=verify_batch_size,
            num_threads=num_threads,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_cache_bytes,
        )
        server = options.given(model=model, api_key=api_key, api_key_file=api_key_file)
        with contextlib.closing(_open(target, parameters, engine, server)) as opened:
            session = _Session(opened, Conversation(system, parameters), debug=debug)
            if message is None:
                session.converse()
            else:
                session.answer(session.conversation.ask(opened, message, write_answer))


def _read_stdin() -> str:
    text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise ValueError("stdin is empty; write the message to it, or run in a terminal")
    return text


def _open(target: str, parameters: dict[str, Any], engine: dict[str, Any], server: dict[str, Any]) -> ChatModel:
    """The model or server, ready to answer.

    Raises:
        ValueError: An option does not belong to the target, or is bad.
    """
    is_server = target.lower().startswith(("http://", "https://"))
    if misplaced := list(engine if is_server else server):
        option = f"--{misplaced[0].replace('_', '-')}"
        kind, other = ("a server", "a model in this process") if is_server else ("a model in this process", "a server")
        raise ValueError(f"{option} is for {other}, and {target} is {kind}; leave it away")
    if is_server:
        from llm42.cli.chat_remote import RemoteModel

        return RemoteModel(target, server.get("model"), _api_key(**server))
    local_params(parameters)
    from llm42 import AsyncLLM

    llm = load(AsyncLLM, target, engine)
    try:
        return LocalModel(llm, target)
    except BaseException:
        llm.close()
        raise


def _api_key(api_key: str | None = None, api_key_file: Path | None = None, **_: object) -> str | None:
    if api_key_file is None:
        return api_key
    if api_key is not None:
        raise ValueError("--api-key and --api-key-file are both given; leave one away")
    from llm42.server.settings import read_api_keys

    return read_api_keys(api_key_file)[0]


class _Session:
    """One run of the command: it asks, shows, and survives what goes wrong with an answer."""

    def __init__(self, model: ChatModel, conversation: Conversation, *, debug: bool) -> None:
        self.conversation = conversation
        self._model = model
        self._debug = debug
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._commands = Commands(model, conversation, self.note, self.answer)

    def note(self, text: str) -> None:
        """Say something beside the answers."""
        self._console.print(visible(text), style="dim", markup=False)

    def answer(self, work: Coroutine[Any, Any, Facts]) -> None:
        """Wait for an answer, which appears as it comes, and say what there is to say about it."""
        facts = asyncio.run(work)
        self.note(facts.line)
        if facts.finish_reason == "length":
            self.note("cut off: max_tokens is reached, or the model's context is full")

    def converse(self) -> None:
        """Answer messages and obey commands until the user ends the chat."""
        self.note(f"{self._model.name}: type a message; /help lists commands, Ctrl-D ends")
        with history(cache_dir() / "chat_history"):
            while True:
                try:
                    text, is_line = read_message()
                except (EOFError, KeyboardInterrupt):
                    sys.stderr.write("\n")
                    return
                except UnicodeDecodeError as error:
                    show_error(error, "; type it again")
                    continue
                if is_line and text.strip() in {"/quit", "/exit"}:
                    return
                self._take(text, is_line)

    def _take(self, text: str, is_line: bool) -> None:
        try:
            if not (is_line and self._commands.obey(text)):
                self.answer(self.conversation.ask(self._model, text, write_answer))
        except KeyboardInterrupt:
            self.note("cancelled")
        except BrokenPipeError:
            raise  # the reader of a pipe has gone; nobody is left to tell
        except (ValueError, LLM42Error, OSError) as error:
            if self._debug:
                raise
            is_full = isinstance(error, ContextFullError)
            show_error(error, "; /new starts a new conversation, /save FILE keeps this one" if is_full else "")
