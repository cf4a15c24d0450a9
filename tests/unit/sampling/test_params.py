"""SamplingParams: every bad value is refused with a message that names field and value; good ones are normalised."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from llm42.sampling.params import MAX_LISTED_IDS, MAX_STOPS, SamplingParams, validate_for_vocab

NAN, INF = float("nan"), float("inf")

BAD_SCALARS = {
    "n": (0, -1, 1.0, True, None, "1"),
    "temperature": (-0.1, NAN, INF, -INF, True, None, "0.7", 1j, 10**400),
    "top_k": (-2, 1.5, True, None),
    "top_p": (0, 0.0, -0.1, 1.0001, NAN, False, None),
    "min_p": (-0.1, 1.1, NAN, True, None),
    "seed": (-1, 2**64, 0.5, True, "7"),
    "presence_penalty": (-2.1, 2.1, NAN, INF, True, None),
    "frequency_penalty": (-2.1, 2.1, NAN, INF, True, None),
    "repetition_penalty": (0, -1.0, NAN, INF, True, None),
    "min_tokens": (-1, 1.0, True, None, 17),
    "max_tokens": (0, -5, 2.0, True),
    "logprobs": (-1, 21, 1.0, True),
    "prompt_logprobs": (-1, 21, 1.0, True),
    "stop": (5, "", b"x", b"", {"a"}, ["a", ""], ["a", 5]),
    "stop_token_ids": (5, "5", b"5", {1}),
    "logit_bias": (5, [1, 2], "x", True),
    "ignore_eos": (1, None, "yes"),
    "include_stop_str_in_output": (0, None),
    "skip_special_tokens": (1, None),
    "deterministic": (1, None, "true"),
    "structured_outputs": [{"choice": ["a"]}, "a", 1],
}
BAD_ITEMS = [
    *[("stop_token_ids", [1, item], item) for item in (-1, 1.5, True, "1")],
    *[("logit_bias", {1: bias}, bias) for bias in (NAN, INF, 100.5, -101, True, None, "2")],
    *[("logit_bias", {token_id: 0.5}, token_id) for token_id in (-1, 1.0, "1", True)],
]
BAD_VALUES = [(field, value, value) for field, values in BAD_SCALARS.items() for value in values] + BAD_ITEMS


@pytest.mark.parametrize(("field", "value", "offender"), BAD_VALUES, ids=lambda item: repr(item)[:24])
def test_bad_value_is_refused_by_name_and_value(field, value, offender):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert f"got {offender!r}" in str(error.value)


def test_every_field_has_bad_values_in_the_table():
    assert set(BAD_SCALARS) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_min_tokens_over_max_tokens_names_both():
    with pytest.raises(ValueError, match=r"min_tokens .*max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_limits_are_inclusive_where_the_documentation_says_so():
    params = SamplingParams(
        n=1,
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1,
        seed=2**64 - 1,
        logit_bias={0: -100, 7: 100},
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1e-3,
        min_tokens=16,
        logprobs=20,
        prompt_logprobs=0,
    )
    assert params.seed == 2**64 - 1
    assert params.is_greedy


def test_values_are_normalised():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(3),
        stop=["a", "b"],
        stop_token_ids=[np.int32(4), 5],
        logit_bias={np.int64(3): 1},
    )
    assert type(params.temperature) is float
    assert type(params.top_p) is float
    assert type(params.top_k) is int
    assert params.stop == params.stop_strings == ("a", "b")
    assert params.stop_token_ids == (4, 5)
    assert [type(token_id) for token_id in params.stop_token_ids] == [int, int]
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("END", ("END",)), ([], ()), (("a", "b"), ("a", "b"))])
def test_stop_strings_are_always_a_tuple(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("field", "limit", "value_of"),
    [
        ("stop", MAX_STOPS, lambda count: ["x"] * count),
        ("stop_token_ids", MAX_LISTED_IDS, lambda count: [1] * count),
        ("logit_bias", MAX_LISTED_IDS, lambda count: dict.fromkeys(range(count), 1.0)),
    ],
)
def test_what_is_looked_at_for_every_token_is_limited(field, limit, value_of):
    assert len(getattr(SamplingParams(**{field: value_of(limit)}), field)) == limit
    with pytest.raises(ValueError, match=rf"{field} must have at most {limit} .*got {limit + 1}"):
        SamplingParams(**{field: value_of(limit + 1)})


def test_empty_logit_bias_is_none():
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_params_keep_their_own_copy_of_what_the_caller_may_change():
    bias, stops = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[1], stops[0] = 9.0, 9
    assert params.logit_bias == {1: 2.0}
    assert params.stop_token_ids == (3,)


def test_params_are_frozen_and_can_be_hashed_copied_and_pickled():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["x"], seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
    clones = [copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)]
    assert clones == [params] * 3
    assert {hash(clone) for clone in clones} == {hash(params)}


def test_greedy_is_temperature_zero_only():
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=5e-324).is_greedy


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name_and_value(field):
    def params(token_id):
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [0, token_id]})

    validate_for_vocab(params(99), 100)
    with pytest.raises(ValueError, match=rf"{field} has token id 100, .* 0\.\.99"):
        validate_for_vocab(params(100), 100)
