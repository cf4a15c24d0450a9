"""What the sampler asks of its backend, and what the one in plain PyTorch gives for rows by index."""

from __future__ import annotations

import math

import pytest
import torch

from llm42.sampling import TORCH, UNUSABLE, Draw, SamplerBackend, SampleRow, SamplingParams, sample, token_logprobs

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Recorder(SamplerBackend):
    """Plain PyTorch that notes each call: the operation, the logits, and the rows."""

    def __init__(self):
        self.calls = []

    def greedy(self, logits, rows):
        self.calls.append(("greedy", logits, list(rows)))
        return TORCH.greedy(logits, rows)

    def draw(self, logits, rows, draws):
        self.calls.append(("draw", logits, list(rows)))
        return TORCH.draw(logits, rows, draws)

    def token_logprobs(self, logits, rows, token_ids, ks):
        raise NotImplementedError


def make_row(seed=0, **params):
    return SampleRow(SamplingParams(max_tokens=None, **params), seed, [1, 2, 3], [4], frozenset({0}))


def make_logits(rows, vocab, dtype=torch.float32):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).mul(4).to(dtype)


def make_draw(seed=0, position=4, **fields):
    return Draw(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields, seed=seed, position=position)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_rows_are_one_call_each_for_greedy_and_drawn_on_the_models_own_logits(dtype):
    logits = make_logits(6, 500, dtype)
    rows = [make_row(seed, temperature=seed % 2, top_p=0.9) for seed in range(6)]
    recorder = Recorder()
    assert sample(logits, rows, recorder) == sample(logits, rows)
    assert [(name, chosen) for name, _, chosen in recorder.calls] == [("greedy", [0, 2, 4]), ("draw", [1, 3, 5])]
    assert all(given is logits for _, given, _ in recorder.calls)


def test_rows_that_change_logits_are_float32_rows_of_their_own():
    logits = make_logits(4, 500, torch.bfloat16)
    rows = [make_row(temperature=t, logit_bias=bias) for t in (0, 1) for bias in (None, {7: 100.0})]
    recorder = Recorder()
    assert sample(logits, rows, recorder) == [logits[0].argmax(), 7, sample(logits[2:3], rows[2:3])[0], 7]
    changed = [(name, given) for name, given, _ in recorder.calls if given is not logits]
    assert [name for name, _ in changed] == ["greedy", "draw"]
    assert all(given.shape == (1, 500) and given.dtype == torch.float32 for _, given in changed)


def test_a_draw_carries_what_the_row_asks_for():
    class Asked(Recorder):
        def draw(self, logits, rows, draws):
            assert draws == [Draw(temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, seed=77, position=4)]
            return super().draw(logits, rows, draws)

    asked = Asked()
    sample(make_logits(1, 50), [make_row(77, temperature=0.5, top_k=9, top_p=0.8, min_p=0.1)], asked)
    assert [name for name, *_ in asked.calls] == ["draw"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_index_in_any_order_are_those_rows(dtype):
    logits = make_logits(5, 300, dtype)
    order = [3, 0, 3, 4]
    draws = [make_draw(seed, top_k=seed * 20) for seed in range(4)]
    assert TORCH.greedy(logits, order) == logits[order].float().argmax(-1).tolist()
    drawn = TORCH.draw(logits, order, draws)
    assert drawn == [TORCH.draw(logits[row : row + 1], [0], [draw])[0] for row, draw in zip(order, draws, strict=True)]
    assert drawn != TORCH.draw(logits, [0, 1, 2, 3], draws)
    scores = TORCH.token_logprobs(logits, order, drawn, [0, 1, 2, 3])
    assert scores == [token_logprobs(logits[row], drawn[i], i) for i, row in enumerate(order)]


def test_no_rows_give_nothing():
    logits = make_logits(2, 10)
    assert TORCH.greedy(logits, []) == TORCH.draw(logits, [], []) == TORCH.token_logprobs(logits, [], [], []) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_unusable_row_has_no_token_and_no_scores_and_leaves_the_others_theirs(value):
    logits = make_logits(3, 300)
    logits[1, 100] = value
    draws = [make_draw(seed) for seed in range(3)]
    for tokens in (TORCH.greedy(logits, [0, 1, 2]), TORCH.draw(logits, [0, 1, 2], draws)):
        assert [token == UNUSABLE for token in tokens] == [False, True, False]
    scores = TORCH.token_logprobs(logits, [0, 1, 2], [5, 5, 5], [1, 1, 1])
    assert [score is None for score in scores] == [False, True, False]


def test_a_token_outside_the_vocabulary_is_refused_by_value():
    with pytest.raises(ValueError, match=r"token_id must be in 0\.\.9, got 10"):
        TORCH.token_logprobs(make_logits(1, 10), [0], [10], [0])
