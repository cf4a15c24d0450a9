"""KV memory: what is written is read again, wherever a backend puts it."""

from __future__ import annotations

import pytest
import torch

from kernel_reference import CPU, DTYPES, random
from llm42.kernels.kv import KVShape, RowKV
from llm42.kernels.native.kv import StripedKV

POOLS = pytest.mark.parametrize("pool", [RowKV, StripedKV])
NUM_SLOTS = 50  # not a whole number of stripes


def filled(pool, dtype, head_dim):
    """A pool with random contents, and these."""
    kv = pool(KVShape(3, NUM_SLOTS, 2, head_dim), dtype, CPU)
    contents = random(3, 2, NUM_SLOTS, 2, head_dim, seed=1, dtype=dtype)
    kv.write(torch.arange(NUM_SLOTS), contents)
    return kv, contents


@POOLS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 2, 7, 16, 20, 64])
def test_slots_hold_what_was_written(pool, dtype, head_dim):
    kv, contents = filled(pool, dtype, head_dim)
    assert torch.equal(kv.read(torch.arange(NUM_SLOTS)), contents)
    assert kv.read(torch.arange(0)).shape == (3, 2, 0, 2, head_dim)
    kv.write(torch.arange(0), contents[:, :, :0])
    slots = torch.tensor([17, 0, 49, 16, 15])
    assert torch.equal(kv.read(slots), contents[:, :, slots])
    changed = random(3, 2, 5, 2, head_dim, seed=2, dtype=dtype)
    kv.write(slots, changed)
    contents[:, :, slots] = changed
    assert torch.equal(kv.read(torch.arange(NUM_SLOTS)), contents)


@POOLS
def test_one_number_fills_slots(pool):
    kv, contents = filled(pool, torch.bfloat16, 20)
    kv.write(torch.tensor([3, 33]), torch.tensor(0.5))
    contents[:, :, [3, 33]] = 0.5
    assert torch.equal(kv.read(torch.arange(NUM_SLOTS)), contents)


@POOLS
def test_a_copy_is_read(pool):
    kv, contents = filled(pool, torch.float32, 16)
    kv.read(torch.arange(NUM_SLOTS)).zero_()
    assert torch.equal(kv.read(torch.arange(NUM_SLOTS)), contents)


@POOLS
def test_memory_is_zero_at_the_start(pool):
    kv = pool(KVShape(3, NUM_SLOTS, 2, 20), torch.bfloat16, CPU)
    assert not kv.read(torch.arange(NUM_SLOTS)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dimensions_that_fill_a_stripe_stay_zero(dtype):
    """The kernels multiply by them."""
    kv, contents = filled(StripedKV, dtype, 7)
    assert kv.layer(0).numel() > contents[0].numel()
    assert kv.layer(0).count_nonzero() == contents[0].count_nonzero()
