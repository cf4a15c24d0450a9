"""All layers in one native call: the bits, and the KV, of the operations one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

from kernel_reference import CPU, DTYPES, EPS, random, rope_table, threads
from llm42.kernels import Kernels, KVPool, KVShape, NativeKernels, PreparedLinear, RowBatch, RowSegment
from llm42.kernels.interface import DecoderLayer, DecoderStack
from llm42.kernels.native.layers import NativeStack

# Sizes that fill no vector and no panel.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 37, 6, 2, 20, 51
LAYERS, BLOCK, NUM_BLOCKS, ROWS, PADDING = 3, 4, 80, 40, 6
POSITIONS = 80
PLAIN = {"qk_norm": False, "bias": False, "windows": (None,) * LAYERS, "ropes": (True,) * LAYERS}
OPTIONS = {
    "plain": {},
    "QK norm": {"qk_norm": True},
    "biases": {"bias": True},
    "windows": {"windows": (None, 7, 66)},
    "layers without rope": {"ropes": (True, False, True)},
    "everything": {"qk_norm": True, "bias": True, "windows": (7, None, 66), "ropes": (False, True, True)},
}


def make_stack(kernels, dtype, *, seed=0, **options) -> DecoderStack:
    """Layers with random weights of a size that keeps activations near 1."""
    options = PLAIN | options
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))

    def norm(size):
        return (1.0 + 0.2 * random(size, seed=next(seeds))).to(dtype)

    def linear(in_features, out_features):
        weight = (random(out_features, in_features, seed=next(seeds)) * in_features**-0.5).to(dtype)
        bias = random(out_features, seed=next(seeds)).to(dtype)
        return kernels.prepare_linear(weight, bias if options["bias"] else None)

    layers = [
        DecoderLayer(
            input_norm=norm(HIDDEN),
            qkv=linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            q_norm=norm(HEAD_DIM) if options["qk_norm"] else None,
            k_norm=norm(HEAD_DIM) if options["qk_norm"] else None,
            o=linear(HEADS * HEAD_DIM, HIDDEN),
            post_attention_norm=norm(HIDDEN),
            gate_up=linear(HIDDEN, 2 * INTERMEDIATE),
            down=linear(INTERMEDIATE, HIDDEN),
            window=options["windows"][index],
            has_rope=options["ropes"][index],
        )
        for index in range(LAYERS)
    ]
    return DecoderStack(
        layers=layers,
        final_norm=norm(HIDDEN),
        rope=rope_table(POSITIONS, HEAD_DIM),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        eps=EPS,
    )


def make_batch(block_size=BLOCK) -> RowBatch:
    """Decode rows, a window, chunks of prompts on both sides of a tile of keys and of rows, and padding."""
    segments, row, block = [], 0, 1
    for start, length in ((70, 1), (0, 1), (61, 5), (0, 9), (30, 18)):
        num_blocks = -(-(start + length) // block_size)
        segments.append(RowSegment(row, start, length, [*range(block, block + num_blocks)][::-1]))
        row, block = row + length, block + num_blocks
    assert row + PADDING == ROWS
    assert block <= NUM_BLOCKS
    return RowBatch(segments, ROWS, block_size)


def make_pool(kernels, dtype, seed, block_size=BLOCK) -> KVPool:
    """A pool that holds random keys and values everywhere but in the reserved block."""
    num_slots = NUM_BLOCKS * block_size
    pool = kernels.new_kv_pool(KVShape(LAYERS, num_slots, KV_HEADS, HEAD_DIM), dtype, CPU)
    kv = random(LAYERS, 2, num_slots - block_size, KV_HEADS, HEAD_DIM, seed=seed, dtype=dtype)
    pool.write(torch.arange(block_size, num_slots), kv)
    return pool


def contents(pool, block_size=BLOCK):
    return pool.read(torch.arange(NUM_BLOCKS * block_size)).contiguous()


def embeddings(dtype, seed=9):
    """Of which the padding rows are equal, so that it does not matter which writes to their slot last."""
    x = random(ROWS, HIDDEN, seed=seed)
    x[ROWS - PADDING :] = x[-1]
    return x.to(dtype)


def assert_same_bits(found, expected):
    assert found.numel() > 0
    assert expected.isfinite().all()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def one_by_one(kernels, stack, x, batch, pool):
    """The layers by the loop that every backend has."""
    return Kernels.run_layers(kernels, stack, x, batch, pool)


def assert_equals_the_loop(kernels, stack, dtype, *, pools=None, block_size=BLOCK, seed=9):
    """One call and the loop, over pools of the same contents: hidden states and KV are equal, and KV was written."""
    mine, other = pools or [make_pool(kernels, dtype, 3, block_size) for _ in range(2)]
    assert mine.layer(0).data_ptr() != other.layer(0).data_ptr()
    assert_same_bits(contents(mine, block_size), contents(other, block_size))
    batch, x = make_batch(block_size), embeddings(dtype, seed)
    for pool in (mine, other):
        pool.write(torch.from_numpy(batch.slots), torch.tensor(0.25))  # not what an earlier call may have written
    before = contents(mine, block_size)
    expected = one_by_one(kernels, stack, x, batch, other)
    found = kernels.run_layers(stack, x, batch, mine)
    assert kernels._stack.is_of(stack, mine, block_size), "it was one call"
    assert_same_bits(found, expected)
    after = contents(mine, block_size)
    assert_same_bits(after, contents(other, block_size))
    written = torch.zeros(after.shape[2], dtype=torch.bool)
    written[batch.slots] = True
    assert ((after != before).flatten(3).any(-1) == written).all(), "every layer writes its rows' slots, no others"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_call_equals_the_operations_one_by_one(native, dtype, options):
    stack = make_stack(native, dtype, **options)
    for num_threads in (1, 2):
        with threads(num_threads):
            assert_equals_the_loop(native, stack, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_equals_the_operations_for_every_instruction_set(any_native, dtype):
    assert_equals_the_loop(any_native, make_stack(any_native, dtype, **OPTIONS["everything"]), dtype)


@pytest.mark.parametrize("options", [options for options in OPTIONS.values() if options], ids=[*OPTIONS][1:])
def test_every_option_shows_in_the_result(native, options):
    """Or the tests above would compare nothing but plain layers."""
    plain, other = (make_stack(native, torch.float32, **given) for given in ({}, options))
    results = [assert_equals_the_loop(native, stack, torch.float32) for stack in (plain, other)]
    assert not torch.equal(*results)


def tensors_of(stack) -> dict[str, torch.Tensor]:
    """Every tensor of the last layer, and those that the layers share."""
    found = {"final_norm": stack.final_norm, "rope": stack.rope}
    for field in fields(DecoderLayer):
        value = getattr(stack.layers[-1], field.name)
        if isinstance(value, PreparedLinear):
            found |= {f"{field.name} weight": value.weight, f"{field.name} bias": value.bias}
        elif isinstance(value, torch.Tensor):
            found[field.name] = value
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_shows_in_the_result(native, dtype):
    """The partner: one number changed in place is seen by one call and the loop alike."""
    stack = make_stack(native, dtype, **OPTIONS["everything"])
    before = assert_equals_the_loop(native, stack, dtype)
    tensors = tensors_of(stack)
    assert len(tensors) == 14
    for name, tensor in tensors.items():
        saved = tensor.clone()
        tensor.view(-1)[0] += 1.0
        assert not torch.equal(assert_equals_the_loop(native, stack, dtype), before), name
        tensor.copy_(saved)
    assert_same_bits(assert_equals_the_loop(native, stack, dtype), before)


def assert_pools_in_turn(kernels, dtype):
    stack = make_stack(kernels, dtype)
    pools = {seed: [make_pool(kernels, dtype, seed) for _ in range(2)] for seed in (3, 4)}
    results = [
        assert_equals_the_loop(kernels, stack, dtype, pools=pools[pool], seed=seed)
        for pool, seed in ((3, 10), (4, 11), (3, 12), (4, 11))
    ]
    assert_same_bits(results[3], results[1])
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_may_take_turns(native, dtype):
    """As in the self-test, which makes a pool for each of its layouts."""
    assert_pools_in_turn(native, dtype)


def test_decoders_and_block_sizes_may_take_turns(native):
    first, second = (make_stack(native, torch.float32, seed=seed) for seed in (0, 1))
    pools = [make_pool(native, torch.float32, 3, 2 * BLOCK) for _ in range(2)]
    results = [
        assert_equals_the_loop(native, stack, torch.float32, pools=pools, seed=seed)
        for stack, seed in ((first, 10), (second, 11), (first, 12), (replace(first, eps=0.5), 13))
    ]
    assert not any(torch.equal(*pair) for pair in pairwise(results))
    # The same memory in other blocks.
    assert_equals_the_loop(native, first, torch.float32, pools=pools, block_size=2 * BLOCK, seed=14)


def test_a_call_that_does_not_notice_another_pool_is_noticed(native, monkeypatch):
    """The partner."""
    kernels = NativeKernels(native._flags, linears="own")
    monkeypatch.setattr(NativeStack, "is_of", lambda *_: True)
    with pytest.raises(AssertionError):
        assert_pools_in_turn(kernels, torch.float32)


def test_rows_of_one_call_are_their_own(native):
    """Each segment alone, without padding, has the bits that it has in the crowd."""
    stack, x, batch = make_stack(native, torch.bfloat16), embeddings(torch.bfloat16), make_batch()
    crowd = native.run_layers(stack, x, batch, make_pool(native, torch.bfloat16, 3))
    for segment in batch.segments:
        rows = slice(segment.row, segment.row + segment.length)
        alone = RowBatch([replace(segment, row=0)], segment.length, BLOCK)
        found = native.run_layers(stack, x[rows].contiguous(), alone, make_pool(native, torch.bfloat16, 3))
        assert_same_bits(found, crowd[rows])


def test_results_outlive_the_next_call(native):
    """Intermediate results share memory from call to call; what is returned does not."""
    stack, batch, pool = make_stack(native, torch.float32), make_batch(), make_pool(native, torch.float32, 3)
    first = native.run_layers(stack, embeddings(torch.float32), batch, pool)
    kept = first.clone()
    second = native.run_layers(stack, embeddings(torch.float32, seed=10), batch, pool)
    assert_same_bits(first, kept)
    assert not torch.equal(first, second)
