"""`scripts/check_clients`: unmodified clients against `llm42 serve`, at several concurrencies.

The clients live in an environment of their own (.bench/clients). A runner (run_*.py) drives each of them and writes
what came back for every sample at every level; here it is compared, value by value. Only the server decides about
determinism (`--deterministic-default`): the clients send nothing special.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from contract import Job, write
from environments import BENCH, PeerError, Recipe, python_of, run_logged, say
from rich.console import Console
from rich.table import Table

from llm42.errors import ModelError
from llm42.model.hub import resolve_model
from real_data import gsm8k, hellaswag

_HERE = Path(__file__).resolve().parent
_REQUIREMENTS = {
    "lm_eval": "lm_eval[api]==0.4.13",
    "inspect": "inspect-ai==0.3.285",
    "litellm": "litellm==1.110.2",
    "langchain": "langchain-openai==1.7.4",
    "guidellm": "guidellm==0.8.1",
}
_ENVIRONMENT = Recipe(
    "clients", (*_REQUIREMENTS.values(), "openai==3.57.0", "transformers==5.24.0", "torch==2.13.0"), needs_torch=True
)
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_OWN_PACKAGES = {"PYTHONPATH": ""}  # this process needs more than the server and the runners
_START_S, _STOP_S = 600, 60
_SAMPLES = 100  # of each of the data sets


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison of one client's outputs found."""

    client: str
    compared: int = 0
    """Samples, times the levels that are compared with the first one."""
    different: int = 0
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether there were outputs, and all the same."""
        return not self.error and self.compared > 0 and self.different == 0


def main() -> int:
    """Run what the command line asks for and print the table; returns the exit status."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped then, too
    try:
        verdicts = _check(options)
    except (PeerError, ModelError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("cancelled")
        return 130
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(verdicts, options))
    for verdict in verdicts:
        if verdict.error:
            console.print(f"FAILED {verdict.client}: {verdict.error}", style="red", markup=False, highlight=False)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check_clients",
        description="Run clients of the field, unmodified, against llm42 serve at several concurrencies, and compare "
        "all their outputs and log-probabilities. The clients are installed once, into .bench/clients (a few GB).",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as for llm42 serve (default: %(default)s)")
    parser.add_argument(
        "--clients", default=",".join(_REQUIREMENTS), help="separated by commas (default: all, %(default)s)"
    )
    parser.add_argument("--levels", default="1,8,32", help="concurrencies (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=48, help="samples of each data set (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest output (default: %(default)s)")
    parser.add_argument(
        "--ordinary",
        action="store_true",
        help="ordinary requests, on portable kernels: outputs differ then, which shows that the comparison can fail",
    )
    options = parser.parse_args()
    options.clients = [name.strip() for name in options.clients.split(",")]
    if unknown := [name for name in options.clients if name not in _REQUIREMENTS]:
        parser.error(f"--clients has {', '.join(unknown)}; give some of {', '.join(_REQUIREMENTS)}")
    levels = options.levels.split(",")
    if len(levels) < 2 or not all(level.isdecimal() and int(level) for level in levels):
        parser.error(f"--levels is {options.levels}; give two integers or more, separated by commas")
    options.levels = [int(level) for level in levels]
    if not 1 <= options.limit <= _SAMPLES:
        parser.error(f"--limit is {options.limit}; give 1 to {_SAMPLES}")
    if options.max_tokens < 1:
        parser.error(f"--max-tokens is {options.max_tokens}; give 1 or more")
    return options


def _check(options: argparse.Namespace) -> list[Verdict]:
    folder = BENCH / "clients-results" / time.strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    say(f"results and logs: {folder}")
    tokenizer = resolve_model(options.model, progress=True)
    data = {"gsm8k": _questions(), "hellaswag": _sentences()}
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    python = python_of(_ENVIRONMENT)
    with _server(options, folder / "server.log") as url:
        return [_run(client, url, tokenizer, python, folder, options) for client in options.clients]


def _questions() -> list[dict[str, Any]]:
    return [{"question": row["prompt"], "answer": row["expected"]} for row in gsm8k()]


def _sentences() -> list[dict[str, Any]]:
    return [
        {
            "query": f"{row['activity_label']}: {row['ctx']}",
            "choices": row["endings"],
            "label": row["expected_index"],
        }
        for row in hellaswag()
    ]


@contextmanager
def _server(options: argparse.Namespace, log: Path) -> Iterator[str]:
    """A server of the model on a free port; yields its address once it is ready."""
    how = ["--kernels", "portable"] if options.ordinary else ["--deterministic-default"]
    command = [sys.executable, "-m", "llm42", "serve", options.model, "--port", "0", *how]
    say(" ".join(["llm42", *command[3:]]))
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, env={**os.environ, **_OWN_PACKAGES}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        ) as process,
    ):
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"serving \S+ at (\S+)/v1", log.read_text(encoding="utf-8", errors="replace"))
        if found and _is_ready(found[1]):
            return found[1]
        time.sleep(0.5)
    end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    raise PeerError(f"the server did not start (all it said: {log}):\n{end}")


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=10) as response:  # noqa: S310  our own server
            return response.status == 200
    except (URLError, TimeoutError):
        return False


def _run(client: str, url: str, tokenizer: Path, python: Path, folder: Path, options: argparse.Namespace) -> Verdict:
    own = folder / client
    own.mkdir()
    out = folder / f"{client}.json"
    job = Job(
        url=url,
        model=options.model,
        tokenizer=str(tokenizer),
        gsm8k=str(folder / "gsm8k.jsonl"),
        hellaswag=str(folder / "hellaswag.jsonl"),
        levels=options.levels,
        limit=options.limit,
        max_tokens=options.max_tokens,
        folder=str(own),
        out=str(out),
    )
    arguments = folder / f"{client}-job.json"
    write(job, arguments)
    say(_REQUIREMENTS[client])
    environment = {**_OFFLINE, **_OWN_PACKAGES, "HF_HOME": str(own / "huggingface")}
    try:
        run_logged(
            [str(python), str(_HERE / f"run_{client}.py"), str(arguments)],
            folder / f"{client}.log",
            environment,
            lambda line: line.strip() if line.startswith("concurrency ") else None,
        )
    except PeerError as error:
        return Verdict(client, error=str(error))
    return _compare(client, json.loads(out.read_text(encoding="utf-8")))


def _compare(client: str, levels: dict[str, dict[str, Any]]) -> Verdict:
    """Every level with the first one."""
    (first_level, first), *others = levels.items()
    compared = different = 0
    for level, outputs in others:
        if outputs.keys() != first.keys():
            return Verdict(client, error=f"concurrency {level} has other samples than concurrency {first_level}")
        compared += len(first)
        different += sum(outputs[sample] != first[sample] for sample in first)
    return Verdict(client, compared, different)


def _table(verdicts: list[Verdict], options: argparse.Namespace) -> Table:
    requests = "ordinary requests" if options.ordinary else "deterministic requests"
    table = Table(title=f"{options.model}, {requests}, concurrency {', '.join(map(str, options.levels))}")
    table.add_column("client")
    table.add_column("outputs compared", justify="right")
    table.add_column("different", justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        word = "same" if verdict.passed else "FAILED" if verdict.error or not verdict.compared else "DIFFERENT"
        table.add_row(
            _REQUIREMENTS[verdict.client].replace("[api]", ""), str(verdict.compared), str(verdict.different), word
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
