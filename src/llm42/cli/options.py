"""Options that several commands share, declared once: what they are called, what they mean, in which panel they stand.

An option that was not given is None and is left out of the call, so that the engine's own default holds; the default
that the help shows is read from EngineConfig.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llm42.cli.sizes import parse_size
from llm42.config import DTYPES, KERNELS, MODES, EngineConfig

_ENGINE = "Engine"


def _size(text: str | int) -> int:
    if isinstance(text, int):
        return text
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A pulled name (`smollm2-135m-instruct`), a directory in Hugging Face layout, a .gguf file, or a hub id.",
        show_default=False,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        help="How deterministic requests are kept so: `auto` (commit what canonical passes decode, verify the "
        "rest), `verify` (draft, verify, roll back), `invariant` (every pass canonical), `off` (none accepted).",
        metavar="|".join(MODES),
        show_default=EngineConfig.mode,
        rich_help_panel=_ENGINE,
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        help="Kernel backend: `native` is C++, built on first use; `portable` is PyTorch; `auto` is native where it "
        "can be built; `jitter` perturbs its results by batch shape, an adversary for demonstrations and tests.",
        metavar="|".join(KERNELS),
        show_default=EngineConfig.kernels,
        rich_help_panel=_ENGINE,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Type of weights and KV cache.",
        metavar="|".join(DTYPES),
        show_default=EngineConfig.dtype,
        rich_help_panel=_ENGINE,
    ),
]
WindowSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one request that are verified together.",
        show_default="from measured costs and flips",
        rich_help_panel=_ENGINE,
    ),
]
VerifyBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Requests that are verified in one pass.",
        show_default="from measured costs and flips",
        rich_help_panel=_ENGINE,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(help="CPU threads; part of the contract.", show_default="PyTorch's choice", rich_help_panel=_ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus output, in tokens.", show_default="the model's own limit", rich_help_panel=_ENGINE
    ),
]
KVCacheBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-bytes",
        help="Memory of the KV cache, such as 512M or 2G.",
        metavar="SIZE",
        parser=_size,
        show_default="1 GiB, fitted to the model",
        rich_help_panel=_ENGINE,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
