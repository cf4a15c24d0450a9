"""The real engine core over the simulated runner, with every invariant of protocol.md checked after each step.

`Simulation` is the engine and its callers; below it are workloads by seed. Whatever is wrong is an AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

from llm42.cache import BlockPool
from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector
from llm42.engine.core import EngineCore
from llm42.engine.engine import RequestGroup
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.scheduler import Pass, PassShapes
from llm42.engine.text import OutputText
from llm42.protocol import ShapeClass
from llm42.sampling.noise import child_seed
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import UNUSABLE
from simulated import (
    EOS,
    NOTHING,
    PIECES,
    Outcome,
    PieceTokenizer,
    SimulatedRunner,
    apply_stop_rules,
    digests,
    logprob,
    oracle,
)

_CUT_SHORT = ("abort", "error")


class Simulation:
    """An engine core over the simulated runner, with every invariant checked after each operation."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, seed: int = 0, row_counts: Sequence[int] | None = None
    ) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size)
        shapes = PassShapes.choose(config, ShapeClass(row_counts or [config.canonical_rows]))
        self.runner = SimulatedRunner(config, self.pool, shapes, seed)
        self.runner.on_pass = self._check_neighbours
        self.core = EngineCore(config, self.pool, self.runner, shapes)
        self.core.scheduler.spot_check_interval = 3
        self.requests: list[Request] = []
        self.collectors: list[OutputCollector] = []
        self.seen: dict[Request, Outcome] = {}
        self._oracles: dict[Request, Outcome] = {}
        self.may_fail: set[Request] = set()
        """Requests of failing passes; a test adds those that it breaks in another way."""
        self.num_left_out = 0
        """How often an ordinary request that decodes had no row in a pass."""
        self._left_out: set[Request] = set()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue a prompt; QueueFullError leaves no trace."""
        name = f"request-{len(self.collectors)}"
        max_tokens = params.max_tokens
        assert max_tokens is not None
        assert self.pool.blocks_for(len(prompt) + max_tokens) <= self.pool.num_usable
        specs = [
            SequenceSpec(name, i, tuple(prompt), params, child_seed(params.seed or 0, i), max_tokens, frozenset({EOS}))
            for i in range(params.n)
        ]
        tokenizer = PieceTokenizer()
        requests = [Request(spec, self.pool, OutputText(tokenizer, params)) for spec in specs]
        self.core.add(requests)
        self.requests.extend(requests)
        self.collectors.append(OutputCollector(RequestGroup(name, None, tuple(requests)), tokenizer))
        for request in requests:
            self.seen[request] = Outcome([], "")
            self._oracles[request] = oracle(request.spec)
        return requests

    def cancel(self, request: Request) -> None:
        self.core.cancel(request)
        self._take([request])
        self.check()

    def preempt(self, request: Request) -> None:
        self.runner.tally(request).recomputed += request.ledger.num_candidates
        self.core.scheduler.preempt(request)
        self.check()

    def step(self) -> None:
        before = {
            request: (request.ledger.num_committed, request.ledger.num_candidates, request.stats.num_preemptions)
            for request in self.requests
        }
        is_failing, had_work = self.runner.fail_next, self.core.has_work
        self.runner.last_pass = None
        changed = self.core.step()
        if self.runner.violation is not None:
            raise self.runner.violation
        self._take(changed)
        work = self.runner.last_pass
        assert (work is not None) == had_work, "a step without a pass, though something is left"
        for request, (_, candidates, preemptions) in before.items():
            assert request.stats.num_preemptions <= preemptions + 1, "preempted twice in a step"
            if request.stats.num_preemptions > preemptions:
                self.runner.tally(request).recomputed += candidates
        if work is not None and is_failing:
            self.may_fail.update(segment.request for segment in work.segments)
            assert all(request.finish_reason == "error" for request in self.may_fail), "a failing pass was survived"
        elif work is not None:
            self._check_commits(work, {request: committed for request, (committed, _, _) in before.items()})
        self.check()

    def run(self, max_steps: int = 3000) -> None:
        """Step until nothing is left; then everybody has the whole output, and the memory is whole again."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"unfinished after {max_steps} steps"
        assert self.pool.num_free == self.pool.num_usable, "blocks are lost"
        for request in self.requests:
            assert request.is_finished, "a request was forgotten"
            assert self.seen[request].token_ids or request.finish_reason in _CUT_SHORT, "an empty output"
            self._check_tally(request)

    def outputs(self) -> list[Outcome]:
        """What the callers have, in order of submission."""
        return [self.seen[request] for request in self.requests]

    def check(self) -> None:
        """Check every invariant that holds between steps."""
        self.pool.check()
        self._check_tables()
        self._check_cache()
        for request in self.requests:
            self._check_ledger(request)
            self._check_seen(request)

    def _take(self, changed: Iterable[Request]) -> None:
        """Give callers what is new, as the front ends do: only of requests that the core named."""
        ids = {request.spec.request_id for request in changed}
        for collector in self.collectors:
            if collector.group.request_id not in ids:
                continue
            for new in collector.take().outputs:
                request = collector.group.sequences[new.index]
                old = self.seen[request]
                assert old.finish_reason is None, "something came after the end"
                self.seen[request] = Outcome(
                    old.token_ids + new.token_ids, old.text + new.text, new.finish_reason, new.stop_reason
                )

    def _expected(self, request: Request) -> Outcome:
        """The whole output of a deterministic request; of an ordinary one, what its passes emitted so far."""
        if request.ledger.deterministic:
            return self._oracles[request]
        emitted = self.runner.tally(request).emitted
        usable = emitted[: emitted.index(UNUSABLE)] if UNUSABLE in emitted else emitted
        return apply_stop_rules(request.spec, usable)

    def _check_seen(self, request: Request) -> None:
        seen, expected = self.seen[request], self._expected(request)
        count = len(seen.token_ids)
        assert seen.token_ids == request.ledger.committed, "the caller was not told what is new"
        assert seen.token_ids == expected.token_ids[:count], "the caller sees other tokens than the oracle's"
        if not request.ledger.deterministic:
            assert count == len(expected.token_ids), "a token of an ordinary request was lost"
        if request.finish_reason in _CUT_SHORT:
            assert seen.text == "".join(PIECES[token] for token in seen.token_ids), "the text is not the tokens' text"
            is_unusable = not request.ledger.deterministic and UNUSABLE in self.runner.tally(request).emitted
            is_expected = request.finish_reason == "abort" or request in self.may_fail or is_unusable
            assert is_expected, "a request failed that was in no failing pass"
        elif request.is_finished:
            assert seen == expected, "the outcome differs from the oracle's"
        else:
            assert seen.finish_reason is None, "finished for the caller only"
            assert expected.text.startswith(seen.text), "text was shown that the final text does not have"
        prefixes = digests((*request.spec.prompt_token_ids, *seen.token_ids))
        if request.params.logprobs is not None:
            found = [(entry.token_id, entry.logprob) for entry in request.logprobs]
            first = request.ledger.prompt_len - 1
            wanted = [(token, logprob(prefixes[first + i], token)) for i, token in enumerate(seen.token_ids)]
            assert found == wanted, "log-probabilities of other tokens, or of other prefixes"
        found = [(entry.token_id, entry.logprob) for entry in request.prompt_logprobs]
        prompt = request.spec.prompt_token_ids
        wanted = [(token, logprob(prefixes[i], token)) for i, token in enumerate(prompt[1:])]
        assert found == wanted[: len(found)], "prompt log-probabilities of other tokens, or of other prefixes"
        is_due = request.params.prompt_logprobs is not None and count > 0
        assert len(found) == len(wanted) or not is_due, "prompt log-probabilities are missing"

    def _check_ledger(self, request: Request) -> None:
        ledger = request.ledger
        assert 0 <= ledger.watermark <= ledger.prompt_len + ledger.num_committed - 1, "the watermark passed the commits"
        assert ledger.token_ids[: ledger.prompt_len] == list(request.spec.prompt_token_ids), "the prompt changed"
        assert ledger.num_candidates <= 2 * self.config.window_size, "more than 2W candidates"
        if not ledger.deterministic or self.config.mode == "invariant" or request.is_finished:
            assert ledger.num_candidates == 0, "candidates where there are none"
        if request not in self.core.scheduler.running:
            assert not request.pages.blocks, "memory of a request that does not run"
            assert ledger.num_candidates == 0, "candidates without memory"
            return
        assert not request.is_finished, "a finished request runs"
        assert len(request.pages.blocks) <= self.pool.blocks_for(ledger.num_tokens + 1), "memory of dropped candidates"
        self.runner.check_kv(request, ledger.num_computed, ledger.watermark)
        if not ledger.is_prefilling and ledger.deterministic:
            assert ledger.watermark == ledger.prompt_len + ledger.num_committed - 1, "the watermark fell behind"

    def _check_tables(self) -> None:
        tables = [request.pages.blocks for request in self.core.scheduler.running]
        holders = Counter(block for blocks in tables for block in blocks)
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == holders[block], f"block {block}: references and page tables disagree"
        assert all(len(set(blocks)) == len(blocks) for blocks in tables), "a block twice in a page table"
        content: dict[int, list[int]] = {}
        for request in self.core.scheduler.running:
            for index, block in enumerate(request.pages.blocks):
                if holders[block] > 1:
                    stop = (index + 1) * self.pool.block_size
                    assert self.pool._is_cached(block), "a block is shared that was not published"
                    assert stop <= request.ledger.watermark, "a block is shared above the watermark"
                    prefix = request.ledger.token_ids[:stop]
                    assert content.setdefault(block, prefix) == prefix, "a block is shared by unequal prefixes"

    def _check_cache(self) -> None:
        cache, size = self.core.cache, self.pool.block_size
        if cache is None:
            return
        assert len(cache._entries) == len(cache._key_of), "a published block has two keys, or none"
        prefixes: dict[int, tuple[int, ...]] = {0: ()}
        for (parent, tokens), (block, name) in sorted(cache._entries.items(), key=lambda entry: entry[1][1]):
            assert cache._key_of[block] == (parent, tokens), "a published block under a wrong key"
            cells = [self.runner.cells.get(block * size + offset, NOTHING) for offset in range(size)]
            assert all(cell.is_canonical for cell in cells), "a published block is not canonical"
            assert tuple(cell.token_id for cell in cells) == tokens, "a published block holds other tokens than its key"
            if parent in prefixes:
                prefixes[name] = prefixes[parent] + tokens
                wanted = digests(prefixes[name])[-size:]
                assert [cell.digest for cell in cells] == wanted, "a published block belongs to another prefix"

    def _check_commits(self, work: Pass, committed: dict[Request, int]) -> None:
        for segment in work.segments:
            request, rows = segment.request, segment.rows
            is_sampled = rows.stop >= request.ledger.prompt_len + committed[request]
            if is_sampled and not segment.is_draft:
                assert request.ledger.num_committed > committed[request], "a window committed nothing"
            elif segment.is_draft and request.ledger.deterministic:
                assert request.ledger.num_committed == committed[request], "a candidate was committed unverified"

    def _check_neighbours(self, work: Pass) -> None:
        """An ordinary request that decodes is in this pass or was in the last one: it waits for nobody's window."""
        if self.config.mode == "invariant" or self.core.scheduler.shapes.pass_rows < self.config.max_num_seqs:
            return
        running = self.core.scheduler.running
        ordinary = (request for request in running if not request.ledger.deterministic)
        decoding = {request for request in ordinary if not request.ledger.is_prefilling}
        left_out = decoding - {segment.request for segment in work.segments}
        assert not left_out & self._left_out, "an ordinary request waited for two passes"
        assert work.is_canonical or not left_out, "a fast pass left an ordinary request out"
        verified = [
            segment for segment in work.segments if segment.request.ledger.num_candidates and not segment.is_draft
        ]
        assert len(verified) <= self.config.verify_batch_size or not left_out, "more than G windows, at others' expense"
        self._left_out = left_out
        self.num_left_out += len(left_out)

    def _check_tally(self, request: Request) -> None:
        tally, stats = self.runner.tally(request), request.stats
        if request.finish_reason not in _CUT_SHORT:
            found = (stats.num_windows, stats.num_rollbacks, stats.num_recomputed_tokens)
            assert found == (tally.windows, tally.rollbacks, tally.recomputed), "the statistics are wrong"


# Workloads ------------------------------------------------------------------------------------------------------------

MAX_MODEL_LEN = 24
MAX_TOKENS = 11
SHARED_PREFIX = (1, 2, 3, 1, 2, 2, 1, 1, 3, 2)
"""Prompts start with a part of it, so that the prefix cache has something to find."""


def make_config(**fields):
    """A small engine; `canonical_logit_rows` has no meaning without an lm_head."""
    small = {"window_size": 4, "verify_batch_size": 2, "canonical_rows": 8, "max_num_seqs": 6, "block_size": 2}
    return EngineConfig(model="simulated", canonical_logit_rows=1, **(small | fields))


def make_simulation(config, spare_blocks, seed=0, row_counts=None):
    """The smallest pool that holds one request of full length, and a few blocks more."""
    return Simulation(config, -(-MAX_MODEL_LEN // config.block_size) + 1 + spare_blocks, seed, row_counts)


def random_config(random):
    window = random.randint(2, 8)
    return make_config(
        mode=random.choice(["verify", "verify", "auto", "auto", "invariant"]),
        window_size=window,
        verify_batch_size=random.randint(1, 4),
        canonical_rows=max(window, random.choice([4, 6, 8, 12, 16])),
        max_num_seqs=random.randint(1, 10),
        max_num_batched_tokens=random.choice([None, None, random.randint(1, 8)]),
        block_size=random.randint(2, 4),
        enable_prefix_caching=random.random() < 0.8,
    )


def random_prompt(random):
    return [*SHARED_PREFIX[: random.randint(0, 10)], *(random.randint(1, 3) for _ in range(random.randint(1, 3)))]


def random_params(random, **fields):
    max_tokens = random.randint(1, MAX_TOKENS)
    drawn = {
        "deterministic": random.random() < 0.6,
        "n": random.choice([1, 1, 2]),
        "seed": random.randint(0, 3),
        "max_tokens": max_tokens,
        "min_tokens": random.randint(0, min(3, max_tokens)),
        "ignore_eos": random.random() < 0.6,
        "stop_token_ids": random.choice([None, None, [6]]),
        "stop": random.choice([None, None, "abc", ["bb", "ca"]]),
        "logprobs": random.choice([None, 0]),
        "prompt_logprobs": random.choice([None, None, 0]),
    }
    return SamplingParams(**(drawn | fields))


def disturbed_run(seed, num_operations=80):
    """A run with arrivals, cancellations, preemptions, a failing pass now and then, and a changing adversary."""
    random = Random(seed)
    row_counts = random.choice([None, range(1, 17), [1, 2, 3, 6, 12], [4, 8, 16]])
    simulation = make_simulation(random_config(random), random.choice([0, 2, 8, 60]), seed, row_counts)
    scheduler = simulation.core.scheduler
    for _ in range(num_operations):
        dice = random.random()
        if dice < 0.15 or not scheduler.has_work:
            simulation.submit(random_prompt(random), random_params(random))
        elif dice < 0.17:
            simulation.cancel(random.choice(simulation.requests))
        elif dice < 0.21 and scheduler.running:
            simulation.preempt(random.choice(scheduler.running))
        elif dice < 0.22:
            simulation.runner.fail_next = True
        elif dice < 0.25:
            simulation.runner.wrong_rate = random.choice([0.0, 0.01, 0.2, 1.0])
            simulation.runner.violation_rate = random.choice([0.0, 0.0, 0.2])
            simulation.runner.unusable_rate = random.choice([0.0, 0.0, 0.0, 0.05])
        else:
            simulation.step()
    simulation.run()
    return simulation


SEEDS = range(30)
"""Enough disturbed runs to reach everything, and to catch every mutant."""


def quiet_run(config, *, spare_blocks=8, wrong_rate=0.0, num_requests=10, seed=5):
    """The same deterministic requests for every configuration and adversary."""
    random = Random(seed)
    simulation = make_simulation(config, spare_blocks)
    simulation.runner.wrong_rate = wrong_rate
    for _ in range(num_requests):
        simulation.submit(random_prompt(random), random_params(random, deterministic=True, n=1))
        simulation.step()
    simulation.run()
    return simulation


def crowded_run(seed):
    """Many ordinary requests among prompts and windows, and canonical passes that are too small for all of them."""
    random = Random(seed)
    simulation = make_simulation(make_config(canonical_rows=4, max_num_seqs=24), spare_blocks=300, seed=seed)
    for _ in range(50):
        params = random_params(random, n=2, max_tokens=MAX_TOKENS, min_tokens=3, ignore_eos=True, stop=None)
        simulation.submit(random_prompt(random), params)
        simulation.step()
        simulation.step()
    simulation.run()
    return simulation
