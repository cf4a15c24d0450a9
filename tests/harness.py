"""What the determinism tests share: a workload, the oracle, and a driver that makes schedules as unfriendly as asked.

The oracle generates by canonical passes only, one request at a time, with its own loop and its own KV memory: it knows
nothing of scheduler, ledger, prefix cache or verification. Whatever the engine does must equal it bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import xgrammar

from llm42 import SamplingParams
from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector
from llm42.engine.engine import Engine, RequestGroup
from llm42.kernels import RowBatch, RowSegment
from llm42.sampling.logprobs import TokenLogprobs
from llm42.sampling.sampler import SampleRow, sample
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llm42.engine.runner import SegmentResult
    from llm42.engine.scheduler import Pass
    from llm42.outputs import LogprobDict, RequestOutput
    from llm42.sampling import StructuredOutputs

CANONICAL = {"canonical_rows": 64, "canonical_logit_rows": 16, "max_model_len": 1200}
"""The contract that all tests on tiny models share, so that they can share oracle results."""


@dataclass(frozen=True)
class Call:
    """One request of a workload."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Bits:
    """Everything that a deterministic request promises, in a form that compares exactly."""

    token_ids: tuple[int, ...]
    logprobs: tuple
    prompt_logprobs: tuple
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def bits(output: RequestOutput, index: int = 0) -> Bits:
    completion = output.outputs[index]
    return Bits(
        tuple(completion.token_ids),
        _exact(completion.logprobs),
        _exact(output.prompt_logprobs),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


def _exact(entries: Sequence[LogprobDict | None] | None) -> tuple:
    return tuple(
        None if entry is None else tuple((i, value.logprob.hex(), value.rank) for i, value in entry.items())
        for entry in entries or ()
    )


def make_engine(model: Path, *, prefers_throughput: bool = True, **fields) -> Engine:
    defaults = {**CANONICAL, "mode": "verify", "kv_cache_bytes": 8 << 20, "num_threads": 1}
    config = EngineConfig(model=str(model), **{**defaults, **fields})
    return Engine(config, prefers_throughput=prefers_throughput)


class FreshGrammar:
    """What a form allows, found by a matcher made for the purpose: nothing is remembered, so nothing can be stale."""

    is_exhausted = False

    def __init__(self, engine: Engine, form: StructuredOutputs) -> None:
        engine._grammars.compile(form)
        self._compiled = engine._grammars._cache[form]
        self._vocab_size = engine.decoder.config.vocab_size

    def allowed(self, output_token_ids: Sequence[int], stop_token_ids: frozenset[int]) -> torch.Tensor:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        assert all(matcher.accept_token(token_id) for token_id in output_token_ids), "committed tokens break the form"
        words = xgrammar.allocate_token_bitmask(1, self._vocab_size + 1)
        matcher.fill_next_token_bitmask(words)
        row = words[0].tolist()
        bits = [row[i // 32] >> i % 32 & 1 for i in range(self._vocab_size)]
        for token_id in stop_token_ids:
            bits[token_id] = matcher.is_completed()
        return torch.tensor(bits, dtype=torch.bool)


class Oracle:
    """Canonical passes only, one request at a time, one row per pass once the prompt is computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._size = 16
        self._rows = engine.atlas.rows.pad(64)
        self.num_blocks = engine.max_model_len // self._size + 2
        self.kv = engine.decoder.new_kv_pool(self.num_blocks, self._size)

    @torch.inference_mode()
    def _pass(self, tokens: Sequence[int], start: int, logits_from: int) -> torch.Tensor:
        """Logits of the rows from position ``logits_from`` on, of one canonical pass."""
        segment = RowSegment(0, start, len(tokens), range(1, self.num_blocks))
        batch = RowBatch([segment], self._rows, self._size)
        ids = torch.tensor([*tokens, *[0] * (self._rows - len(tokens))])
        hidden = self.engine.decoder.forward(ids, batch, self.kv)[logits_from - start : len(tokens)]
        size = self.engine.atlas.logit_rows.pad(16)
        parts = []
        for part in hidden.split(size) if len(hidden) else ():
            padded = torch.cat((part, part.new_zeros(size - len(part), part.shape[1])))
            parts.append(self.engine.decoder.logits(padded)[: len(part)])
        return torch.cat(parts) if parts else hidden[:0]

    def generate(self, call: Call) -> RequestOutput:
        """Run one request (n = 1) to its end; stop rules and texts come from the engine's own request object."""
        group = self.engine.make_requests({"prompt_token_ids": list(call.prompt_token_ids)}, call.params)
        (request,) = group.sequences
        params, prompt = call.params, list(call.prompt_token_ids)
        tokens, start = list(prompt), 0
        rows = self._rows
        stops = frozenset() if params.ignore_eos else self.engine._eos
        form = params.structured_outputs
        grammar = None if form is None else FreshGrammar(self.engine, form)
        while not request.is_finished:
            chunk = tokens[start : start + rows]
            scored = params.prompt_logprobs is not None and start < len(prompt)
            logits = self._pass(chunk, start, start if scored else start + len(chunk) - 1)
            if scored:
                for row, following in zip(logits, tokens[start + 1 : start + 1 + len(chunk)], strict=False):
                    request.prompt_logprobs.append(self._score(row, following, params.prompt_logprobs))
            start += len(chunk)
            if start < len(tokens):
                continue
            ends = stops | set(params.stop_token_ids or ())
            row = SampleRow(params, request.spec.seed, prompt, tokens[len(prompt) :], ends, grammar)
            (token,) = sample(logits[-1:], [row], self.engine.decoder.kernels.sampler)
            tokens.append(token)
            request.ledger.restore(len(tokens) - 2)
            request.ledger.token_ids.append(token)
            request.ledger.num_committed += 1
            entry = [self._score(logits[-1], token, params.logprobs)] if params.logprobs is not None else []
            request.accept(1, entry)
        return OutputCollector(group, self.engine.tokenizer).take()

    def _score(self, row: torch.Tensor, token_id: int, k: int) -> TokenLogprobs:
        (score,) = self.engine.decoder.kernels.sampler.token_logprobs(row[None].contiguous(), [0], [token_id], [k])
        return score

    def kv_of(self, num_positions: int) -> torch.Tensor:
        """Canonical KV ``[layers, 2, positions, heads, head_dim]`` of the request that ran last."""
        return self.kv.read(torch.arange(self._size, self._size + num_positions))


@dataclass
class Adversary:
    """A fast path that lies: it wraps a runner and replaces drafted tokens at a rate."""

    execute_honestly: Callable[[Pass], list[SegmentResult]]
    rate: float
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def execute(self, work: Pass) -> list[SegmentResult]:
        results = self.execute_honestly(work)
        for segment, result in zip(work.segments, results, strict=True):
            if segment.is_draft and segment.request.ledger.deterministic and self.rng.random() < self.rate:
                result.generated[0] = (result.generated[0] + self.rng.randrange(1, self.vocab_size)) % self.vocab_size
        return results


@dataclass
class Schedule:
    """How unfriendly the run is."""

    seed: int = 0
    order: str = "given"
    """`given`, `reversed` or `shuffled`."""
    steps_between_arrivals: int = 0
    adversary_rate: float | None = None
    preempt_rate: float = 0.0
    """Chance per step that a random running request loses its memory, in the middle of whatever it does."""
    neighbours: int = 0
    """Ordinary requests of random content that run along."""
    cancel_rate: float = 0.0
    """Chance per step that one of them is cancelled."""


@dataclass
class Ran:
    """What a run gave."""

    outputs: list[RequestOutput]
    groups: list[RequestGroup]

    def total(self, counter: str) -> int:
        return sum(getattr(output.metrics, counter) for output in self.outputs)


def run(engine: Engine, calls: Sequence[Call], schedule: Schedule | None = None) -> Ran:
    """Run the calls, and check that the engine is clean afterwards; outputs in the order of the calls."""
    schedule = schedule or Schedule()
    rng = random.Random(schedule.seed)
    core = engine.core
    engine.pin_threads()
    if schedule.adversary_rate is not None:
        adversary = Adversary(core.runner.execute, schedule.adversary_rate, engine.decoder.config.vocab_size)
        core.runner.execute = adversary.execute
    groups = [engine.make_requests({"prompt_token_ids": list(call.prompt_token_ids)}, call.params) for call in calls]
    neighbours = [_neighbour(engine, rng) for _ in range(schedule.neighbours)]
    arrivals = list(groups)
    if schedule.order == "reversed":
        arrivals.reverse()
    for neighbour in neighbours:
        arrivals.insert(rng.randrange(len(arrivals) + 1), neighbour)
    if schedule.order == "shuffled":
        rng.shuffle(arrivals)
    step = 0
    while arrivals or core.has_work:
        while arrivals and (not schedule.steps_between_arrivals or step % schedule.steps_between_arrivals == 0):
            core.add(arrivals.pop(0).sequences)
            if schedule.steps_between_arrivals:
                break
        step += 1
        core.step()
        if rng.random() < schedule.preempt_rate and core.scheduler.running:
            core.scheduler.preempt(rng.choice(core.scheduler.running))
        if rng.random() < schedule.cancel_rate and neighbours:
            for sequence in rng.choice(neighbours).sequences:
                core.cancel(sequence)
    core.pool.check()
    assert core.pool.num_free == core.pool.num_usable, "a finished run must leave no block taken"
    if schedule.adversary_rate is not None:
        core.runner.execute = adversary.execute_honestly
    return Ran([OutputCollector(group, engine.tokenizer).take() for group in groups], groups)


def _neighbour(engine: Engine, rng: random.Random) -> RequestGroup:
    prompt = [rng.randrange(3, engine.decoder.config.vocab_size) for _ in range(rng.choice((1, 7, 40, 90)))]
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.3)), top_p=rng.choice((1.0, 0.7)), max_tokens=rng.randrange(1, 60), seed=1
    )
    return engine.make_requests({"prompt_token_ids": prompt}, params)


def mixed_workload(vocab_size: int, *, seed: int = 0, deterministic: bool = True) -> list[Call]:
    """Requests of every kind: lengths 1 to 1,000, greedy and sampled, every filter and penalty, every stop rule."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(3, vocab_size) for _ in range(64))
    variants: list[dict] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5, "ignore_eos": True},
        {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.7, "min_p": 0.05, "min_tokens": 12, "logit_bias": {EOS_TOKEN_ID: 9.0}},
        {"temperature": 1.5, "stop_token_ids": list(range(3, 60))},
        {"temperature": 0.9, "stop": ["e", " th"], "ignore_eos": True},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -50.0}, "prompt_logprobs": 5},
        {"temperature": 0.6, "stop": "o", "include_stop_str_in_output": True, "min_tokens": 5, "prompt_logprobs": 0},
    ]
    lengths = (1, 2, 5, 16, 17, 63, 64, 65, 130, 250, 1000)
    calls = []
    for index in range(24):
        length = lengths[index % len(lengths)]
        own = tuple(rng.randrange(3, vocab_size) for _ in range(length))
        prompt = shared + own[:9] if index % 4 == 3 else own
        variant = variants[index % len(variants)]
        max_tokens = max(rng.choice((1, 40, 48, 64)), variant.get("min_tokens", 0))
        common = {"max_tokens": max_tokens, "seed": rng.randrange(2**64), "logprobs": 5, "deterministic": deterministic}
        params = SamplingParams(**common, **variant)
        calls.append(Call(prompt, params))
    return calls


class Reference:
    """A tiny model, its workload, and what the oracle says of it."""

    def __init__(
        self, directory, family: str, kernels: str, dtype: str, calls: list[Call] | None = None, **fields
    ) -> None:
        self.model = write_tiny_model(directory, family)
        self.fields = {"kernels": kernels, "dtype": dtype, **fields}
        self.calls: list[Call] = mixed_workload(VOCAB_SIZE) if calls is None else calls
        oracle = Oracle(make_engine(self.model, mode="invariant", **self.fields))
        self.expected: list[Bits] = []
        self.canonical_kv: list[torch.Tensor] = []
        for call in self.calls:
            self.expected.append(bits(oracle.generate(call)))
            # All positions but the last token's, which is never an input.
            num_positions = len(call.prompt_token_ids) + len(self.expected[-1].token_ids) - 1
            self.canonical_kv.append(oracle.kv_of(num_positions).clone())

    def engine(self, **fields):
        return make_engine(self.model, **{**self.fields, **fields})


def assert_equals_oracle(reference: Reference, ran: Ran, *, only: Callable[[int], bool] = lambda _: True) -> None:
    """Compare the outputs for which ``only`` holds, and that there is something to compare."""
    compared = [index for index in range(len(ran.outputs)) if only(index)]
    for index in compared:
        expected = reference.expected[index]
        assert bits(ran.outputs[index]) == expected, f"request {index}: {reference.calls[index].params}"
        assert expected.token_ids
        assert len(expected.logprobs) == len(expected.token_ids)
    assert compared
