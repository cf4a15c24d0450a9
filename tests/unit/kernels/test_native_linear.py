"""The native linear layers and embeddings: numbers against fp64, and one row's bits at every row count and index."""

from __future__ import annotations

import pytest
import torch

from kernel_reference import DTYPES, assert_agree, assert_rows_are_their_own, linear, random, threads
from llm42.kernels import JitterKernels, PortableKernels

# Odd ones; several blocks of inputs; panels of outputs enough for every width in which they are taken.
SHAPES = ((1, 1), (1, 37), (51, 7), (577, 1), (577, 37), (64, 64), (1301, 237))
COUNTS = (*range(1, 41), 63, 64, 65, 95, 96, 97, 200)


def layer(shape, dtype, *, bias=True):
    in_features, out_features = shape
    weight = random(out_features, in_features, seed=1, dtype=dtype)
    return weight, random(out_features, seed=2, dtype=dtype) if bias else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_equals_the_formula_and_the_portable_one(any_native, shape, dtype, bias):
    weights = layer(shape, dtype, bias=bias)
    portable = PortableKernels()
    mine, other = any_native.prepare_linear(*weights), portable.prepare_linear(*weights)
    for rows in (1, 2, 3, 5, 13):
        x = random(rows, shape[0], dtype=dtype)
        found = any_native.linear(x, mine)
        assert found.dtype == dtype
        assert_agree(found, portable.linear(x, other), linear(x, *weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(51, 7), (577, 37), (1301, 237)])
def test_a_linear_row_has_the_same_bits_in_every_pass(native, shape, dtype):
    prepared = native.prepare_linear(*layer(shape, dtype))
    assert_rows_are_their_own(lambda x: native.linear(x, prepared), random(200, shape[0], dtype=dtype), COUNTS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_has_the_same_bits_in_every_pass_of_every_instruction_set(any_native, dtype):
    prepared = any_native.prepare_linear(*layer((51, 37), dtype))
    assert_rows_are_their_own(lambda x: any_native.linear(x, prepared), random(97, 51, dtype=dtype), (2, 7, 16, 97))


def test_a_linear_that_depends_on_the_row_count_is_noticed():
    jitter = JitterKernels(amplitude=2.0**-20)
    prepared = jitter.prepare_linear(*layer((51, 7), torch.float32))
    rows = random(40, 51)
    with pytest.raises(AssertionError, match="2 rows, every second None, 1 threads"):
        assert_rows_are_their_own(lambda x: jitter.linear(x, prepared), rows, (1, 2))


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x.shape[0] > 16,
        lambda _: torch.get_num_threads() > 1,
        lambda x: torch.arange(x.shape[0])[:, None] == 63,
        lambda x: (x == 0.0).all(-1).any(),
        lambda x: x.isinf().any(),
        lambda x: x.isnan().any(),
    ],
    ids=["count", "threads", "index", "zeros", "inf", "nan"],
)
def test_whatever_leaks_into_a_row_is_noticed(native, leak):
    """The partner of the tests above: each leak moves results by one unit in the last place."""
    prepared = native.prepare_linear(*layer((51, 7), torch.float32))
    rows = random(64, 51)
    with pytest.raises(AssertionError, match=r"rows, every second"):
        assert_rows_are_their_own(lambda x: native.linear(x, prepared) * (1.0 + leak(x) * 2.0**-23), rows, (8, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_stays_in_its_row(any_native, dtype):
    weight = torch.ones(9, 40, dtype=dtype)
    prepared = any_native.prepare_linear(weight)
    x = torch.ones(12, 40, dtype=dtype)
    x[3], x[5, 7], x[8] = torch.finfo(dtype).max, torch.inf, -torch.finfo(dtype).max
    found = any_native.linear(x, prepared)
    assert (found[[3, 5]] == torch.inf).all()
    assert (found[8] == -torch.inf).all()
    others = [0, 1, 2, 4, 6, 7, 9, 10, 11]
    assert (found[others] == 40.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(native, dtype):
    """The rows of a slice of a wider tensor, at addresses that no vector is aligned to."""
    prepared = native.prepare_linear(*layer((51, 7), dtype))
    wide = random(9, 120, dtype=dtype)
    for start in (0, 1, 69):
        view = wide[:, start : start + 51]
        assert not view.is_contiguous()
        assert torch.equal(native.linear(view, prepared), native.linear(view.contiguous(), prepared))


def test_a_batch_of_no_rows_gives_no_rows(native):
    prepared = native.prepare_linear(*layer((51, 7), torch.bfloat16))
    assert native.linear(torch.empty(0, 51, dtype=torch.bfloat16), prepared).shape == (0, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (51, 7), (577, 37), (64, 64)])
def test_an_embedding_is_a_row_of_the_unpacked_weights(any_native, shape, dtype):
    weight, _ = layer(shape, dtype)
    ids = torch.cat((torch.arange(weight.shape[0]).flip(0), torch.tensor([0, 0, weight.shape[0] - 1])))
    with threads(2):
        found = any_native.embedding(ids, any_native.prepare_embedding(weight))
    assert torch.equal(found, weight[ids])
