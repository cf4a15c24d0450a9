"""An engine without a model: the real scheduler, ledgers and cache over a hash that plays the model, checked as it runs.

`SimulatedRunner` stands where `llm42.engine.runner.Runner` stands. Its model is a hash of the whole prefix, so the
oracle is a loop of three lines; its KV memory is a table of slots, so that every row can check what attention would
read; its fast path is an adversary that guesses wrong as often as it is told to. `Simulation` drives an `EngineCore`
over it and checks the invariants of protocol.md after every step. Whatever is wrong is an AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from llm42.cache import BlockPool
from llm42.config import EngineConfig
from llm42.engine.collect import OutputCollector
from llm42.engine.core import EngineCore
from llm42.engine.engine import RequestGroup
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.runner import SegmentResult
from llm42.engine.scheduler import Pass, Segment
from llm42.engine.text import OutputText
from llm42.sampling.logprobs import TokenLogprobs
from llm42.sampling.noise import child_seed
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import UNUSABLE

PIECES = ("", "a", "b", "ab", "c", "ca", "bb")
"""The text of each token; few and overlapping, so that guesses match by chance and stop strings cross tokens."""
VOCAB = len(PIECES)
EOS = 0
_ROOT = 0x243F6A8885A308D3
_MASK = 2**64 - 1


# The model ------------------------------------------------------------------------------------------------------------


def extend(digest: int, token_id: int) -> int:
    """The digest of a prefix and one more token: what the KV of a position stands for."""
    mixed = ((digest ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return mixed ^ (mixed >> 31)


def digests(token_ids: Iterable[int]) -> list[int]:
    """The digest of each prefix."""
    return list(accumulate(token_ids, extend, initial=_ROOT))[1:]


def choose(digest: int, seed: int, masked: Iterable[int] = ()) -> int:
    """The token that follows a prefix."""
    token = extend(digest, seed) % VOCAB
    while token in masked:
        token = (token + 1) % VOCAB
    return token


def logprob(digest: int, token_id: int) -> float:
    return -(extend(digest, token_id) % 1000) / 100


class PieceTokenizer:
    """As much of a tokenizer as `OutputText` and `OutputCollector` use."""

    def new_stream(self, *, skip_special_tokens: bool = True) -> PieceTokenizer:
        assert skip_special_tokens
        return self

    def step(self, token_id: int) -> str:
        return PIECES[token_id]

    def flush(self) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return PIECES[token_id]


# The oracle -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a caller gets; no finish reason while it goes on."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def stop_ids(spec: SequenceSpec) -> set[int]:
    ends = set(spec.params.stop_token_ids or ())
    return ends if spec.params.ignore_eos else ends | spec.eos_token_ids


def apply_stop_rules(spec: SequenceSpec, tokens: Iterable[int]) -> Outcome:
    """The output that a sequence of tokens makes: the first position that satisfies a rule ends it."""
    output: list[int] = []
    text = ""
    for token in tokens:
        output.append(token)
        counts = len(output) > spec.params.min_tokens
        if counts and token in stop_ids(spec):
            is_eos = token in spec.eos_token_ids and not spec.params.ignore_eos
            return Outcome(output, text, "stop", None if is_eos else token)
        shown, text = len(text), text + PIECES[token]
        ends = [
            (start, -len(stop), stop)
            for stop in spec.params.stop_strings
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > shown
        ]
        if counts and ends:
            start, _, stop = min(ends)
            return Outcome(output, text[:start], "stop", stop)
        if len(output) == spec.max_tokens:
            return Outcome(output, text, "length")
    return Outcome(output, text)


def oracle(spec: SequenceSpec) -> Outcome:
    """What the model generates alone."""

    def tokens() -> Iterator[int]:
        digest, output = digests(spec.prompt_token_ids)[-1], 0
        while True:
            token = choose(digest, spec.seed, stop_ids(spec) if output < spec.params.min_tokens else ())
            yield token
            digest, output = extend(digest, token), output + 1

    return apply_stop_rules(spec, tokens())


# The runner -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cell:
    """The KV of one slot."""

    position: int
    token_id: int
    digest: int
    is_canonical: bool
    """Whether a canonical pass wrote it over canonical KV."""


_START = Cell(-1, -1, _ROOT, is_canonical=True)
_NOTHING = Cell(-1, -1, 0, is_canonical=False)


@dataclass
class Tally:
    """What the runner saw happen to one request, to be compared with what the engine says."""

    emitted: list[int] = field(default_factory=list)
    windows: int = 0
    rollbacks: int = 0
    recomputed: int = 0


class SimulatedRunner:
    """Executes passes on the hash; checks all that attention would read, and all that is written."""

    def __init__(self, config: EngineConfig, pool: BlockPool, seed: int = 0) -> None:
        self._config = config
        self._pool = pool
        self._random = Random(seed)
        self.cells: dict[int, Cell] = {}
        self.tallies: dict[Request, Tally] = {}
        self.wrong_rate = 0.0
        """How often the token of a draft is wrong."""
        self.unusable_rate = 0.0
        """How often the fast path has no token at all."""
        self.fail_next = False
        self.last_pass: Pass | None = None
        self.on_pass: Callable[[Pass], None] = lambda _work: None
        self.violation: AssertionError | None = None
        """The first check that failed in a pass: the engine takes it for a failing pass and goes on."""

    def tally(self, request: Request) -> Tally:
        return self.tallies.setdefault(request, Tally())

    def slot(self, request: Request, position: int) -> int:
        """Where a position lies, from the page table, as the kernels compute it."""
        index, offset = divmod(position, self._pool.block_size)
        assert index < len(request.pages.blocks), f"position {position} has no slot"
        return request.pages.blocks[index] * self._pool.block_size + offset

    def execute(self, work: Pass) -> list[SegmentResult]:
        try:
            return self._execute(work)
        except AssertionError as violation:
            self.violation = violation
            raise

    def _execute(self, work: Pass) -> list[SegmentResult]:
        self.last_pass = work
        self._check_pass(work)
        self.on_pass(work)
        written: set[int] = set()
        if self.fail_next:
            self.fail_next = False
            for segment in work.segments[: 1 + len(work.segments) // 2]:
                self._write(segment, written, is_canonical=False, is_garbage=True)
            raise RuntimeError("simulated failure")
        for segment in work.segments:
            self._write(segment, written, is_canonical=work.is_canonical)
        for segment in work.segments:
            self._check_read(segment)
        return [self._result(segment) for segment in work.segments]

    def _check_pass(self, work: Pass) -> None:
        config = self._config
        requests = [segment.request for segment in work.segments]
        assert requests, "an empty pass"
        assert len(set(requests)) == len(requests), "a request twice in a pass"
        limit = config.canonical_budget if work.is_canonical else config.pass_rows
        assert sum(len(segment.rows) for segment in work.segments) <= limit, "more rows than the pass has"
        assert work.is_canonical or config.mode != "invariant", "a fast pass in invariant mode"
        for request, rows, is_draft in ((segment.request, segment.rows, segment.is_draft) for segment in work.segments):
            ledger = request.ledger
            assert len(rows) > 0, "a segment without rows"
            if is_draft:
                assert config.mode != "invariant", "a draft in invariant mode"
                assert rows == range(ledger.num_tokens - 1, ledger.num_tokens), "a draft of another row than the last"
                assert not ledger.is_prefilling, "a draft without KV below"
                assert ledger.num_candidates < 2 * config.window_size, "too many candidates"
                assert not (ledger.num_candidates and _ends(request)), "drafting goes on after a finished candidate"
            else:
                assert work.is_canonical, "a window in a fast pass"
                assert rows.stop <= ledger.num_tokens, "rows without a token"
                assert not ledger.num_candidates or len(rows) <= config.window_size, "a window over W"

    def _write(self, segment: Segment, written: set[int], *, is_canonical: bool, is_garbage: bool = False) -> None:
        """Store the KV of the rows, before any row reads: as a pass does, layer by layer."""
        request, rows = segment.request, segment.rows
        below = self.cells.get(self.slot(request, rows.start - 1), _NOTHING) if rows.start else _START
        for position in rows:
            slot = self.slot(request, position)
            block = slot // self._pool.block_size
            assert block != 0, "a row writes into the reserved block"
            assert self._pool.references(block) == 1, "a row writes into a block that is not its request's alone"
            assert not self._pool._is_cached(block), "a row writes into a published block"
            assert slot not in written, "two rows write into one slot"
            written.add(slot)
            token = request.ledger.token_ids[position]
            if is_garbage:
                self.cells[slot] = Cell(-1, -1, 0, is_canonical=True)
                continue
            below = Cell(position, token, extend(below.digest, token), is_canonical and below.is_canonical)
            self.cells[slot] = below

    def check_kv(self, request: Request, num_positions: int, num_canonical: int) -> None:
        """Check that positions hold the request's own prefix, and that the leading ones are canonical."""
        token_ids = request.ledger.token_ids[:num_positions]
        for position, (token, digest) in enumerate(zip(token_ids, digests(token_ids), strict=True)):
            cell = self.cells.get(self.slot(request, position), _NOTHING)
            found = (cell.position, cell.token_id, cell.digest)
            assert found == (position, token, digest), f"position {position} reads {cell}, not its own prefix"
            assert cell.is_canonical or position >= num_canonical, f"position {position} is not canonical"

    def _check_read(self, segment: Segment) -> None:
        self.check_kv(segment.request, segment.rows.stop, 0 if segment.is_draft else segment.rows.stop)

    def _result(self, segment: Segment) -> SegmentResult:
        request, rows, ledger = segment.request, segment.rows, segment.request.ledger
        result = SegmentResult()
        if request.wants_prompt_logprobs:
            scored = range(max(rows.start, len(request.prompt_logprobs)), min(rows.stop, ledger.prompt_len - 1))
            result.prompt_logprobs = [
                self._entry(request, position, ledger.token_ids[position + 1]) for position in scored
            ]
        first = rows.start if segment.is_draft else max(rows.start, ledger.prompt_len + ledger.num_committed - 1)
        for position in range(first, rows.stop):
            row = request.sample_row(position)
            is_masked = len(row.output_token_ids) < row.params.min_tokens
            digest = self.cells[self.slot(request, position)].digest
            token = choose(digest, row.seed, row.stop_token_ids if is_masked else ())
            if segment.is_draft:
                token = self._corrupt(token)
            result.generated.append(token)
            result.logprobs.append(self._entry(request, position, token))
        self._count(segment, result.generated)
        return result

    def _entry(self, request: Request, position: int, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, logprob(self.cells[self.slot(request, position)].digest, token), 1, ())

    def _corrupt(self, token: int) -> int:
        if self._random.random() < self.unusable_rate:
            return UNUSABLE
        if self._random.random() < self.wrong_rate:
            return (token + self._random.randrange(1, VOCAB)) % VOCAB
        return token

    def _count(self, segment: Segment, generated: Sequence[int]) -> None:
        tally, candidates = self.tally(segment.request), segment.request.ledger.candidates
        if segment.is_draft or not candidates:
            tally.emitted.extend(generated)
            return
        tally.windows += 1
        for index, (candidate, token) in enumerate(zip(candidates, generated, strict=False)):
            if candidate != token:
                tally.rollbacks += 1
                tally.recomputed += len(candidates) - index
                return


def _ends(request: Request) -> bool:
    """Whether the newest token would end the output."""
    num_outputs = request.ledger.num_tokens - request.ledger.prompt_len
    is_stop = request.ledger.token_ids[-1] in stop_ids(request.spec) and num_outputs > request.params.min_tokens
    return is_stop or num_outputs >= request.spec.max_tokens


# The simulation -------------------------------------------------------------------------------------------------------


class Simulation:
    """An engine core over the simulated runner, with every invariant checked after each operation."""

    def __init__(self, config: EngineConfig, num_blocks: int, seed: int = 0) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size)
        self.runner = SimulatedRunner(config, self.pool, seed)
        self.runner.on_pass = self._check_neighbours
        self.core = EngineCore(config, self.pool, self.runner)
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
            SequenceSpec(
                name, i, tuple(prompt), params, child_seed(params.seed or 0, i), max_tokens, frozenset({EOS})
            )
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
            cells = [self.runner.cells.get(block * size + offset, _NOTHING) for offset in range(size)]
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
        if self.config.mode == "invariant" or self.config.pass_rows < self.config.max_num_seqs:
            return
        running = self.core.scheduler.running
        ordinary = {request for request in running if not (request.ledger.deterministic or request.ledger.is_prefilling)}
        left_out = ordinary - {segment.request for segment in work.segments}
        assert not left_out & self._left_out, "an ordinary request waited for two passes"
        assert work.is_canonical or not left_out, "a fast pass left an ordinary request out"
        windows = [segment for segment in work.segments if not segment.is_draft and segment.request.ledger.num_candidates]
        assert len(windows) <= self.config.verify_batch_size or not left_out, "more than G windows, at others' expense"
        self._left_out = left_out
        self.num_left_out += len(left_out)

    def _check_tally(self, request: Request) -> None:
        tally, stats = self.runner.tally(request), request.stats
        if request.finish_reason not in _CUT_SHORT:
            found = (stats.num_windows, stats.num_rollbacks, stats.num_recomputed_tokens)
            assert found == (tally.windows, tally.rollbacks, tally.recomputed), "the statistics are wrong"


_CUT_SHORT = ("abort", "error")
