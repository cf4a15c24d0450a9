"""What an engine decides at its start: classes, row counts, costs, and whether the promise can be given."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from harness import make_engine
from llm42.engine import calibration
from llm42.kernels import atlas as atlases
from llm42.kernels.atlas import Atlas, NoClassError
from llm42.protocol import ShapeClass
from llm42.sampling.params import SamplingParams
from tiny_models import write_tiny_model

MEASURED = {"canonical_rows": None, "canonical_logit_rows": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache: nothing is known from an earlier start."""
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _threads():
    """An engine sets the threads of its process; the next test starts with those of the suite."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def num_measured(monkeypatch):
    """A list with an entry for each time that an atlas was measured."""
    calls, measure = [], atlases.measure

    def counting(*arguments):
        calls.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(atlases, "measure", counting)
    return calls


@pytest.fixture
def start(model):
    """A function of engine fields to a started engine."""
    return lambda **fields: make_engine(model, **{"kernels": "portable", "mode": "auto", **fields})


def shapes_of(engine):
    return engine.core.scheduler.shapes


def use_atlas(monkeypatch, row_counts, layer_seconds):
    found = Atlas({}, tuple(row_counts), (16,), layer_seconds)
    monkeypatch.setattr(calibration, "_atlas", lambda *_: found)
    monkeypatch.setattr(calibration, "self_test", lambda *_: None)


# Classes --------------------------------------------------------------------------------------------------------------


def test_a_fixed_row_count_is_a_class_of_one(start):
    engine = start(canonical_rows=48, canonical_logit_rows=8)
    assert engine.refusal is None
    assert (engine.atlas.row_counts, engine.atlas.logit_row_counts) == ((48,), (8,))
    assert shapes_of(engine).canonical == ShapeClass([48])
    assert engine.contract["canonical_class"] == {"rows": [48], "logit_rows": [8]}


@pytest.mark.parametrize("fields", [{"canonical_logit_rows": None}, {"canonical_rows": None}], ids=str)
def test_fixing_one_count_leaves_the_other_class_to_be_measured(start, fields):
    atlas = start(**{"canonical_rows": 48, "canonical_logit_rows": 8, **fields}).atlas
    is_fixed = (atlas.row_counts == (48,), atlas.logit_row_counts == (8,))
    assert is_fixed == ("canonical_rows" not in fields, "canonical_logit_rows" not in fields)


def test_by_default_the_class_is_the_measured_one(start):
    engine = start(**MEASURED)
    decoder = engine.decoder
    measured = atlases.measure(decoder.kernels, decoder.linears, decoder.lm_head)
    assert engine.refusal is None
    assert engine.atlas.classes == measured.classes
    assert shapes_of(engine).canonical == measured.rows
    assert set(engine.atlas.classes) == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert set(measured.row_counts) <= set(atlases.BUCKETS)
    assert engine.contract["canonical_class"]["rows"] == list(measured.row_counts)


def test_kernels_whose_bits_change_with_every_row_count_have_a_class_of_one_near_64(start):
    engine = start(kernels="jitter", **MEASURED)
    assert engine.refusal is None
    assert (engine.atlas.row_counts, engine.atlas.logit_row_counts) == ((64,), (64,))


def test_invariant_mode_has_one_row_count_under_the_contract_of_auto(start):
    auto, invariant = start(**MEASURED), start(mode="invariant", **MEASURED)
    assert shapes_of(invariant).canonical.row_counts == (auto.atlas.rows.pad(64),)
    assert invariant.contract == auto.contract
    assert invariant.system_fingerprint == auto.system_fingerprint


# Refusals -------------------------------------------------------------------------------------------------------------


def serves(engine, *, deterministic):
    group = engine.make_requests("Once", SamplingParams(max_tokens=3, deterministic=deterministic, ignore_eos=True))
    engine.core.add(group.sequences)
    while engine.core.has_work:
        engine.core.step()
    return len(group.sequences[0].ledger.committed) == 3


def test_mode_off_refuses_and_says_how_to_start_otherwise(start):
    engine = start(mode="off")
    with pytest.raises(ValueError, match=r"the engine runs with mode='off'; start it with mode='auto', 'verify' or"):
        serves(engine, deterministic=True)
    assert serves(engine, deterministic=False)


def test_mode_off_refuses_for_that_reason_even_if_the_self_test_fails(start, monkeypatch):
    monkeypatch.setattr(calibration, "self_test", lambda *_: "broken")
    assert start(mode="off").refusal.startswith("the engine runs with mode='off'")


def test_a_failed_self_test_refuses_deterministic_requests_with_its_reason_and_serves_ordinary_ones(
    start, monkeypatch, caplog
):
    monkeypatch.setattr(calibration, "self_test", lambda *_: "rows leak")
    engine = start(**MEASURED)
    assert engine.refusal == "the start-up self-test failed: rows leak"
    assert "deterministic requests will be refused: the start-up self-test failed: rows leak" in caplog.text
    with pytest.raises(ValueError, match="deterministic=True is refused: the start-up self-test failed: rows leak"):
        serves(engine, deterministic=True)
    assert serves(engine, deterministic=False)


@pytest.mark.parametrize(("fields", "rows"), [({}, 64), ({"canonical_rows": 32}, 32)], ids=str)
def test_kernels_without_a_class_refuse_deterministic_requests_and_serve_ordinary_ones(
    start, monkeypatch, fields, rows
):
    def fail(*_):
        raise NoClassError("no count is usable")

    monkeypatch.setattr(atlases, "measure", fail)
    engine = start(**{**MEASURED, **fields})
    assert engine.refusal == "the start-up self-test failed: no count is usable"
    assert (engine.atlas.row_counts, engine.atlas.logit_row_counts) == ((rows,), (rows,))
    assert serves(engine, deterministic=False)


def test_sound_kernels_serve_deterministic_requests(start):
    assert serves(start(), deterministic=True)


# Pass sizes and costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds_per_row", "fields", "pass_rows"),
    [
        (1e-6, {}, 512),
        (0.2 / 3 / 130, {}, 128),
        (1.0, {}, 65),
        (1.0, {"max_num_seqs": 40}, 104),
        (1.0, {"max_num_batched_tokens": 7}, 7),
        (1e-6, {"max_num_batched_tokens": 300}, 300),
    ],
    ids=str,
)
def test_a_pass_carries_what_takes_a_fifth_of_a_second_but_a_prompt_beside_everyone_at_least(
    start, monkeypatch, seconds_per_row, fields, pass_rows
):
    use_atlas(monkeypatch, atlases.BUCKETS, {rows: rows * seconds_per_row for rows in atlases.BUCKETS})
    shapes = shapes_of(start(**{"max_num_seqs": 1, "prefers_throughput": False, **fields}))
    assert shapes.pass_rows == pass_rows
    assert shapes.canonical == ShapeClass(atlases.BUCKETS), "times decide nothing about bits"
    assert shapes.canonical_budget == min(512, pass_rows)


@pytest.mark.parametrize(("fields", "pass_rows"), [({}, 512), ({"max_num_batched_tokens": 7}, 7)])
def test_offline_a_pass_carries_what_the_class_has_however_long_it_takes(start, monkeypatch, fields, pass_rows):
    use_atlas(monkeypatch, atlases.BUCKETS, dict.fromkeys(atlases.BUCKETS, 1.0))
    assert shapes_of(start(**fields)).pass_rows == pass_rows


def test_measured_times_are_the_first_estimate_of_costs(start, monkeypatch):
    use_atlas(monkeypatch, atlases.BUCKETS, {rows: 1e-5 * (40 + rows) for rows in atlases.BUCKETS})
    assert start().core.scheduler.costs.overhead_rows == pytest.approx(40.0)


# An earlier start -----------------------------------------------------------------------------------------------------


def saved(cache):
    return sorted((cache / "atlas").glob("*.json"))


def test_a_second_start_knows_the_atlas_of_the_first(start, cache, num_measured, caplog):
    with caplog.at_level(logging.INFO, logger=calibration.__name__):
        first = start(**MEASURED)
        assert (len(num_measured), len(saved(cache))) == (1, 1)
        second = start(**MEASURED)
    assert (len(num_measured), len(saved(cache))) == (1, 1)
    assert second.atlas == first.atlas
    assert second.system_fingerprint == first.system_fingerprint
    assert ["measured in" in record.message for record in caplog.records] == [True, False]
    assert "known in" in caplog.records[1].message


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"},
        {"num_threads": 2},
        {"kernels": "jitter"},
        {"canonical_rows": 32},
        {"canonical_logit_rows": 32},
    ],
    ids=str,
)
def test_an_atlas_is_known_under_its_own_contract_only(start, cache, num_measured, fields):
    start(**MEASURED)
    start(**{**MEASURED, **fields})
    assert (len(num_measured), len(saved(cache))) == (2, 2)


@pytest.mark.parametrize("fields", [{"mode": "verify"}, {"max_num_seqs": 3}, {"block_size": 4}], ids=str)
def test_an_atlas_is_known_whatever_changes_no_bits(start, num_measured, fields):
    start(**MEASURED)
    start(**{**MEASURED, **fields})
    assert len(num_measured) == 1


def test_an_atlas_that_does_not_hold_is_measured_again_and_replaced(start, cache, num_measured):
    """Under these kernels no two row counts agree, so the class in the file is a lie."""
    first = start(kernels="jitter", **MEASURED)
    (path,) = saved(cache)
    truth = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**truth, "row_counts": [32, 64]}), encoding="utf-8")
    second = start(kernels="jitter", **MEASURED)
    assert len(num_measured) == 2
    assert second.system_fingerprint == first.system_fingerprint
    assert json.loads(path.read_text(encoding="utf-8"))["row_counts"] == truth["row_counts"] == [64]


def test_an_atlas_that_cannot_be_read_is_measured_again_with_a_warning(start, cache, num_measured, caplog):
    start(**MEASURED)
    (path,) = saved(cache)
    path.write_text("{", encoding="utf-8")
    assert start(**MEASURED).refusal is None
    assert len(num_measured) == 2
    assert f"{path.name} cannot be read" in caplog.text


def test_a_cache_that_cannot_be_written_is_a_warning_only(start, cache, monkeypatch, caplog):
    (cache / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("LLM42_CACHE", str(cache / "file"))
    assert serves(start(**MEASURED), deterministic=True)
    assert "the atlas cannot be kept" in caplog.text
