"""Proof that the simulation can fail: each mutant breaks one rule of protocol.md, and must be caught.

The partner of `test_engine_machine.py`: the same runs, which pass there, must raise here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from llm42.cache import BlockPool, PageTable, PrefixCache
from llm42.engine.core import EngineCore
from llm42.engine.request import Request
from llm42.engine.scheduler import Scheduler
from llm42.protocol import GroupingPolicy, Ledger, ShapeClass, Verdict, judge
from llm42.protocol import ledger as ledger_module
from llm42.sampling.params import SamplingParams
from simulated import SimulatedRunner
from simulation import MAX_TOKENS, SEEDS, crowded_run, disturbed_run, make_config, make_simulation


def accept_a_wrong_candidate(patch):
    def lenient(candidates, generated):
        verdict = judge(candidates, generated)
        if not verdict.is_rollback:
            return verdict
        return replace(verdict, committed=(*verdict.committed[:-1], candidates[verdict.num_matched]))

    patch.setattr(ledger_module, "judge", lenient)


def commit_nothing_on_a_mismatch(patch):
    def harsh(candidates, generated):
        verdict = judge(candidates, generated)
        return replace(verdict, committed=verdict.committed[:-1]) if verdict.is_rollback else verdict

    patch.setattr(ledger_module, "judge", harsh)


def overlook_a_mismatch_on_the_last_candidate(patch):
    def careless(candidates, generated):
        verdict = judge(candidates, generated)
        return Verdict(verdict.committed, verdict.num_matched, max(0, verdict.num_dropped - 1))

    patch.setattr(ledger_module, "judge", careless)


def keep_the_candidates_after_a_mismatch(patch):
    advance = Ledger.advance

    def mutant(ledger, rows, generated):
        candidates = ledger.candidates
        verdict = advance(ledger, rows, generated)
        if verdict is not None and verdict.is_rollback:
            ledger.token_ids.extend(candidates[verdict.num_matched + 1 :])
        return verdict

    patch.setattr(Ledger, "advance", mutant)


def store_the_watermark_apart(patch):
    patch.setattr(Ledger, "watermark", property(lambda ledger: ledger._canonical))


def commit_candidates_at_once(patch):
    draft = Ledger.draft

    def mutant(ledger, token_id):
        draft(ledger, token_id)
        ledger.num_committed = ledger.num_tokens - ledger.prompt_len

    patch.setattr(Ledger, "draft", mutant)


def keep_tokens_after_the_stop(patch):
    patch.setattr(Ledger, "truncate", lambda _ledger, _num_committed: None)


def sample_with_the_newest_prefix(patch):
    sample_row = Request.sample_row
    patch.setattr(Request, "sample_row", lambda request, _position: sample_row(request, request.ledger.num_tokens - 1))


def draft_without_limit(patch):
    patch.setattr(GroupingPolicy, "can_draft", lambda _policy, _state: True)


def keep_the_memory_of_dropped_candidates(patch):
    patch.setattr(PageTable, "trim", lambda _table, _num_positions: None)


def trim_without_release(patch):
    def mutant(table, num_positions):
        del table.blocks[table._pool.blocks_for(num_positions) :]

    patch.setattr(PageTable, "trim", mutant)


def release_without_forgetting(patch):
    patch.setattr(PageTable, "free", lambda table: table._pool.release(reversed(table.blocks)))


def share_without_a_reference(patch):
    patch.setattr(BlockPool, "share", lambda _pool, _blocks: None)


def evict_without_telling_the_cache(patch):
    patch.setattr(BlockPool, "_evict", lambda pool: pool._evictable.popitem(last=False)[0])


def publish_above_the_watermark(patch):
    publish = PrefixCache.publish
    patch.setattr(PrefixCache, "publish", lambda cache, table, ids, _watermark: publish(cache, table, ids, len(ids)))


def publish_without_the_parent(patch):
    publish = PrefixCache.publish

    def mutant(cache, table, token_ids, watermark):
        table.cached_parent = 0
        publish(cache, table, token_ids, watermark)

    patch.setattr(PrefixCache, "publish", mutant)


def verify_into_other_slots(patch):
    write = SimulatedRunner._write

    def mutant(runner, segment, written, **flags):
        cells = runner.cells
        if segment.request.ledger.num_candidates and not segment.is_draft:
            runner.cells = dict(cells)
        write(runner, segment, written, **flags)
        runner.cells = cells

    patch.setattr(SimulatedRunner, "_write", mutant)


def preempt_without_freeing(patch):
    preempt = Scheduler.preempt

    def mutant(scheduler, request):
        blocks = list(request.pages.blocks)
        scheduler._pool.share(blocks)
        preempt(scheduler, request)
        request.pages.blocks.extend(blocks)

    patch.setattr(Scheduler, "preempt", mutant)


def make_ordinary_requests_wait(patch):
    is_due = Scheduler._is_canonical_due

    def mutant(scheduler, work):
        scheduler._left_out = False
        return is_due(scheduler, work)

    patch.setattr(Scheduler, "_is_canonical_due", mutant)


def survive_a_failing_pass(patch):
    patch.setattr(EngineCore, "_fail_pass", lambda _core, _work, _error: [])


def stay_silent_about_new_tokens(patch):
    step = EngineCore.step
    patch.setattr(EngineCore, "step", lambda core: [request for request in step(core) if request.is_finished])


def commit_the_rows_of_a_spot_check_once_more(patch):
    advance = EngineCore._advance

    def mutant(core, segment, generated):
        ledger, again = segment.request.ledger, segment.rows[: segment.num_checked]
        known = [ledger.token_ids[position + 1] for position in again]
        committed = advance(core, segment, generated)
        ledger.token_ids.extend(known)
        ledger.num_committed += len(known)
        return (*committed, *known)

    patch.setattr(EngineCore, "_advance", mutant)


def check_rows_of_the_prompt(patch):
    check = Scheduler._add_spot_check

    def mutant(scheduler, fill):
        check(scheduler, fill)
        for segment in fill.segments:
            if segment.num_checked and segment.rows.start == segment.request.ledger.prompt_len and fill.free:
                rows = range(segment.rows.start - 1, segment.rows.stop)
                fill.replace(replace(segment, rows=rows, num_checked=segment.num_checked + 1))

    patch.setattr(Scheduler, "_add_spot_check", mutant)


def check_rows_of_published_blocks(patch):
    check = Scheduler._add_spot_check

    def mutant(scheduler, fill):
        published = {segment.request: segment.request.pages.num_published for segment in fill.segments}
        for request in published:
            request.pages.num_published = 0
        check(scheduler, fill)
        for request, count in published.items():
            request.pages.num_published = count

    patch.setattr(Scheduler, "_add_spot_check", mutant)


def commit_directly_in_a_fast_pass(patch):
    plan = Scheduler.plan

    def mutant(scheduler):
        work = plan(scheduler)
        if work is None or work.is_canonical or not scheduler.commits_directly:
            return work
        return replace(work, segments=tuple(map(_as_direct, work.segments)))

    patch.setattr(Scheduler, "plan", mutant)


def _as_direct(segment):
    """A draft of a deterministic request as a window of its one row, which commits its token."""
    ledger = segment.request.ledger
    return replace(segment, is_draft=False) if ledger.deterministic and not ledger.num_candidates else segment


def commit_directly_while_candidates_exist(patch):
    draft = Ledger.draft

    def mutant(ledger, token_id):
        has_candidates = ledger.num_candidates > 0
        draft(ledger, token_id)
        if has_candidates:
            ledger.num_committed = ledger.num_tokens - ledger.prompt_len

    patch.setattr(Ledger, "draft", mutant)


def pad_to_no_class(patch):
    patch.setattr(ShapeClass, "pad", lambda _shapes, rows: rows)


def overlook_violations(patch):
    patch.setattr(Scheduler, "stop_direct_commits", lambda _scheduler: None)


def keep_the_class_after_a_violation(patch):
    def mutant(scheduler):
        scheduler.commits_directly = False

    patch.setattr(Scheduler, "stop_direct_commits", mutant)


MUTANTS = [
    accept_a_wrong_candidate,
    commit_nothing_on_a_mismatch,
    overlook_a_mismatch_on_the_last_candidate,
    keep_the_candidates_after_a_mismatch,
    store_the_watermark_apart,
    commit_candidates_at_once,
    keep_tokens_after_the_stop,
    sample_with_the_newest_prefix,
    draft_without_limit,
    keep_the_memory_of_dropped_candidates,
    trim_without_release,
    release_without_forgetting,
    share_without_a_reference,
    evict_without_telling_the_cache,
    publish_above_the_watermark,
    publish_without_the_parent,
    verify_into_other_slots,
    preempt_without_freeing,
    make_ordinary_requests_wait,
    survive_a_failing_pass,
    stay_silent_about_new_tokens,
    commit_the_rows_of_a_spot_check_once_more,
    check_rows_of_the_prompt,
    check_rows_of_published_blocks,
    commit_directly_in_a_fast_pass,
    commit_directly_while_candidates_exist,
    pad_to_no_class,
    overlook_violations,
    keep_the_class_after_a_violation,
]


def violated_run(seed):
    """The first spot check fails: there is no second one, and canonical passes have one row count from then on."""
    simulation = make_simulation(make_config(mode="auto", max_num_seqs=8), 60, seed, [1, 2, 4, 6, 8, 12, 16])
    runner, row_counts = simulation.runner, set()
    check_pass = runner.on_pass

    def on_pass(work):
        check_pass(work)
        if work.is_canonical and runner.num_violations:
            row_counts.add(work.num_rows)

    runner.violation_rate, runner.on_pass = 1.0, on_pass
    params = SamplingParams(max_tokens=MAX_TOKENS, deterministic=True, ignore_eos=True)
    for index in range(12):
        simulation.submit([1, 2, index % 3], params)
        simulation.step()
    simulation.run()
    assert runner.num_violations == simulation.core.num_violations == 1, "direct commits went on after a violation"
    assert len(row_counts) == 1, "canonical passes of several row counts after a violation"


@pytest.mark.parametrize("seed", range(3))
def test_a_violation_ends_direct_commits_and_the_class(seed):
    """The partner of the mutants that do not fall back."""
    violated_run(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012
        for seed in SEEDS:
            disturbed_run(seed)
        crowded_run(0)
        violated_run(0)
