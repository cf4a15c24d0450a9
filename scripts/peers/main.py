"""`scripts/bench peers`: this engine and others, the same prompts on the same machine, interleaved round by round.

Each engine runs in a fresh process and in an environment of its own (environments.py); its runner (run_*.py) writes one
result file per round, and tables.py reads them. A peer that cannot be installed or does not run is reported, and the
others go on. Greedy decoding, EOS ignored, prefix caching off, the same token ids everywhere.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments import BENCH, OPENVINO, ROOT, VLLM, PeerError, exported, python_of, run_logged, say
from filelock import FileLock, Timeout
from recording import PARTS, PROGRESS
from rich.console import Console
from tables import failures, load_rounds, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINES = ("llm42", "llm42-deterministic", "vllm", "openvino")
_HERE = Path(__file__).resolve().parent
_LONG_PROMPT, _NUM_LONG = 1024, 4
_MIN_SEQS = 64  # what engines allow to run together, whatever the levels
_OWN_PACKAGES = {"PYTHONPATH": ""}  # whatever this process was started with


@dataclass(frozen=True, slots=True)
class Size:
    """How much work."""

    levels: str
    rounds: int
    num_fixed: int = 64
    num_mixed: int = 128
    num_long: int = _NUM_LONG
    output_len: int = 128
    max_output: int = 256


FULL = Size("1,8,32,64", 3)
QUICK = Size("1,4", 1, num_fixed=8, num_mixed=8, num_long=1, output_len=16, max_output=16)


@dataclass(frozen=True, slots=True)
class Command:
    """How to start an engine's runner."""

    words: list[str]
    environment: dict[str, str]


def main() -> int:
    """Measure what the command line asks for and print the tables; returns the exit status."""
    options = _parse()
    try:
        if options.report is None:
            with _alone():
                options.report = _measure(options)
        all_rounds = load_rounds(options.report)
    except (PeerError, ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("cancelled; results so far are kept, see --report")
        return 130
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(all_rounds):
        console.print(table)
    for failure in failures(all_rounds):
        console.print(f"FAILED {failure}", style="red", markup=False, highlight=False)
    return 1 if failures(all_rounds) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers",
        description="Compare this engine with others on this machine, interleaved round by round, each in a fresh "
        "process and an environment of its own under .bench (a few GB, made once).",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as for llm42 run (default: %(default)s)")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help=f"separated by commas, of {', '.join(ENGINES)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a few short prompts, one round: only shows that all work")
    parser.add_argument("--levels", help=f"concurrencies (default: {FULL.levels}; quick {QUICK.levels})")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the workload (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help=f"(default: {FULL.rounds}; quick {QUICK.rounds})")
    parser.add_argument(
        "--max-batches",
        type=int,
        default=4,
        help="the most batches of one level: few prompts are enough for a rate at concurrency 1; 0: all of them "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--audit", action="store_true", help="all prompts at all levels in round 1, for a full count of changed outputs"
    )
    parser.add_argument("--threads", type=int, help="CPU cores to use (default: all that this process may use)")
    parser.add_argument("--out", type=Path, help="directory for results and logs (default: one in .bench/results)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print the tables of an earlier run, run nothing")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    options.size = size
    options.engines = _choices(parser, "--engines", options.engines, ENGINES)
    options.parts = _choices(parser, "--parts", options.parts, PARTS)
    options.levels = _levels(parser, options.levels or size.levels)
    options.rounds = size.rounds if options.rounds is None else options.rounds
    options.cores = usable_cores()[: options.threads]
    for name, least in (("rounds", 1), ("max_batches", 0), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; give {least} or more")
    return options


def _choices(parser: argparse.ArgumentParser, name: str, text: str, known: tuple[str, ...]) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for one in chosen:
        if one not in known or chosen.count(one) > 1:
            parser.error(f"{name} is {text}; give some of {', '.join(known)}, each once")
    return chosen


def _levels(parser: argparse.ArgumentParser, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        parser.error(f"--levels is {text}; give integers of 1 or more, separated by commas")
    return [int(part) for part in parts]


@contextmanager
def _alone() -> Iterator[None]:
    """Two benchmarks at once would measure each other."""
    BENCH.mkdir(exist_ok=True)
    try:
        with FileLock(BENCH / ".lock", timeout=0):
            yield
    except Timeout:
        raise PeerError("another benchmark is running; wait until it has ended") from None


def _measure(options: argparse.Namespace) -> Path:
    """Run all rounds; returns the directory with the results."""
    from llm42.model.hub import resolve_model  # noqa: PLC0415  not needed for a report

    out: Path = options.out or BENCH / "results" / time.strftime("%Y-%m-%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*-round*.json")):
        raise PeerError(f"{out} already holds results; give another --out")
    say(f"results and logs: {out}")
    model = resolve_model(options.model, progress=True)
    workload = out / "workload.json"
    workload.write_text(json.dumps(make_workload(model, options.size)), encoding="utf-8")
    plan: dict[str, Any] = {
        "engines": options.engines,
        "levels": options.levels,
        "rounds": options.rounds,
        "threads": len(options.cores),
        "failures": {},
    }
    commands: dict[str, Command] = {}
    for engine in options.engines:
        with _reported(plan, out, engine):
            commands[engine] = command_for(engine, model, options.cores)
    for number in range(1, options.rounds + 1):
        # Another engine begins each round, so that none always follows the same one.
        first = (number - 1) % len(options.engines)
        for engine in options.engines[first:] + options.engines[:first]:
            if engine not in plan["failures"]:
                say(f"round {number}/{options.rounds}: {engine}")
                with _reported(plan, out, engine):
                    _run(engine, commands[engine], number, model, workload, out, options)
    return out


@contextmanager
def _reported(plan: dict[str, Any], out: Path, engine: str) -> Iterator[None]:
    """An engine's failure is noted in the plan, and the plan saved; the others go on."""
    try:
        yield
    except PeerError as error:
        say(f"{engine} FAILED: {str(error).splitlines()[0]}")
        plan["failures"][engine] = str(error)
    (out / "run.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")


def _run(
    engine: str, command: Command, number: int, model: Path, workload: Path, out: Path, options: argparse.Namespace
) -> None:
    result = out / f"{engine}-round{number}.json"
    partial = result.with_suffix(".partial")
    arguments = {
        "name": engine,
        "model": model,
        "workload": workload,
        "out": partial,
        "threads": len(options.cores),
        "max-num-seqs": max(_MIN_SEQS, *options.levels),
        "levels": ",".join(map(str, options.levels)),
        "parts": ",".join(options.parts),
        "max-batches": 0 if options.audit and number == 1 else options.max_batches,
        "started": time.time(),
    }
    words = [*command.words, *(word for name, value in arguments.items() for word in (f"--{name}", str(value)))]
    log = out / f"{engine}-round{number}.log"
    run_logged(
        words, log, command.environment, lambda line: line[len(PROGRESS) :].strip() if _is_progress(line) else None
    )
    partial.rename(result)  # what an interrupted runner left is not a result


def _is_progress(line: str) -> bool:
    return line.startswith(PROGRESS)


def make_workload(model: Path, size: Size) -> dict[str, Any]:
    """The prompts as token ids, cut as `llm42 bench throughput` cuts them.

    Raises:
        ModelError: The data cannot be fetched.
    """
    from llm42.bench.sharegpt import cut_sharegpt  # noqa: PLC0415  not needed for a report

    say("preparing the workload")
    mixed, fixed = cut_sharegpt(model, num_mixed=size.num_mixed, num_fixed=size.num_fixed, progress=True)
    _, long = cut_sharegpt(model, num_fixed=size.num_long, length=_LONG_PROMPT, progress=True)
    return {
        "fixed": fixed,
        "long": long,
        "mixed": [(ids, min(max_tokens, size.max_output)) for ids, max_tokens in mixed],
        "output_len": size.output_len,
    }


def command_for(engine: str, model: Path, cores: list[int]) -> Command:
    """How to start an engine's runner; what it needs is installed and exported first.

    Raises:
        PeerError: It cannot be installed.
    """
    if engine == "vllm":
        python = python_of(VLLM)
        return Command([str(python), str(_HERE / "run_vllm.py")], vllm_environment(python, cores))
    if engine == "openvino":
        python = python_of(OPENVINO)
        return Command([str(python), str(_HERE / "run_openvino.py"), "--ir", str(exported(model))], _OWN_PACKAGES)
    flags = ["--deterministic"] if engine == "llm42-deterministic" else []
    # The package of this checkout, even where this Python has another one installed.
    return Command([sys.executable, str(_HERE / "run_llm42.py"), *flags], {"PYTHONPATH": str(ROOT / "src")})


def vllm_environment(python: Path, cores: list[int]) -> dict[str, str]:
    """What vLLM's guide for CPUs recommends: threads bound to cores, Intel's OpenMP and tcmalloc preloaded."""
    preloaded = [str(path) for path in [python.parent.parent / "lib" / "libiomp5.so"] if path.exists()]
    if allocator := ctypes.util.find_library("tcmalloc_minimal"):
        preloaded.insert(0, allocator)
    else:
        say("vllm runs without tcmalloc, which its guide recommends (Debian and Ubuntu: libtcmalloc-minimal4)")
    return {
        **_OWN_PACKAGES,
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: no hand-over between two on few cores
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def usable_cores() -> list[int]:
    """The first CPU of each core that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text(encoding="ascii") if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


if __name__ == "__main__":
    sys.exit(main())
