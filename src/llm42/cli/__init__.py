"""The command line: one module per command. May import everything; nothing imports it.

Invariant: importing this package does not import torch, so that `llm42 --help` is instant; commands import what they
need when they run. Results go to stdout, everything else (progress, summaries, errors) to stderr. Exit status: 0 done,
1 failed, 2 bad input, 130 cancelled.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llm42 import __version__
from llm42.cli.bench import app as bench_app
from llm42.cli.chat import chat
from llm42.cli.demo import demo
from llm42.cli.doctor import doctor
from llm42.cli.pull import pull
from llm42.cli.run import run
from llm42.cli.serve import serve

_EPILOG = """
**Examples**

`llm42 pull smollm2-135m-instruct` : get a small model once (93 MB), without any account

`llm42 run smollm2-135m-instruct "Why is the sky blue?"` : chat, streamed

`llm42 run smollm2-135m-instruct "Once upon a time" --raw --deterministic --temperature 0.8 --seed 42` : the same bits

`llm42 serve smollm2-135m-instruct` : the OpenAI API and a page, on this machine

`llm42 demo` : the same prompts alone and in a busy batch, ordinary and deterministic

`llm42 doctor` : which kernels and shape classes this machine has, and whether the promise holds

Each command has its own help: `llm42 run --help`
"""

_RUN_EPILOG = """
**Examples**

`llm42 run smollm2-135m-instruct "Why is the sky blue?" --deterministic`

`llm42 run ./model.gguf --raw --temperature 0.7 --stop "The end" < story.txt`
"""

_SERVE_EPILOG = """
**Examples**

`llm42 serve smollm2-135m-instruct` : the API at http://127.0.0.1:8000/v1, a page to try it at http://127.0.0.1:8000/

`llm42 serve smollm2-135m-instruct --host 0.0.0.0 --api-key-file keys.txt --deterministic-default`
"""

_CHAT_EPILOG = """
**Examples**

`llm42 chat smollm2-135m-instruct --system "You are brief."`

`llm42 chat smollm2-135m-instruct --deterministic --temperature 0.8 --seed 42` : the same questions, the same answers

`llm42 chat http://127.0.0.1:8000 --api-key-file key.txt`

`echo "Why is the sky blue?" | llm42 chat smollm2-135m-instruct`
"""

app = typer.Typer(
    name="llm42",
    help="LLM inference with verified determinism: deterministic requests return the same bits in any batch.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # a traceback of an unexpected error is for a bug report: plain and complete
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=_RUN_EPILOG)(run)
app.command(epilog=_CHAT_EPILOG)(chat)
app.command(epilog=_SERVE_EPILOG)(serve)
app.command()(pull)
app.command()(demo)
app.command()(doctor)
app.add_typer(bench_app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"llm42 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of `llm42` and `python -m llm42`; exits the process."""
    for stream in (sys.stdout, sys.stderr):
        # A model may emit any character; a terminal that cannot show one must not end the run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()
