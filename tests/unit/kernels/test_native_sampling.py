"""The native sampler against the one in PyTorch, which has its own tests against the definitions.

Tokens, ranks and lists must be equal. What rounds differently, the exponentials, may only show in log-probabilities,
which are compared with fp64. A row's results must be its own, whatever else is in the call and with any number of
threads; the checks of that have partners that samplers of the usual kind fail.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from kernel_reference import DTYPES, threads
from llm42.kernels import PortableKernels
from llm42.sampling import TORCH, UNUSABLE, Draw, SampleRow, SamplingParams, noise, sample

# Around the lanes of every vector width, the 4 ids of a hash and the 64 of a block; and a real one.
TINY = [*range(1, 71)]
VOCABULARIES = [127, 128, 129, 1000, 4099, 49152]
SPREADS = [0.0, 0.01, 0.25, 1.0, 8.0, 250.0]


def make_draw(seed=0, position=4, **fields):
    return Draw(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields, seed=seed, position=position)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


def random_draw(rng):
    return Draw(
        temperature=rng.choice([1.0, 1.0, 0.7, 1.3, 100.0, 1e-6]),
        top_k=rng.choice([0, 0, -1, 1, 2, 40, 900, 10**30]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9, 1 - 2**-53]),
        min_p=rng.choice([0.0, 0.0, 0.1, 1e-5, 1.0]),
        seed=rng.getrandbits(64),
        position=rng.randrange(2**20),
    )


def random_row(rng, vocab, dtype):
    """Logits of any spread, often with ties and impossible ids, and now and then unusable."""
    row = normal(vocab, seed=rng.getrandbits(32)) * rng.choice(SPREADS)
    if rng.random() < 0.3:
        row = row.round()
    some = torch.tensor([rng.randrange(vocab) for _ in range(rng.randint(1, 5))])
    kind = rng.choice(["plain"] * 8 + ["masked"] * 3 + ["kept", "-inf", "inf", "nan"])
    if kind == "masked":
        row[some] = -math.inf
    elif kind == "kept":
        row = torch.full((vocab,), -math.inf).index_copy(0, some, row[some])
    elif kind != "plain":
        row[slice(None) if kind == "-inf" else some] = float(kind)
    return row.to(dtype)


def random_batches(dtype, vocabularies, seed):
    """(logits, row indices, draws): rows in any order, some of them twice, some not at all."""
    rng = random.Random(seed)
    for vocab in vocabularies:
        logits = torch.stack([random_row(rng, vocab, dtype) for _ in range(6)])
        rows = [rng.randrange(6) for _ in range(8)]
        yield logits, rows, [random_draw(rng) for _ in rows]


# --- equal to PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_id_of_the_largest_logit(any_native, dtype):
    rng = random.Random(0)
    for vocab in (*TINY, *VOCABULARIES):
        logits = normal(4, vocab, seed=vocab).clamp(max=2).to(dtype)
        for row in logits:
            row[rng.choices(range(vocab), k=rng.randint(1, 4))] = 2.5
        assert any_native.sampler.greedy(logits, [2, 0, 3]) == [logits[row].tolist().index(2.5) for row in (2, 0, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabularies", [TINY, VOCABULARIES], ids=["tiny", "large"])
def test_tokens_are_those_of_pytorch(any_native, dtype, vocabularies):
    usable = 0
    for logits, rows, draws in random_batches(dtype, vocabularies, seed=1):
        assert any_native.sampler.greedy(logits, rows) == TORCH.greedy(logits, rows)
        expected = TORCH.draw(logits, rows, draws)
        assert any_native.sampler.draw(logits, rows, draws) == expected
        usable += sum(token != UNUSABLE for token in expected)
    assert usable > 4 * len(vocabularies)


def test_noise_of_another_position_fails_the_same_comparison(native):
    differences = 0
    for logits, rows, draws in random_batches(torch.float32, VOCABULARIES, seed=1):
        other = [Draw(d.temperature, d.top_k, d.top_p, d.min_p, d.seed, d.position + 1) for d in draws]
        differences += native.sampler.draw(logits, rows, other) != TORCH.draw(logits, rows, draws)
    assert differences > 2


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.8, 2.0])
def test_noise_for_few_ids_gives_the_token_of_noise_for_all(any_native, spread):
    vocab = 49152
    logits = normal(1, vocab) * spread
    z = logits[0] - logits.amax()
    draws = [make_draw(seed=9, position=position) for position in range(6)]
    scores = [z + noise.gumbel(9, position, torch.arange(vocab)) for position in range(6)]
    expected = [int((score == score.amax()).nonzero()[0]) for score in scores]
    assert any_native.sampler.draw(logits, [0] * 6, draws) == expected


def test_an_unlikely_block_can_win_against_a_likely_id_with_little_noise(native):
    # One likely id, and 299 that win by their noise: together a third of the draws, each one of a thousand.
    logits = torch.full((1, 300), -6.5)
    logits[0, 7] = 0.0
    draws = [make_draw(seed=seed, position=3) for seed in range(600)]
    found = native.sampler.draw(logits, [0] * 600, draws)
    assert found == TORCH.draw(logits, [0] * 600, draws)
    assert len(set(found)) > 50


@pytest.mark.parametrize(("seed", "first", "second"), [(5780315, 4, 7), (8441424, 0, 3)])  # one seed in 5 million
def test_equal_scores_go_to_the_lowest_id(native, seed, first, second):
    scores = noise.gumbel(seed, 4, torch.arange(16))
    assert scores[first] == scores[second] == scores.amax()
    assert native.sampler.draw(torch.zeros(1, 16), [0], [make_draw(seed)]) == [first]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6, 1e10, 1e40, 1e300])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}])
def test_extreme_temperatures_are_those_of_pytorch(native, temperature, fields):
    logits = torch.stack([normal(300, seed=seed) * scale for seed, scale in enumerate((1.0, 1e37, 1e-37))])
    logits[:, 5] = -math.inf
    draws = [make_draw(seed=seed, temperature=temperature, **fields) for seed in range(30)]
    rows = [seed % 3 for seed in range(30)]
    found = native.sampler.draw(logits, rows, draws)
    assert found == TORCH.draw(logits, rows, draws)
    assert UNUSABLE not in found


def test_zero_and_negative_zero_are_a_tie(native):
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])
    assert native.sampler.greedy(logits, [0, 1]) == [1, 1]
    assert native.sampler.draw(logits, [0, 1], [make_draw(seed, top_k=1) for seed in range(2)]) == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 1500, 2999])
def test_nan_or_infinity_anywhere_makes_a_row_unusable(any_native, dtype, value, index):
    logits = normal(2, 3000, dtype=dtype)
    logits[1, index] = value
    sampler = any_native.sampler
    for tokens in (sampler.greedy(logits, [0, 1]), sampler.draw(logits, [0, 1], [make_draw(top_p=0.9)] * 2)):
        assert tokens[0] != UNUSABLE == tokens[1]
    scores = sampler.token_logprobs(logits, [0, 1], [4, 4], [2, 2])
    assert scores[0] is not None
    assert scores[1] is None


def test_the_sampler_gives_equal_tokens_with_either_backend(native):
    rng = random.Random(3)
    fields = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "logit_bias": {3: 5.0}},
        {"temperature": 1.1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 9},
        {"temperature": 0.9, "repetition_penalty": 1.3, "top_k": 50},
    ]
    rows = [
        SampleRow(SamplingParams(max_tokens=None, **rng.choice(fields)), seed, [1, 2, 3], [3] * seed, frozenset({0}))
        for seed in range(30)
    ]
    logits = normal(30, 1000, dtype=torch.bfloat16)
    assert sample(logits, rows, native.sampler) == sample(logits, rows)


def test_other_kernels_sample_with_pytorch(native):
    assert PortableKernels().sampler is TORCH
    assert native.sampler is not TORCH


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabularies", [TINY, VOCABULARIES], ids=["tiny", "large"])
def test_ranks_and_lists_are_those_of_pytorch_and_numbers_those_of_fp64(any_native, dtype, vocabularies):
    rng = random.Random(0)
    compared = 0
    for logits, rows, _ in random_batches(dtype, vocabularies, seed=2):
        tokens = [rng.randrange(logits.shape[1]) for _ in rows]
        ks = [rng.choice([0, 1, 5, 20, 3000]) for _ in rows]
        expected = TORCH.token_logprobs(logits, rows, tokens, ks)
        found = any_native.sampler.token_logprobs(logits, rows, tokens, ks)
        assert [score is None for score in found] == [score is None for score in expected]
        for row, one, other in zip(rows, found, expected, strict=True):
            if one is None:
                continue
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
            ids = torch.tensor([one.token_id, *(i for i, _ in one.top)])
            values = torch.tensor([one.logprob, *(value for _, value in one.top)], dtype=torch.float64)
            reference = logits[row].double().log_softmax(-1)[ids]
            assert torch.allclose(values, reference, rtol=3e-7, atol=3e-7)
            compared += len(ids)
    assert compared > 1000


def test_the_greedy_token_heads_the_list(native):
    logits = normal(3, 49152, dtype=torch.bfloat16)
    tokens = native.sampler.greedy(logits, [0, 1, 2])
    for token, score in zip(tokens, native.sampler.token_logprobs(logits, [0, 1, 2], tokens, [1] * 3), strict=True):
        assert score.rank == 1
        assert score.top == ((token, score.logprob),)


# --- row-locality ----------------------------------------------------------------------------------------------------


def results(sampler, logits, rows, draws):
    """Everything that a sampler says about the rows."""
    drawn = sampler.draw(logits, rows, draws)
    scores = sampler.token_logprobs(logits, rows, [max(token, 0) for token in drawn], [20] * len(rows))
    return list(zip(sampler.greedy(logits, rows), drawn, scores, strict=True))


def changes_in_batches(sampler, dtype, vocab, trials):
    """How many of `trials` rows have other results in a batch than alone."""
    rng = random.Random(vocab)
    changes = 0
    for _ in range(trials):
        row, draw = normal(vocab, seed=rng.getrandbits(32), dtype=dtype), random_draw(rng)
        alone = results(sampler, row[None], [0], [draw])
        size = rng.choice([2, 3, 5, 8])
        index = rng.randrange(1, size)
        fills = [math.nan, math.inf, -math.inf, torch.finfo(dtype).max, 0.0]
        batch = torch.stack([torch.full((vocab,), rng.choice(fills), dtype=dtype) for _ in range(size)])
        batch[index], batch[0] = row, random_row(rng, vocab, dtype)
        draws = [random_draw(rng) for _ in range(size)]
        draws[index] = draw
        changes += results(sampler, batch, list(range(size)), draws)[index] != alone[0]
    return changes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "trials"), [(5, 20), (70, 20), (1025, 20), (49152, 3)])
def test_neighbours_never_change_a_rows_results(any_native, dtype, vocab, trials):
    assert changes_in_batches(any_native.sampler, dtype, vocab, trials) == 0


def test_noise_keyed_by_the_row_fails_the_same_check(native):
    class Keyed(type(native.sampler)):
        def draw(self, logits, rows, draws):
            keyed = [Draw(d.temperature, d.top_k, d.top_p, d.min_p, r, d.position) for r, d in enumerate(draws)]
            return super().draw(logits, rows, keyed)

    assert changes_in_batches(Keyed(native.sampler._library), torch.float32, 1025, 20) > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_results_do_not_depend_on_where_it_lies(native, dtype):
    wide = normal(6, 5000, dtype=dtype)
    draws = [make_draw(seed, top_p=0.9) for seed in range(3)]
    for view in (wide[::2, 1:3004], wide[::2, 1:4999:2], wide[1].expand(6, -1)):
        copies = [view[row].clone()[None] for row in (2, 0, 1)]
        alone = [results(native.sampler, copy, [0], [draw])[0] for copy, draw in zip(copies, draws, strict=True)]
        assert results(native.sampler, view, [2, 0, 1], draws) == alone


def test_two_threads_give_the_bits_of_one(native):
    logits = torch.stack([random_row(random.Random(seed), 20000, torch.bfloat16) for seed in range(16)])
    rng = random.Random(0)
    rows, draws = list(range(16)) * 2, [random_draw(rng) for _ in range(32)]
    found = []
    for count in (1, 2, 2):
        with threads(count):
            found.append(results(native.sampler, logits, rows, draws))
    assert len(found[0]) == 32
    assert found[0] == found[1] == found[2]


def test_logits_are_not_changed(native):
    logits = normal(3, 500, dtype=torch.bfloat16)
    before = logits.clone()
    results(native.sampler, logits, [0, 1, 2], [make_draw(seed, top_k=9, top_p=0.9) for seed in range(3)])
    assert torch.equal(logits, before)


# --- distribution ----------------------------------------------------------------------------------------------------


def chi_square(native, expected, draws=4000, **fields):
    """Of the draws from probabilities 0.4, 0.3, 0.2 and 0.1, and whether the impossible ids stayed away."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    counts = Counter(native.sampler.draw(logits, [0] * draws, [make_draw(seed, **fields) for seed in range(draws)]))
    assert all(expected[token] for token in counts)
    return sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in enumerate(expected) if p)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.85}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.5, "min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),  # top_p of what min_p left would be the first id alone
    ],
    ids=repr,
)
def test_tokens_are_drawn_with_their_probabilities(native, fields, expected):
    assert chi_square(native, expected, **fields) < 16.3  # 0.1 % point for 3 degrees of freedom


def test_a_wrong_temperature_fails_the_same_test_of_distribution(native):
    assert chi_square(native, [0.4, 0.3, 0.2, 0.1], temperature=1.2) > 16.3


# --- what the library may not be handed ------------------------------------------------------------------------------


def test_no_rows_give_nothing(native):
    logits = normal(2, 10)
    assert native.sampler.greedy(logits, []) == []
    assert native.sampler.draw(logits, [], []) == []
    assert native.sampler.token_logprobs(logits, [], [], []) == []


def test_logits_of_other_dtypes_are_refused(native):
    with pytest.raises(ValueError, match=r"logits must be float32, bfloat16 or float16 on the CPU, got torch\.float64"):
        native.sampler.greedy(torch.zeros(1, 3, dtype=torch.float64), [0])


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_the_logits_are_refused(native, row):
    with pytest.raises(ValueError, match=rf"rows must be in 0\.\.1, got \[{row}\]"):
        native.sampler.greedy(torch.zeros(2, 3), [row])


@pytest.mark.parametrize("token_id", [-1, 3])
def test_a_token_outside_the_vocabulary_is_refused_by_value(native, token_id):
    with pytest.raises(ValueError, match=rf"token_id must be in 0\.\.2, got {token_id}"):
        native.sampler.token_logprobs(torch.zeros(1, 3), [0], [token_id], [0])
