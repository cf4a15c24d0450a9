"""How a command fails: one line on stderr that says what to do, and an exit status; the traceback only on request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from llm42.cli.terminal import visible
from llm42.errors import LLM42Error

if TYPE_CHECKING:
    from collections.abc import Iterator

CANCELLED = 130  # as a shell reports a process that SIGINT ended


@contextlib.contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn expected errors of the block into a line on stderr and an exit status.

    ValueError (bad input, and ModelError) exits with 2; other errors of this package and of the operating system
    with 1; Ctrl-C with 130. Anything else is a bug and keeps its traceback, and so does everything with `debug`.
    """
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("cancelled")
        raise typer.Exit(CANCELLED) from None
    except BrokenPipeError:
        raise  # the reader of a pipe has gone; nobody is left to tell
    except (ValueError, LLM42Error, OSError) as error:
        if debug:
            raise
        show_error(error)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def show_error(error: Exception, remedy: str = "") -> None:
    """Print the error's message as one line on stderr; it may quote what a server or a file says."""
    message = visible(" ".join(str(error).split())) or type(error).__name__
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message, remedy))
