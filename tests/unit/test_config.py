"""`EngineConfig`: every field is checked at once, and the error names the field, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import re

import pytest

from llm42.config import DTYPES, KERNELS, MODES, EngineConfig
from llm42.engine.scheduler import PassShapes
from llm42.protocol import ShapeClass

OPTIONAL = (
    *("max_num_batched_tokens", "max_model_len", "kv_cache_bytes", "num_threads"),
    *("window_size", "verify_batch_size", "canonical_rows", "canonical_logit_rows"),
)
INTEGERS = (*OPTIONAL, "max_num_seqs", "block_size", "max_queue_len")


def config(**fields) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", **fields})


def test_the_table_of_integers_is_complete():
    assert set(INTEGERS) == {f.name for f in dataclasses.fields(EngineConfig) if f.type.startswith("int")}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [8]])
def test_what_is_no_positive_integer_is_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} must be an integer of at least")) as caught:
        config(**{name: value})
    assert str(caught.value).endswith(f"not {value!r}")


@pytest.mark.parametrize("name", INTEGERS)
def test_none_means_a_derived_default_only_where_there_is_one(name):
    if name in OPTIONAL:
        assert getattr(config(**{name: None}), name) is None
    else:
        with pytest.raises(ValueError, match=rf"{name} must be an integer of at least \d, not None"):
            config(**{name: None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "", "model must be a name, a directory, a GGUF file or a hub id, not ''"),
        ("mode", "fast", "mode must be one of auto, verify, invariant, off, not 'fast'"),
        ("mode", None, "mode must be one of auto, verify, invariant, off, not None"),
        ("kernels", "cuda", "kernels must be one of auto, native, portable, jitter, not 'cuda'"),
        ("dtype", "int8", "dtype must be one of bfloat16, float16, float32, not 'int8'"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, not 1"),
        ("window_size", 1, "window_size must be an integer of at least 2, not 1"),
        ("block_size", 1, "block_size must be an integer of at least 2, not 1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**{name: value})


@pytest.mark.parametrize(("name", "values"), [("mode", MODES), ("dtype", DTYPES), ("kernels", KERNELS)])
def test_every_listed_choice_is_accepted(name, values):
    assert [getattr(config(**{name: value}), name) for value in values] == list(values)


def test_a_configuration_cannot_be_changed_and_an_unknown_field_is_an_error():
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.window_size = 8
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        config(tensor_parallel_size=2)


def test_a_description_has_every_field():
    made = config(window_size=8)
    assert EngineConfig(**made.describe()) == made


def test_a_window_larger_than_the_pass_that_is_set_beside_it_is_refused():
    message = "window_size 33 does not fit a pass of canonical_rows 32; lower window_size or raise canonical_rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        config(window_size=33, canonical_rows=32)
    assert config(window_size=32, canonical_rows=32).window_size == 32


@pytest.mark.parametrize(
    ("fields", "pass_rows", "canonical_budget"),
    [
        ({}, 128, 64),
        ({"max_num_seqs": 100}, 164, 64),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 100}, 16, 16),
        ({"max_num_batched_tokens": 1000}, 1000, 64),
    ],
)
def test_a_token_budget_limits_what_a_pass_carries_and_not_the_shape_of_a_canonical_one(
    fields, pass_rows, canonical_budget
):
    shapes = PassShapes.choose(config(**fields), ShapeClass([64]))
    assert (shapes.pass_rows, shapes.canonical_budget, shapes.canonical.pad(1)) == (pass_rows, canonical_budget, 64)


@pytest.mark.parametrize(("affordable", "pass_rows"), [(None, 256), (256, 256), (140, 140), (8, 128)])
def test_without_a_token_budget_a_pass_has_what_is_affordable_and_room_for_every_sequence(affordable, pass_rows):
    shapes = PassShapes.choose(config(max_num_seqs=64), ShapeClass([8, 80, 256]), affordable)
    assert shapes.pass_rows == pass_rows
