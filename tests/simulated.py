"""A runner without a model: a hash plays the model, and every row checks what attention would read.

`SimulatedRunner` stands where `llm42.engine.runner.Runner` stands. Its model is a hash of the whole prefix, so the
oracle is a short loop; its KV memory is a table of slots, so that wrong, stale and uncanonical KV is seen as such; its
fast path is an adversary that guesses wrong as often as it is told to. Whatever is wrong is an AssertionError.
`simulation.py` drives the real engine core over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from llm42.cache import BlockPool
from llm42.config import EngineConfig
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.runner import SegmentResult
from llm42.engine.scheduler import Pass, PassShapes, Segment
from llm42.sampling.logprobs import TokenLogprobs
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
NOTHING = Cell(-1, -1, 0, is_canonical=False)


@dataclass
class Tally:
    """What the runner saw happen to one request, to be compared with what the engine says."""

    emitted: list[int] = field(default_factory=list)
    windows: int = 0
    rollbacks: int = 0
    recomputed: int = 0


class SimulatedRunner:
    """Executes passes on the hash; checks all that attention would read, and all that is written."""

    def __init__(self, config: EngineConfig, pool: BlockPool, shapes: PassShapes, seed: int = 0) -> None:
        self._config = config
        self._shapes = shapes
        self.max_window: Callable[[], int] = lambda: config.window_size
        """W, where the scheduler chooses it."""
        self._pool = pool
        self._random = Random(seed)
        self.cells: dict[int, Cell] = {}
        self.tallies: dict[Request, Tally] = {}
        self.wrong_rate = 0.0
        """How often the token of a draft is wrong."""
        self.unusable_rate = 0.0
        """How often the fast path has no token at all."""
        self.violation_rate = 0.0
        """How often a spot check fails."""
        self.num_checked = self.num_violations = 0
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
        limit = self._shapes.canonical_budget if work.is_canonical else self._shapes.pass_rows
        num_rows = sum(len(segment.rows) for segment in work.segments)
        assert num_rows <= limit, "more rows than the pass may carry"
        assert num_rows <= work.num_rows, "more rows than the pass has"
        assert not work.is_canonical or work.num_rows in self._shapes.canonical, "a row count outside the class"
        assert work.is_canonical or config.mode != "invariant", "a fast pass in invariant mode"
        for segment in work.segments:
            ledger, rows = segment.request.ledger, segment.rows
            assert len(rows) > 0, "a segment without rows"
            if segment.is_draft:
                assert config.mode != "invariant", "a draft in invariant mode"
                assert rows == range(ledger.num_tokens - 1, ledger.num_tokens), "a draft of another row than the last"
                assert not ledger.is_prefilling, "a draft without KV below"
                assert ledger.num_candidates < 2 * self.max_window(), "too many candidates"
                assert not (ledger.num_candidates and _ends(segment.request)), "drafting after a finished candidate"
            else:
                assert work.is_canonical, "a window in a fast pass"
                assert rows.stop <= ledger.num_tokens, "rows without a token"
                assert not ledger.num_candidates or len(rows) <= self.max_window(), "a window over W"
            if segment.num_checked:
                assert config.mode == "auto", "a spot check where nothing is committed directly"
                assert ledger.num_candidates == 0, "a spot check of a request with candidates"
                assert rows.start + segment.num_checked == ledger.watermark, "a spot check of other rows than committed"
                assert rows.start >= ledger.prompt_len, "a spot check of the prompt"

    def _write(self, segment: Segment, written: set[int], *, is_canonical: bool, is_garbage: bool = False) -> None:
        """Store the KV of the rows, before any row reads: as a pass does, layer by layer."""
        request, rows = segment.request, segment.rows
        below = self.cells.get(self.slot(request, rows.start - 1), NOTHING) if rows.start else _START
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
            cell = self.cells.get(self.slot(request, position), NOTHING)
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
        self.num_checked += segment.num_checked
        if segment.num_checked and self._random.random() < self.violation_rate:
            self.num_violations += 1
            result.violation = "simulated bits"
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
