"""What every engine runner shares: the command line, the parts of the workload, the clock, and the result file.

It runs inside the environment of each engine, so it needs the standard library only. A runner hands `Session.measure`
one function, `generate(prompts, lengths)`: token ids of prompts and numbers of tokens to generate, to the token ids of
each output, greedily and past EOS. An output of another length is an error, so that every engine does the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Prompts = list[list[int]]
    Generate = Callable[[Prompts, list[int]], Prompts]

PROGRESS = "> "
"""Begins the lines on stdout that somebody who waits wants to see."""
PARTS = ("fixed", "prefill", "mixed")
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 16, 8
_PREFILL_PROMPTS = 16  # at concurrency 1


class Session:
    """One process that measures one engine.

    Args:
        engine: The name in the result.
        add_options: Adds options of the engine's own to the command line.
    """

    def __init__(self, engine: str, add_options: Callable[[argparse.ArgumentParser], object] | None = None) -> None:
        self.options = _parse(engine, add_options)
        self.workload: dict[str, Any] = json.loads(Path(self.options.workload).read_text(encoding="utf-8"))
        self.result: dict[str, Any] = {
            "engine": self.options.name or engine,
            "version": "",
            "settings": {},
            "startup_s": None,
            "peak_rss_mib": None,
            "runs": {},
            "outputs": {},
        }

    def measure(self, generate: Generate, version: str, **settings: Any) -> None:
        """Time the first token since the start of the process, warm up, run the parts, and write the result."""
        self.result.update(version=version, settings=settings)
        mixed = self.workload["mixed"]
        generate([mixed[0][0]], [1])
        self.result["startup_s"] = time.time() - self.options.started
        self._say(f"first token {self.result['startup_s']:.1f} s after the start")
        warm_up = [prompt for prompt, _ in mixed[:_WARM_UP_PROMPTS]]
        generate(warm_up, [_WARM_UP_TOKENS] * len(warm_up))
        for part in self.options.parts:
            getattr(self, f"_{part}")(generate)

    def _fixed(self, generate: Generate) -> None:
        """Prompts and outputs of one length, in batches of each level."""
        length = self.workload["output_len"]
        for level in self.options.levels:
            limit = self.options.max_batches * level or None
            self._run(f"c{level}", generate, self.workload["fixed"][:limit], length, level)

    def _prefill(self, generate: Generate) -> None:
        """One new token: one prompt at a time, as many as the highest level at once, and long ones one at a time."""
        highest, fixed = max(self.options.levels), self.workload["fixed"]
        self._run("prefill_c1", generate, fixed[:_PREFILL_PROMPTS], 1, 1)
        if highest > 1:
            self._run(f"prefill_c{highest}", generate, fixed, 1, highest)
        self._run("prefill_long", generate, self.workload["long"], 1, 1)

    def _mixed(self, generate: Generate) -> None:
        """Requests of many lengths at once; the engine runs as many together as it is allowed to."""
        prompts, lengths = zip(*self.workload["mixed"], strict=True)
        self._timed("mixed", lambda: generate(list(prompts), list(lengths)), list(prompts), list(lengths))

    def _run(self, name: str, generate: Generate, prompts: Prompts, length: int, level: int) -> None:
        def run() -> Prompts:
            outputs: Prompts = []
            for first in range(0, len(prompts), level):
                batch = prompts[first : first + level]
                outputs += generate(batch, [length] * len(batch))
            return outputs

        self._timed(name, run, prompts, [length] * len(prompts))

    def _timed(self, name: str, run: Callable[[], Prompts], prompts: Prompts, lengths: list[int]) -> None:
        started = time.perf_counter()
        outputs = run()
        wall_s = time.perf_counter() - started
        outputs = [[int(token_id) for token_id in output] for output in outputs]
        if [len(output) for output in outputs] != lengths:
            raise RuntimeError(f"{name}: an output has not as many tokens as were asked for")
        self.result["runs"][name] = {
            "wall_s": wall_s,
            "num_requests": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": sum(lengths),
        }
        self.result["outputs"][name] = outputs
        self.result["peak_rss_mib"] = peak_rss_mib()
        total = sum(lengths) + sum(map(len, prompts))
        self._say(f"{name}: {sum(lengths) / wall_s:.1f} output, {total / wall_s:.0f} total tok/s ({wall_s:.1f} s)")
        Path(self.options.out).write_text(json.dumps(self.result), encoding="utf-8")

    def _say(self, text: str) -> None:
        print(f"{PROGRESS}{self.result['engine']}  {text}", flush=True)


def peak_rss_mib() -> float | None:
    """Peak resident memory of this process and of its living descendants, or None where the system does not tell."""
    processes = {pid: rest for path in Path("/proc").glob("[0-9]*/status") for pid, *rest in _process(path)}
    own = os.getpid()
    if own not in processes:
        return None

    def belongs(pid: int) -> bool:
        while pid in processes and pid != own:
            pid = processes[pid][0]
        return pid == own

    return sum(peak_kib for pid, (_, peak_kib) in processes.items() if belongs(pid)) / 1024


def _process(status: Path) -> list[tuple[int, int, int]]:
    """Process id, parent's id and peak memory in KiB; nothing where it has ended or is a kernel thread."""
    try:
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        return [(int(fields["Pid"]), int(fields["PPid"]), int(fields["VmHWM"].split()[0]))]
    except (OSError, KeyError, ValueError):
        return []


def _parse(engine: str, add_options: Callable[[argparse.ArgumentParser], object] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=f"Measure {engine} for scripts/bench.")
    parser.add_argument("--model", required=True, help="model directory in Hugging Face layout")
    parser.add_argument("--workload", required=True, help="JSON file with the prompts as token ids")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--started", type=float, required=True, help="when the process was started, seconds since 1970")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True, help="requests that may run together")
    parser.add_argument("--levels", type=_integers, required=True, help="batch sizes, separated by commas")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--max-batches", type=int, default=0, help="the most batches at a level; 0: all prompts")
    parser.add_argument("--name", default="", help="name in the result")
    if add_options is not None:
        add_options(parser)
    return parser.parse_args()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
