"""The native operations between the linear layers: numbers against fp64, roundings, and the bits of one row."""

from __future__ import annotations

import pytest
import torch

from kernel_reference import (
    CPU,
    DTYPES,
    EPS,
    Expected,
    Paged,
    assert_agree,
    assert_close,
    assert_rows_are_their_own,
    random,
    rms_norm,
    rope_table,
    rotate,
    silu_mul,
)
from llm42.cache.block_pool import PADDING_SLOT
from llm42.kernels import PortableKernels, RowBatch, RowSegment

SIZES = (1, 7, 37, 51, 64, 577)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
HALVES = (torch.bfloat16, torch.float16)


def every_number(dtype):
    """All 65,536 bit patterns of a 16-bit dtype, NaN and infinities included, as rows of 512."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 512)


def assert_same_numbers(found, expected):
    """The same bits, signs of zero included; any NaN for a NaN."""
    assert torch.equal(found.isnan(), expected.isnan())
    integer = BITS[expected.dtype]
    assert torch.equal(
        found.masked_fill(found.isnan(), 0.0).view(integer), expected.masked_fill(found.isnan(), 0.0).view(integer)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_a_norm_equals_the_formula_and_the_portable_one(any_native, size, dtype, scale):
    x, residual = random(5, size, dtype=dtype) * scale, random(5, size, seed=1, dtype=dtype) * scale
    weight = random(size, seed=2, dtype=dtype)
    portable = PortableKernels()
    found, total = any_native.add_rms_norm(x, None, weight, EPS)
    assert torch.equal(total, x)
    assert_agree(found, portable.add_rms_norm(x, None, weight, EPS)[0], rms_norm(x, weight))
    found, total = any_native.add_rms_norm(x, residual, weight, EPS)
    assert_same_numbers(total, x + residual)
    assert_agree(found, portable.add_rms_norm(x, residual, weight, EPS)[0], rms_norm(x + residual, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (3, 20), (9, 64), (2, 128)])
def test_a_head_norm_equals_the_formula_and_the_portable_one(any_native, heads, head_dim, dtype):
    fused = random(5, heads * head_dim + 7, dtype=dtype)
    x = fused[:, 3 : 3 + heads * head_dim].unflatten(1, (heads, head_dim))
    weight = random(head_dim, seed=1, dtype=dtype)
    found = any_native.rms_norm_heads(x, weight, EPS)
    assert_agree(found, PortableKernels().rms_norm_heads(x, weight, EPS), rms_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul_equals_the_formula_and_the_portable_one(any_native, size, dtype):
    gate_up = random(5, 2 * size, dtype=dtype) * 4
    assert_agree(any_native.silu_mul(gate_up), PortableKernels().silu_mul(gate_up), silu_mul(gate_up))


@pytest.mark.parametrize("dtype", HALVES)
def test_silu_of_every_number_equals_the_formula(any_native, dtype):
    """Far below zero it is zero, however large the number; that e^88 ends the range of fp32 must not show."""
    gate = every_number(dtype)
    found = any_native.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    expected = torch.where(gate == -torch.inf, torch.nan, silu_mul(torch.cat((gate, torch.ones_like(gate)), 1)).value)
    finite = gate.isfinite()
    # Below -88 the result is less than 1e-36, and e^-x overflows.
    assert_close(found[finite], Expected(expected[finite], torch.where(gate < -88.0, 2.0**-96, 0.0)[finite]))
    assert_same_numbers(found[~finite], expected[~finite].to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_goes_in_and_out_unchanged_and_sums_round_as_pytorchs(any_native, dtype):
    """Ties to even, subnormals, overflow to infinity: through whole vectors and through the tail of a row."""
    numbers = every_number(dtype)
    generator = torch.Generator().manual_seed(0)
    shuffled = numbers.flatten()[torch.randperm(numbers.numel(), generator=generator)].view(numbers.shape)
    # A neighbour in magnitude, so that the sum has bits to round.
    near = numbers.float().mul(0.6180339887).to(dtype)
    weight = torch.ones(512, dtype=dtype)
    for x, residual in ((numbers, torch.zeros_like(numbers)), (numbers, shuffled), (numbers, near), (numbers, numbers)):
        for width in (512, 509):
            one, two = x[:, :width].contiguous(), residual[:, :width].contiguous()
            _, total = any_native.add_rms_norm(one, two, weight, EPS)
            assert_same_numbers(total, one + two)


def stored(kernels, dtype, *, rope, head_dim=16, fill=None):
    """A pass of 7 rows, two of them padding, through `rope_and_store_kv`: what went in, what came out, and the pool."""
    paged = Paged.empty(kernels, kv_heads=2, head_dim=head_dim, dtype=dtype, num_blocks=10)
    paged.pool.write(paged.slots, torch.tensor(0.25))
    batch = RowBatch([RowSegment(0, 2, 3, [5, 3]), RowSegment(3, 9, 2, [9, 9, 7])], 7, paged.block_size)
    fused = random(7, 10 * head_dim, dtype=dtype) * 3
    if fill is not None:
        fused[:] = fill
    q, k, v = fused.unflatten(1, (10, head_dim)).split((6, 2, 2), dim=1)
    table = rope_table(12, head_dim) if rope else None
    rotated = kernels.rope_and_store_kv(kernels.begin_pass(batch, CPU), q, k, v, table, paged.kv)
    return (q, k, v), rotated, paged, batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 80, 128])
def test_rotary_embedding_and_kv_store_equal_the_formula_and_the_portable_ones(any_native, head_dim, dtype):
    (q, k, v), rotated, paged, batch = stored(any_native, dtype, rope=True, head_dim=head_dim)
    _, portable, other, _ = stored(PortableKernels(), dtype, rope=True, head_dim=head_dim)
    table, positions = rope_table(12, head_dim), torch.from_numpy(batch.positions)
    assert_agree(rotated, portable, rotate(q, table, positions))
    slots = torch.from_numpy(batch.slots)[:5]
    assert slots.tolist() == [22, 23, 12, 29, 30]
    keys, values = paged.read(slots)
    assert_agree(keys, other.read(slots)[0], rotate(k[:5], table, positions[:5]))
    assert torch.equal(values, v[:5])
    written = [*slots.tolist(), PADDING_SLOT]
    untouched = [slot for slot in range(40) if slot not in written]
    assert (paged.read(untouched) == 0.25).all()
    assert (paged.read(written) != 0.25).any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rotary_embedding_everything_is_copied(any_native, dtype):
    (q, k, v), rotated, paged, batch = stored(any_native, dtype, rope=False)
    slots = batch.slots[:5].tolist()
    assert torch.equal(rotated, q)
    keys, values = paged.read(slots)
    assert torch.equal(keys, k[:5])
    assert torch.equal(values, v[:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("fill", ["inf", "-inf", "nan", "max"])
def test_the_pool_never_holds_an_infinity(any_native, dtype, rope, fill):
    """Not even where numbers overflow only by their rotation; what is kept is what the portable kernels keep."""
    largest = torch.finfo(dtype).max
    value = largest if fill == "max" else float(fill)
    _, _, paged, batch = stored(any_native, dtype, rope=rope, fill=value)
    _, _, other, _ = stored(PortableKernels(), dtype, rope=rope, fill=value)
    assert paged.read(paged.slots).isfinite().all()
    assert torch.equal(paged.read(paged.slots), other.read(other.slots))
    if fill != "nan":
        assert (paged.read(batch.slots)[1].abs() == largest).all()


def rotated_pass(kernels, dtype):
    """Rotated q and what lies in the pool afterwards, of rows ``[count, 6 * 32]`` at position 7 each of its own."""

    def operation(x):
        count = x.shape[0]
        paged = Paged.empty(kernels, kv_heads=2, head_dim=32, dtype=dtype, num_blocks=count + 2, block_size=8)
        segments = [RowSegment(row, 7, 1, [row + 2]) for row in range(count)]
        plan = kernels.begin_pass(RowBatch(segments, count, 8), CPU)
        q, k, v = x.unflatten(1, (6, 32)).split((2, 2, 2), dim=1)
        rotated = kernels.rope_and_store_kv(plan, q, k, v, rope_table(8, 32), paged.kv)
        slots = [(row + 2) * 8 + 7 for row in range(count)]
        return torch.cat((rotated, *paged.read(slots)), dim=1).flatten(1)

    return operation


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_between_the_linears_have_the_same_bits_in_every_pass(any_native, dtype):
    """With row counts on both sides of where a second thread joins in."""
    weight, head_weight = random(397, seed=1, dtype=dtype), random(33, seed=2, dtype=dtype)
    x = random(100, 397, dtype=dtype)
    counts = (1, 2, 3, 7, 33, 100)
    operations = {
        "norm": lambda x: any_native.add_rms_norm(x, None, weight, EPS)[0],
        "residual": lambda x: torch.cat(any_native.add_rms_norm(x, x * 0.3, weight, EPS), dim=1),
        "heads": lambda x: any_native.rms_norm_heads(x[:, 1:397].unflatten(1, (12, 33)), head_weight, EPS).flatten(1),
        "silu": lambda x: any_native.silu_mul(x[:, :396].contiguous()),
        "rope": lambda x: rotated_pass(any_native, dtype)(x[:, :192].contiguous()),
    }
    for operation in operations.values():
        assert_rows_are_their_own(operation, x, counts)


@pytest.mark.parametrize("name", ["norm", "silu"])
def test_an_operation_across_rows_is_noticed(native, name):
    """The partner: a norm over the whole batch, a SwiGLU scaled by its largest entry."""
    weight, x = random(40, seed=1), random(9, 40)

    def across(x):
        if name == "norm":
            return native.add_rms_norm(x.view(1, -1), None, weight.repeat(x.shape[0]), EPS)[0].view(x.shape)
        return native.silu_mul(x / x.max())

    with pytest.raises(AssertionError, match="2 rows"):
        assert_rows_are_their_own(across, x, (1, 2, 9))
