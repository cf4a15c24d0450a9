"""`llm42 demo`: the same prompts alone and inside a busy batch, as ordinary and as deterministic requests.

Everything on the screen is measured in this run. Both kinds of request use one engine, one set of prompts and one
batch; the only difference is `deterministic=True`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from tqdm import tqdm

from llm42.cli import options
from llm42.cli.demo_prompts import PROMPTS, filler_prompts, measured_prompts, scatter
from llm42.cli.demo_report import (
    Comparison,
    Phase,
    answer_of,
    difference_view,
    most_visible,
    report_table,
)
from llm42.cli.errors import reported
from llm42.cli.loading import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm42 import LLM, RequestOutput, SamplingParams

_MODEL = "smollm2-135m-instruct"
_NUM_LOGPROBS = 5
_BUDGET_S = (90.0, 90.0, 60.0)  # for the first comparison, and for those under PyTorch's and the jittering kernels
_WHY_NEXT = {
    "portable": "Ordinary requests gave the same text alone and in the batch: here the native kernels treat a "
    "row alike at every row count (`llm42 doctor` shows it). The same again with PyTorch's own kernels, which do not:",
    "jitter": "Ordinary requests happened to give the same text again: luck, not a promise. Once more under kernels "
    "that perturb results by batch shape:",
}
_MIN_TOKENS, _MAX_TOKENS, _STEP = 24, 64, 8


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one decode step, measured: of a request alone and of the whole batch."""

    step_alone_s: float
    step_batch_s: float

    def estimate_s(self, num_prompts: int, max_tokens: int) -> float:
        """Upper estimate of a comparison's time: two phases one prompt at a time, two phases in the batch.

        A deterministic batch decodes every token twice (draft and verification), and alone each window of 32 costs a
        canonical pass, which is about a step of the batch.
        """
        alone = num_prompts * (2.2 * max_tokens * self.step_alone_s + (1 + max_tokens / 32) * self.step_batch_s)
        return alone + (3 * max_tokens + 10) * self.step_batch_s


def demo(
    *,
    model: Annotated[str, typer.Option(metavar="MODEL", help="As for `llm42 run`; pulled when missing.")] = _MODEL,
    prompts: Annotated[int, typer.Option(help=f"Compared prompts, 1 to {len(PROMPTS)}.")] = len(PROMPTS),
    batch: Annotated[int, typer.Option(help="Requests in the batch, the compared ones included.")] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest output, in tokens.", show_default=f"{_MIN_TOKENS} to {_MAX_TOKENS}, by speed"),
    ] = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    debug: options.Debug = False,
) -> None:
    """Show what this engine is for, in about three minutes.

    The same chat prompts are answered alone and inside a batch, greedily: once as ordinary requests and once as
    deterministic ones. Exits with 1 if any bit of a deterministic answer differs.
    """
    with reported(debug=debug):
        texts = measured_prompts(prompts)
        if batch < prompts:
            raise ValueError(f"batch is {batch}; it must hold the {prompts} compared prompts")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; give 1 or more")
        fields = options.given(kernels=kernels, dtype=dtype, num_threads=num_threads)
        same = Demo(Console(), model, fields, texts, batch, max_tokens).run()
    raise typer.Exit(0 if same else 1)


@dataclass(slots=True)
class Demo:
    """One run of the demo: what to compare, and where to show it."""

    console: Console
    model: str
    fields: dict[str, Any]
    texts: list[str]
    batch: int
    max_tokens: int | None

    def run(self) -> bool:
        """Compare, show, and repeat under other kernels while ordinary requests happen not to differ.

        Returns whether all deterministic answers were identical.
        """
        ordinary, same = self.compare(_BUDGET_S[0])
        for kernels, budget_s in zip(("portable", "jitter"), _BUDGET_S[1:], strict=True):
            if ordinary.num_changed or self.fields.get("kernels") in {kernels, "jitter"}:
                break
            self.console.print(f"\n{_WHY_NEXT[kernels]}\n", style="yellow", highlight=False)
            ordinary, same_again = replace(self, fields={**self.fields, "kernels": kernels}).compare(budget_s)
            same = same and same_again
        if not ordinary.num_changed:
            self.console.print("No ordinary answer differed; try more with --max-tokens 128.", style="yellow")
        return same

    def compare(self, budget_s: float) -> tuple[Comparison, bool]:
        """Run both kinds of request with one engine and show the result."""
        from llm42 import LLM

        llm = load(LLM, self.model, self.fields)
        try:
            measured = [_chat_prompt(llm, text) for text in self.texts]
            fillers = [_chat_prompt(llm, text) for text in filler_prompts(self.batch - len(measured))]
            workload = Workload(llm, measured, *scatter(measured, fillers))
            max_tokens = self.choose_max_tokens(workload, budget_s)
            ordinary = workload.comparison(max_tokens, deterministic=False)
            deterministic = workload.comparison(max_tokens, deterministic=True)
            kernels, fingerprint = llm.contract["kernels"]["kernels"], llm.system_fingerprint
        finally:
            llm.close()
        self.show(ordinary, deterministic, kernels, fingerprint)
        return ordinary, deterministic.is_identical

    def choose_max_tokens(self, workload: Workload, budget_s: float) -> int:
        """The output length: as asked, or as long as this machine manages in the time; says how long it will take."""
        speed = workload.measure_speed()
        max_tokens = self.max_tokens or fitting_max_tokens(speed, len(self.texts), budget_s)
        self.console.print(
            f"{len(self.texts)} prompts, alone and in a batch of {self.batch}, {max_tokens} tokens each, greedy: "
            f"up to {speed.estimate_s(len(self.texts), max_tokens):.0f} s on this machine",
            highlight=False,
        )
        return max_tokens

    def show(self, ordinary: Comparison, deterministic: Comparison, kernels: str, fingerprint: str) -> None:
        """Print the most visible difference, the table and the verdict."""
        console = self.console
        for kind, comparison in (("ordinary", ordinary), ("deterministic", deterministic)):
            if differences := comparison.differences():
                index = most_visible(differences)
                console.rule(f"{kind} requests: one prompt, two answers", align="left")
                console.print(difference_view(self.texts[index], comparison, index))
        title = f"{self.model}, {kernels} kernels: alone against a batch of {self.batch}"
        console.print()
        console.print(report_table(title, ordinary, deterministic, self.batch))
        if deterministic.is_identical:
            console.print(
                f"Deterministic requests: all {deterministic.num_prompts} answers identical, "
                "every token and every bit of the log-probabilities.",
                style="bold green",
            )
        else:
            console.print("DETERMINISM BROKEN: a deterministic answer changed. Please report this.", style="bold red")
        console.print(f"contract: system fingerprint {fingerprint}", style="dim", highlight=False)


def fitting_max_tokens(speed: Speed, num_prompts: int, budget_s: float) -> int:
    """The largest output length, in steps, whose estimate fits the budget; never less than the least useful one."""
    lengths = range(_MAX_TOKENS, _MIN_TOKENS, -_STEP)
    return next((n for n in lengths if speed.estimate_s(num_prompts, n) <= budget_s), _MIN_TOKENS)


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts as token ids, the batch that holds them, and their positions in it."""

    llm: LLM
    measured: list[dict[str, list[int]]]
    batch: list[dict[str, list[int]]]
    positions: list[int]

    def measure_speed(self) -> Speed:
        """Time a few decode steps. It also puts every prompt into the prefix cache, the same start for all phases."""
        Console(stderr=True).print("measuring the speed of this machine", style="dim")
        params = _params(6, deterministic=False)
        batch = self.llm.generate(self.batch, params, use_tqdm=False)
        alone = self.llm.generate(self.measured[:1], params, use_tqdm=False)
        return Speed(_step_s(alone), _step_s(batch))

    def comparison(self, max_tokens: int, *, deterministic: bool) -> Comparison:
        """Run the measured prompts one at a time, then the batch."""
        kind = "deterministic" if deterministic else "ordinary"
        progress = Console(stderr=True)
        params = _params(max_tokens, deterministic=deterministic)
        progress.print(f"{kind} requests, one at a time", style="dim")
        started = time.perf_counter()
        alone: list[RequestOutput] = []
        for prompt in tqdm(self.measured, unit="prompt", leave=False, disable=None):
            alone += self.llm.generate([prompt], params, use_tqdm=False)
        middle = time.perf_counter()
        progress.print(f"{kind} requests, the batch of {len(self.batch)}", style="dim")
        batch = self.llm.generate(self.batch, params, use_tqdm=True)
        ended = time.perf_counter()
        return Comparison(
            alone=_phase(alone, alone, middle - started),
            batch=_phase([batch[i] for i in self.positions], batch, ended - middle),
        )


def _phase(measured: Sequence[RequestOutput], everything: Sequence[RequestOutput], seconds: float) -> Phase:
    metrics = [output.metrics for output in everything]
    return Phase(
        answers=tuple(answer_of(output) for output in measured),
        num_tokens=sum(len(output.outputs[0].token_ids) for output in everything),
        seconds=seconds,
        num_windows=sum(m.num_windows for m in metrics),
        num_rollbacks=sum(m.num_rollbacks for m in metrics),
        num_recomputed_tokens=sum(m.num_recomputed_tokens for m in metrics),
    )


def _step_s(outputs: Sequence[RequestOutput]) -> float:
    """Median over requests of the time per token after the first."""
    times = sorted(
        (output.metrics.total_time_s - (output.metrics.time_to_first_token_s or 0.0))
        / max(1, len(output.outputs[0].token_ids) - 1)
        for output in outputs
    )
    return times[len(times) // 2]


def _params(max_tokens: int, *, deterministic: bool) -> SamplingParams:
    from llm42 import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=_NUM_LOGPROBS, deterministic=deterministic, seed=0
    )


def _chat_prompt(llm: LLM, text: str) -> dict[str, list[int]]:
    return {"prompt_token_ids": llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])}
