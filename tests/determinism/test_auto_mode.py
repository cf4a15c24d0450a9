"""`auto`: what canonical passes of a measured class decode is committed at once, and equals the oracle all the same."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from harness import Reference, Schedule, assert_equals_oracle, bits, run
from llm42.kernels import atlas as atlases
from llm42.kernels.atlas import Atlas

MEASURED = {"canonical_rows": None, "canonical_logit_rows": None}
"""The canonical class is measured, as users have it."""
BUSY = Schedule(seed=3, order="shuffled", steps_between_arrivals=2, neighbours=12, preempt_rate=0.05)


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A function (kernels, dtype) to a `Reference` whose class is measured."""
    made = {}

    def make(kernels="native", dtype="bfloat16") -> Reference:
        if (kernels, dtype) not in made:
            made[kernels, dtype] = Reference(tmp_path_factory.mktemp("auto"), "llama", kernels, dtype, **MEASURED)
        return made[kernels, dtype]

    return make


def busy_engine(ref: Reference, **fields):
    engine = ref.engine(**fields)
    engine.core.scheduler.spot_check_interval = 4
    return engine


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("native", "bfloat16"), ("native", "float16"), ("native", "float32"), ("portable", "bfloat16")],
)
def test_direct_commits_in_a_measured_class_equal_the_oracle(measured, kernels, dtype):
    ref = measured(kernels, dtype)
    engine = busy_engine(ref, mode="auto")
    ran = run(engine, ref.calls, BUSY)
    assert_equals_oracle(ref, ran)
    assert len(engine.atlas.row_counts) > 10
    assert engine.core.num_spot_checked > 50
    assert engine.core.num_violations == 0
    assert ran.total("num_rollbacks") == 0


@pytest.mark.parametrize("mode", ["verify", "invariant"])
def test_every_mode_gives_the_same_bits_in_a_measured_class(measured, mode):
    ref = measured()
    ran = run(ref.engine(mode=mode), ref.calls, BUSY)
    assert_equals_oracle(ref, ran)
    assert (ran.total("num_windows") > 0) == (mode == "verify")


@pytest.mark.parametrize("max_num_seqs", [1, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [None, 17])
def test_pass_sizes_change_nothing(measured, max_num_seqs, max_num_batched_tokens):
    ref = measured()
    engine = busy_engine(ref, mode="auto", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert_equals_oracle(ref, run(engine, ref.calls))
    assert engine.core.num_spot_checked > 0


def test_a_class_of_one_row_count_drafts_and_verifies(reference):
    """Padding a few rows to 64 costs more than verifying them; a full batch is committed directly."""
    ref = reference("llama", "jitter")
    ran = run(ref.engine(mode="auto"), ref.calls[:2])
    assert_equals_oracle(replace_calls(ref, 2), ran)
    assert ran.total("num_windows") > 0
    busy = run(ref.engine(mode="auto"), ref.calls, Schedule(neighbours=8))
    assert_equals_oracle(ref, busy)


def replace_calls(ref, count):
    """The first calls of a reference."""
    shorter = object.__new__(Reference)
    shorter.__dict__.update(ref.__dict__, calls=ref.calls[:count], expected=ref.expected[:count])
    return shorter


def test_a_false_class_is_caught_by_the_spot_check_and_never_used_again(reference, monkeypatch, caplog):
    """The partner: kernels whose bits change with every row count, and an atlas that says they do not."""
    everything = Atlas({}, atlases.BUCKETS, atlases.LOGIT_BUCKETS, {})
    monkeypatch.setattr("llm42.engine.calibration._atlas", lambda *_: everything)
    monkeypatch.setattr("llm42.engine.calibration.self_test", lambda *_: None)
    ref = reference("llama", "jitter")
    engine = busy_engine(ref, mode="auto")
    fingerprint = engine.system_fingerprint
    with caplog.at_level(logging.ERROR):
        ran = run(engine, ref.calls, Schedule(neighbours=8))
    assert engine.core.num_violations > 0
    assert not engine.core.scheduler.commits_directly
    assert engine.system_fingerprint != fingerprint, "other bits from now on need another name"
    assert len(engine.core.scheduler.shapes.canonical.row_counts) == 1
    assert any("spot check failed" in record.message and "class" in record.message for record in caplog.records)
    assert ran.total("num_windows") > 0, "after the violation everything is verified"
    assert [bits(output) for output in ran.outputs] != ref.expected, "without the class's truth outputs do change"


def test_a_restart_with_a_known_atlas_has_the_same_contract_and_bits(measured):
    ref = measured()
    first, second = ref.engine(mode="auto"), ref.engine(mode="auto")
    assert first.system_fingerprint == second.system_fingerprint
    call = replace(ref.calls[3])
    assert bits(run(first, [call]).outputs[0]) == bits(run(second, [call]).outputs[0]) == ref.expected[3]
