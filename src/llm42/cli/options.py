"""Options that several commands share, declared once: what they are called, what they mean, in which panel they stand.

An option that was not given is None and is left out of the call, so that the engine's own default holds; the default
that the help shows for an engine option is read from EngineConfig.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llm42.cli.sizes import parse_size
from llm42.config import DTYPES, KERNELS, MODES, EngineConfig

SAMPLING = "Sampling"
_ENGINE = "Engine"


def size(text: str | int) -> int:
    """The parser of an option that is a size, such as 512M."""
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
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="The same bits every time, whatever else runs.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed, 0 to 2**64 - 1.", show_default="drawn, and shown", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the most likely token; higher is more varied.", show_default="0", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Smallest set of tokens with this probability; 1 is off.", show_default="1", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="The k most likely tokens; 0 is off.", show_default="0", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Least probability relative to the most likely token; 0 is off.",
        show_default="0",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 discourages tokens that have occurred.", show_default="1", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", show_default=False, rich_help_panel=SAMPLING),
]
IgnoreEOS = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.", rich_help_panel=SAMPLING)
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
        parser=size,
        show_default="1 GiB, fitted to the model",
        rich_help_panel=_ENGINE,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
