"""The portable kernels against textbook formulas in fp64, and the promises that determinism rests on, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from llm42.kernels import BACKENDS, KVPool, KVShape, RowBatch, RowSegment, create_kernels
from llm42.kernels.attention import QUERY_TILE

CPU = torch.device("cpu")
BLOCK = 4
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool(num_blocks: int, dtype=torch.float32) -> KVPool:
    return create_kernels("portable").new_kv_pool(KVShape(1, num_blocks * BLOCK, KV_HEADS, HEAD_DIM), dtype, CPU)


def fill(kv: KVPool, first_block: int, num_blocks: int, value: float) -> None:
    kv.write(torch.arange(first_block * BLOCK, num_blocks * BLOCK), torch.tensor(value))


def attend(segments, num_rows, kv, q, *, window=None):
    kernels = create_kernels("portable")
    plan = kernels.begin_pass(RowBatch(segments, num_rows, BLOCK), CPU)
    return kernels.paged_attention(plan, q, kv.layer(0), HEAD_DIM**-0.5, window)


def filled(kv: KVPool, blocks, length: int, seed: int):
    """Random keys and values in the pages, and the same as plain tensors ``[length, heads, dim]``."""
    keys, values = random(length, KV_HEADS, HEAD_DIM, seed=seed), random(length, KV_HEADS, HEAD_DIM, seed=seed + 1)
    slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
    kv.write(torch.tensor(slots), torch.stack((keys, values))[None])
    return keys, values


@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 13), (5, 9), (126, 5), (255, 1), (250, 30)])
def test_attention_equals_the_formula(start, count, window):
    length = start + count
    blocks = list(range(90, 90 - -(-length // BLOCK), -1))
    kv = pool(100)
    keys, values = filled(kv, blocks, length, seed=3)
    q = random(count + 2, HEADS, HEAD_DIM, seed=9)
    found = attend([RowSegment(0, start, count, blocks)], count + 2, kv, q, window=window)
    for row in range(count):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(HEADS):
            k = keys[first : position + 1, head // (HEADS // KV_HEADS)].double()
            v = values[first : position + 1, head // (HEADS // KV_HEADS)].double()
            expected = torch.softmax(k @ q[row, head].double() / math.sqrt(HEAD_DIM), 0) @ v
            got = found[row, head * HEAD_DIM : (head + 1) * HEAD_DIM].double()
            assert torch.allclose(got, expected, atol=2e-5)
    assert not found[count:].any(), "padding rows get zeros"


@pytest.mark.parametrize("window", [None, 7])
def test_attention_bits_do_not_depend_on_chunks_pages_or_neighbours(window):
    """One sequence of 150 positions: whole, row by row, and in odd chunks, elsewhere in memory, in a crowd."""
    length = 150
    q = random(length, HEADS, HEAD_DIM, seed=5)
    straight = list(range(1, 39))
    kv = pool(400)
    filled(kv, straight, length, seed=7)
    whole = attend([RowSegment(0, 0, length, straight)], length, kv, q, window=window)
    scattered = straight[::-1]
    kv = pool(400)
    fill(kv, 0, 400, 1.0e4)
    filled(kv, scattered, length, seed=7)
    start = 0
    for chunk in (1, 1, 6, QUERY_TILE, 3, 20, 41, 1, 69):
        crowd = [RowSegment(row, row * 5, 1, range(100, 300)) for row in range(chunk % 7)]
        rows = len(crowd) + chunk
        mixed = torch.cat((random(len(crowd), HEADS, HEAD_DIM, seed=chunk), q[start : start + chunk]))
        segments = [*crowd, RowSegment(len(crowd), start, chunk, scattered)]
        found = attend(segments, rows, kv, mixed, window=window)[len(crowd) :]
        assert torch.equal(found, whole[start : start + chunk])
        start += chunk
    assert start == length


def test_what_lies_past_a_rows_position_is_never_read():
    """Garbage behind a request's last position, infinities included, changes no bit."""
    q = random(3, HEADS, HEAD_DIM, seed=5)
    results = []
    for garbage in (0.0, 1.0e30, float("inf"), float("nan")):
        kv = pool(10)
        fill(kv, 1, 10, garbage)
        filled(kv, [4, 5], 6, seed=1)
        results.append(attend([RowSegment(0, 3, 3, [4, 5])], 3, kv, q))
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert results[0].isfinite().all()


def test_the_pool_never_holds_an_infinity():
    kernels = create_kernels("portable")
    kv = pool(4, torch.float16)
    plan = kernels.begin_pass(RowBatch([RowSegment(0, 0, 2, [1])], 2, BLOCK), CPU)
    k = torch.full((2, KV_HEADS, HEAD_DIM), float("inf"), dtype=torch.float16)
    v = torch.full((2, KV_HEADS, HEAD_DIM), float("nan"), dtype=torch.float16)
    kernels.rope_and_store_kv(plan, k.repeat(1, 3, 1), k, v, None, kv.layer(0))
    keys, values = kv.read(torch.arange(4 * BLOCK))[0]
    assert keys.isfinite().all()
    assert values.isfinite().all()
    assert keys[BLOCK].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elementwise_kernels_equal_the_formulas(dtype):
    kernels = create_kernels("portable")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    x, residual, weight = (
        random(5, 24, dtype=dtype),
        random(5, 24, seed=1, dtype=dtype),
        random(24, seed=2, dtype=dtype),
    )
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.allclose(normed.double(), expected, rtol=tolerance, atol=tolerance)
    gate, up = x.double().chunk(2, -1)
    assert torch.allclose(kernels.silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=tolerance)
    linear = kernels.prepare_linear(random(7, 24, seed=3, dtype=dtype), random(7, seed=4, dtype=dtype))
    expected = x.double() @ random(7, 24, seed=3, dtype=dtype).double().T + random(7, seed=4, dtype=dtype).double()
    found = kernels.linear(x, linear)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=4 * tolerance)
    table = random(7, 24, seed=3, dtype=dtype)
    assert torch.equal(kernels.embedding(torch.tensor([3, 0]), kernels.prepare_embedding(table)), table[[3, 0]])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_a_fixed_row_count_a_rows_bits_are_its_own(name, dtype):
    kernels = create_kernels(name)
    linear = kernels.prepare_linear(random(40, 96, dtype=dtype))
    probe = random(96, seed=8, dtype=dtype)
    expected = kernels.linear(probe.expand(64, 96).contiguous(), linear)[0]
    for index in (0, 1, 31, 63):
        crowd = random(64, 96, seed=index, dtype=dtype) * 1e4
        crowd[index] = probe
        assert torch.equal(kernels.linear(crowd, linear)[index], expected)
        assert torch.equal(kernels.silu_mul(crowd)[index], kernels.silu_mul(probe.expand(64, 96).contiguous())[0])


def test_jitter_makes_row_counts_differ_visibly():
    kernels = create_kernels("jitter")
    linear = kernels.prepare_linear(random(40, 96))
    x = random(64, 96, seed=1)
    results = [kernels.linear(x[:rows], linear)[0] for rows in (1, 2, 8, 63, 64)]
    for index, result in enumerate(results):
        assert torch.equal(result, kernels.linear(x[: (1, 2, 8, 63, 64)[index]], linear)[0]), "and are repeatable"
        assert not any(torch.allclose(result, other, rtol=1e-4) for other in results[index + 1 :])


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="kernels must be auto or one of native, portable, jitter, not 'fast'"):
        create_kernels("fast")
