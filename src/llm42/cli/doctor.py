"""`llm42 doctor`: what this machine, its kernels and a model promise each other, and whether the promise is kept."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llm42.cli import options
from llm42.cli.errors import reported
from llm42.cli.loading import load

if TYPE_CHECKING:
    from llm42 import LLM


def doctor(
    model: options.Model = "smollm2-135m-instruct",
    mode: options.Mode = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Show machine, kernels, shape classes, self-test and fingerprint of a model.

    Exits with 1 if deterministic requests would be refused, and says why.
    """
    with reported(debug=debug):
        from llm42 import LLM

        fields = options.given(mode=mode, kernels=kernels, dtype=dtype, num_threads=num_threads)
        with load(LLM, model, fields) as llm:
            report = examine(llm)
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    if report["refusal"] is not None:
        raise typer.Exit(1)


def examine(llm: LLM) -> dict[str, Any]:
    """Everything that a loaded engine knows about its promise, as plain data."""
    import torch

    from llm42.bench.throughput import processor_name
    from llm42.protocol.shape_class import describe_counts

    engine = llm._engine  # noqa: SLF001  the report is about what users of an LLM need not see
    shapes = engine.core.scheduler.shapes
    return {
        "machine": {
            "processor": processor_name(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": engine.num_threads,
            "torch": torch.__version__,
        },
        "model": {"path": str(llm.model_path), "dtype": llm.config.dtype, "max_model_len": llm.max_model_len},
        "kernels": engine.decoder.kernels.versions(),
        "classes": {
            name: [describe_counts(counts) for counts in classes] for name, classes in engine.atlas.classes.items()
        },
        "canonical": {
            "rows": describe_counts(engine.atlas.row_counts),
            "logit_rows": describe_counts(engine.atlas.logit_row_counts),
        },
        "mode": llm.config.mode,
        "rows_per_pass": shapes.pass_rows,
        "fingerprint": llm.system_fingerprint,
        "refusal": engine.refusal,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    machine = report["machine"]
    table.add_row("machine", f"{machine['processor']}, {machine['instructions']}, {machine['threads']} threads")
    table.add_row("model", f"{report['model']['path']}, {report['model']['dtype']}")
    for name, value in report["kernels"].items():
        table.add_row(name if name == "kernels" else f"kernels: {name}", value)
    for name, classes in report["classes"].items():
        shown = "  ".join(f"{{{counts}}}" for counts in classes[:8])
        more = f"  and {len(classes) - 8} more" if len(classes) > 8 else ""
        table.add_row(f"classes of {name}", shown + more)
    canonical = report["canonical"]
    table.add_row("canonical class", f"{canonical['rows']} rows; {canonical['logit_rows']} rows for logits")
    table.add_row("mode", f"{report['mode']}, {report['rows_per_pass']} rows a pass at most")
    table.add_row("self-test", "passed" if report["refusal"] is None else f"refused: {report['refusal']}")
    table.add_row("fingerprint", report["fingerprint"])
    # Paths and reasons are shown as they are: square brackets and colons are no markup.
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    verdict = (
        "deterministic requests are served"
        if report["refusal"] is None
        else "deterministic requests are refused: see self-test"
    )
    console.print(verdict, style="green" if report["refusal"] is None else "red")
