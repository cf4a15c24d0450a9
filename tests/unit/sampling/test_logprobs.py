"""Log-probabilities are those of the raw row, ranks follow the total order, and the row's surroundings do not show."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm42.sampling.logprobs import TokenLogprobs, token_logprobs
from llm42.sampling.params import SamplingParams
from llm42.sampling.sampler import SampleRow, sample

tied_values = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, -math.inf])
rows = st.lists(st.one_of(tied_values, st.floats(-40, 40, width=16)), min_size=1, max_size=200)
usable_rows = rows.filter(lambda values: max(values) > -math.inf)


@given(usable_rows, st.data())
def test_numbers_ranks_and_lists_follow_their_definition(values, data):
    token_id = data.draw(st.integers(0, len(values) - 1))
    k = data.draw(st.integers(0, 20))
    scored = token_logprobs(torch.tensor(values), token_id, k)
    log_total = math.log(math.fsum(math.exp(value) for value in values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert scored.token_id == token_id
    assert scored.logprob == pytest.approx(values[token_id] - log_total, abs=1e-4)
    assert scored.rank == order.index(token_id) + 1
    assert [i for i, _ in scored.top] == order[:k]
    assert [score for _, score in scored.top] == pytest.approx([values[i] - log_total for i in order[:k]], abs=1e-4)


@given(usable_rows)
def test_the_greedy_token_has_rank_one_and_heads_the_list(values):
    logits = torch.tensor(values)
    row = SampleRow(SamplingParams(temperature=0), 0, [], [], frozenset())
    token = sample(logits[None], [row])[0]
    scored = token_logprobs(logits, token, 1)
    assert scored.rank == 1
    assert scored.top == ((token, scored.logprob),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_do_not_depend_on_where_the_row_lies(dtype):
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(49152, generator=generator).mul(4).to(dtype)
    alone = token_logprobs(row, 17, 20)
    for index in (0, 1, 6):
        batch = torch.randn(7, 49152, generator=generator).mul(1e4).to(dtype)
        batch[index] = row
        assert token_logprobs(batch[index], 17, 20) == alone
    strided = torch.empty(49152, 3, dtype=dtype)
    strided[:, 1] = row
    assert token_logprobs(strided[:, 1], 17, 20) == alone
    offset = torch.cat((row[:1], row))[1:]
    assert token_logprobs(offset, 17, 20) == alone


def test_numbers_are_float32_log_softmax_to_the_bit():
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = row.float().log_softmax(-1)
    scored = token_logprobs(row, 3, 20)
    assert scored.logprob == scores[3].item()
    assert all(score == scores[i].item() for i, score in scored.top)


def test_a_row_in_another_number_format_is_another_row():
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert token_logprobs(row, 3, 0) != token_logprobs(row.bfloat16(), 3, 0)


def test_impossible_tokens_have_minus_infinity_and_a_rank():
    scored = token_logprobs(torch.tensor([-math.inf, 0.0, -math.inf]), 2, 3)
    assert scored == TokenLogprobs(2, -math.inf, 3, ((1, 0.0), (0, -math.inf), (2, -math.inf)))


def test_lists_longer_than_the_vocabulary_end_with_it():
    assert len(token_logprobs(torch.tensor([1.0, 2.0]), 0, 20).top) == 2


def test_the_row_is_not_changed():
    row = torch.tensor([1.0, 2.0, -0.0])
    before = row.clone()
    token_logprobs(row, 0, 2)
    assert torch.equal(row, before)


@pytest.mark.parametrize("token_id", [-1, 3])
def test_token_outside_the_row_is_refused_by_value(token_id):
    with pytest.raises(ValueError, match=rf"token_id must be in 0\.\.2, got {token_id}"):
        token_logprobs(torch.zeros(3), token_id, 0)


@pytest.mark.parametrize("values", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_unusable_rows_are_refused(values):
    with pytest.raises(ValueError, match="logits_row must have a finite maximum"):
        token_logprobs(torch.tensor(values), 0, 0)
