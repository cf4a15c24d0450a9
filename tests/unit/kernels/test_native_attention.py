"""Native paged attention: numbers against fp64, and a row's bits, which follow from its sequence and position alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernel_reference import CPU, DTYPES, Paged, assert_agree, attention, random, threads
from llm42.kernels import Kernels, PortableKernels, RowBatch, RowSegment

GARBAGE = (0.0, 6.0e4, torch.inf, torch.nan)
LENGTH = 150  # three tiles of keys


def pages(length: int, block_size: int, *, first: int = 2, order: int = 1) -> list[int]:
    """Pages for a sequence, ascending or descending."""
    return list(range(first, first + -(-length // block_size)))[::order]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_attention_equals_the_formula_and_the_portable_one(native, group, head_dim, dtype):
    """Prompt chunks, windows and a decode row of two sequences; tile boundaries at 64 and 128 within and between."""
    keys, values = (random(2, LENGTH, 2, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    runs = [(0, 0, 3), (1, 60, 9), (0, 128, 22), (1, 63, 1), (0, 127, 1)]
    rows = sum(count for _, _, count in runs)
    q = random(rows, 2 * group, head_dim, seed=3, dtype=dtype)
    for block_size, window in ((2, None), (4, 1), (16, 5), (32, 70)):
        results = []
        for kernels in (native, PortableKernels()):
            paged = Paged.empty(
                kernels, kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=block_size, num_blocks=200
            )
            tables = pages(LENGTH, block_size, order=-1), pages(LENGTH, block_size, first=100)
            for index, table in enumerate(tables):
                paged.put(table, keys[index], values[index])
            segments, row = [], 0
            for index, start, count in runs:
                segments.append(RowSegment(row, start, count, tables[index]))
                row += count
            found = paged.attend(segments, q, window=window, num_rows=rows + 2)
            assert not found[rows:].any(), "padding rows get zeros"
            results.append(found[:rows].split([count for _, _, count in runs]))
        for (index, start, count), first, mine, other in zip(
            runs, q.split([r[2] for r in runs]), *results, strict=True
        ):
            end = start + count
            expected = attention(
                first, keys[index, :end], values[index, :end], start=start, scale=head_dim**-0.5, window=window
            )
            assert_agree(mine, other, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_every_instruction_set_equals_the_formula(any_native, dtype):
    for group, head_dim, window in ((1, 20, None), (3, 64, 70), (4, 128, 1)):
        keys, values = (random(LENGTH, 2, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
        q = random(LENGTH, 2 * group, head_dim, seed=3, dtype=dtype)
        paged = Paged.empty(any_native, kv_heads=2, head_dim=head_dim, dtype=dtype, garbage=torch.nan)
        paged.put(pages(LENGTH, 4), keys, values)
        found = paged.attend([RowSegment(0, 0, LENGTH, pages(LENGTH, 4))], q, window=window)
        expected = attention(q, keys, values, start=0, scale=head_dim**-0.5, window=window)
        portable = Paged.empty(PortableKernels(), kv_heads=2, head_dim=head_dim, dtype=dtype)
        portable.put(pages(LENGTH, 4), keys, values)
        other = portable.attend([RowSegment(0, 0, LENGTH, pages(LENGTH, 4))], q, window=window)
        assert_agree(found, other, expected)


def test_scores_of_any_size_are_weighed_right(any_native):
    """Scores of thousands, all of them far below zero too, and differences at the end of fp32's range of e^x."""
    keys = torch.zeros(100, 1, 8)
    values = random(100, 1, 8, seed=2)
    for scores in (
        torch.linspace(-5000.0, 3000.0, 100),
        torch.linspace(3000.0, -5000.0, 100),
        torch.linspace(-9000.0, -8990.0, 100),
        torch.linspace(0.0, -174.0, 100),
        torch.full((100,), 1.0e30),
    ):
        keys[:, 0, 0] = scores * 8**0.5
        paged = Paged.empty(any_native, kv_heads=1, head_dim=8, dtype=torch.float32)
        paged.put(pages(100, 4), keys, values)
        q = torch.zeros(100, 1, 8)
        q[..., 0] = 1.0
        found = paged.attend([RowSegment(0, 0, 100, pages(100, 4))], q)
        expected = attention(q, keys, values, start=0, scale=8**-0.5, window=None).value
        # A score of 9,000 has 10 of fp32's 24 bits behind its point.
        assert torch.allclose(found.double(), expected, rtol=0.0, atol=4e-3)


@dataclass(frozen=True)
class Case:
    """One sequence and its attention as a whole prompt: what every other pass has to reproduce."""

    kernels: Kernels
    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor
    window: int | None
    whole: torch.Tensor

    @classmethod
    def of(cls, kernels, dtype, *, heads, kv_heads, head_dim, window) -> Case:
        keys, values = (random(LENGTH, kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
        q = random(LENGTH, heads, head_dim, seed=3, dtype=dtype)
        paged = Paged.empty(kernels, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        paged.put(pages(LENGTH, 4), keys, values)
        with threads(1):
            whole = paged.attend([RowSegment(0, 0, LENGTH, pages(LENGTH, 4))], q, window=window)
        assert whole.isfinite().all()
        assert whole.any(-1).all()
        return cls(kernels, keys, values, q, window, whole)

    def pool(self, *, block_size=4, garbage=0.0, order=-1, length=LENGTH) -> tuple[Paged, list[int]]:
        """A pool with garbage around the sequence's first ``length`` positions, and its page table."""
        _, kv_heads, head_dim = self.keys.shape
        paged = Paged.empty(
            self.kernels,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.keys.dtype,
            block_size=block_size,
            num_blocks=400,
            garbage=garbage,
        )
        table = pages(LENGTH, block_size, first=7, order=order)
        paged.put(table, self.keys[:length], self.values[:length])
        return paged, table


def run(start: int, stop: int, row: int, table: list[int]) -> RowSegment:
    return RowSegment(row, start, stop - start, table)


CASES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(6, 2, 16, None), (9, 3, 64, 70), (8, 1, 20, 7)]
)


def assert_the_same_in_chunks(case: Case, attend=Paged.attend) -> None:
    """The prompt in odd chunks, windows and single rows, at other places of memory, in a crowd that reads garbage."""
    chunks = (1, 1, 6, 8, 3, 20, 24, 1, 16, 17, 53)
    assert sum(chunks) == LENGTH
    for num_threads, block_size, garbage in ((1, 2, 0.0), (2, 4, torch.nan), (1, 16, torch.inf), (2, 32, 6.0e4)):
        start = 0
        for chunk in chunks:
            paged, table = case.pool(block_size=block_size, garbage=garbage, length=start + chunk)
            crowd = [RowSegment(row, row * 20, 1, range(100, 300)) for row in range(chunk % 7)]
            after = RowSegment(len(crowd) + chunk, 31, 5, range(200, 300))
            q = random(len(crowd) + chunk + 5, *case.q.shape[1:], seed=chunk, dtype=case.q.dtype) * 100
            q[: len(crowd) // 2] = garbage
            mine = slice(len(crowd), len(crowd) + chunk)
            q[mine] = case.q[start : start + chunk]
            segments = [*crowd, run(start, start + chunk, len(crowd), table), after]
            with threads(num_threads):
                found = attend(paged, segments, q, window=case.window)
            where = f"{num_threads} threads, pages of {block_size}, rows {start} to {start + chunk}"
            assert torch.equal(found[mine], case.whole[start : start + chunk]), where
            start += chunk


@CASES
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_bits_do_not_depend_on_chunks_pages_or_neighbours(native, dtype, heads, kv_heads, head_dim, window):
    assert_the_same_in_chunks(Case.of(native, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_bits_do_not_depend_on_chunks_in_every_instruction_set(any_native, dtype):
    assert_the_same_in_chunks(Case.of(any_native, dtype, heads=4, kv_heads=2, head_dim=20, window=30))


@CASES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_row_has_the_bits_of_its_prompt_row(native, dtype, heads, kv_heads, head_dim, window):
    """All positions as decode rows of one pass, in any order; then each in a window at every offset."""
    case = Case.of(native, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
    paged, table = case.pool()
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    segments = [run(position, position + 1, row, table) for row, position in enumerate(order.tolist())]
    for num_threads in (1, 2):
        with threads(num_threads):
            assert torch.equal(paged.attend(segments, case.q[order], window=window), case.whole[order])
    for start in (0, 55, 63, 64, 112, 120):
        for offset in range(8):
            q = case.q[start + offset : start + offset + 20]
            found = paged.attend([run(start + offset, start + offset + 20, 0, table)], q, window=window)
            assert torch.equal(found, case.whole[start + offset : start + offset + 20])


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_row_may_not_see_is_never_read(any_native, dtype, window, block_size):
    """Garbage past the position and before the window, in the very tile and the very page that the row reads."""
    case = Case.of(any_native, dtype, heads=4, kv_heads=2, head_dim=16, window=window)
    for position in (0, 1, 7, 8, 62, 63, 64, 100, 148):
        for garbage in GARBAGE:
            paged, table = case.pool(block_size=block_size)
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(LENGTH)])
            paged.pool.write(slots[position + 1 :], torch.tensor(garbage))
            if window is not None:
                paged.pool.write(slots[: max(0, position - window + 1)], torch.tensor(garbage))
            found = paged.attend(
                [run(position, position + 1, 0, table)], case.q[position : position + 1], window=window
            )
            assert torch.equal(found[0], case.whole[position]), (position, garbage)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_zero_keeps_no_sign_that_later_positions_could_change(any_native, dtype):
    """A row whose sum underflows to -0; beside a row that sees more, 0 times the value there is added to it."""
    keys, values = torch.zeros(3, 1, 16), torch.full((3, 1, 16), -0.0)
    keys[0] = -20.0  # a weight of e^-80
    values[0], values[2] = -1.0e-15, 1.0
    paged = Paged.empty(any_native, kv_heads=1, head_dim=16, dtype=dtype)
    paged.put([2], keys.to(dtype), values.to(dtype))
    q = torch.ones(3, 1, 16, dtype=dtype)
    alone = paged.attend([RowSegment(0, 1, 1, [2])], q[:1])[0]
    together = paged.attend([RowSegment(0, 0, 3, [2])], q)[1]
    assert torch.equal(alone, torch.zeros(16, dtype=dtype))
    assert not alone.signbit().any()
    assert not together.signbit().any()


def late(paged, segments, q, *, window):
    """Every row sees the position after its own."""
    moved = [RowSegment(s.row, s.start + 1, s.length, s.blocks) for s in segments]
    return paged.attend(moved, q, window=window)


def by_count(paged, segments, q, *, window):
    """The number of rows shows in the last bit of the scale."""
    return paged.attend(segments, q * (1.0 + (q.shape[0] > 40) * 2.0**-7), window=window)


def by_threads(paged, segments, q, *, window):
    return paged.attend(segments, q, window=window) * (1.0 + (torch.get_num_threads() > 1) * 2.0**-7)


def by_page_size(paged, segments, q, *, window):
    return paged.attend(segments, q * (1.0 + (paged.block_size > 4) * 2.0**-7), window=window)


def by_neighbours(paged, segments, q, *, window):
    """One NaN anywhere, as a masked sum over all rows would spread it."""
    return paged.attend(segments, q, window=window) + 0.0 * q.sum().to(q.dtype)


@pytest.mark.parametrize("attend", [late, by_count, by_threads, by_page_size, by_neighbours])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_that_depends_on_its_batch_is_noticed(native, dtype, attend):
    """The partner of the tests above."""
    case = Case.of(native, dtype, heads=6, kv_heads=2, head_dim=16, window=None)
    with pytest.raises(AssertionError, match=r"threads, pages of"):
        assert_the_same_in_chunks(case, attend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_stays_in_its_row(any_native, dtype):
    """Infinite activations are stored as finite numbers, and spoil no row but their own."""
    paged = Paged.empty(any_native, kv_heads=2, head_dim=16, dtype=dtype)
    segments = [RowSegment(0, 0, 6, [5, 6]), RowSegment(6, 0, 6, [7, 8])]
    plan = any_native.begin_pass(RowBatch(segments, 12, 4), CPU)
    results = []
    for value in (1.0, torch.inf, -torch.inf, torch.nan):
        fused = random(12, 8 * 16, dtype=dtype)
        fused[9] = value
        q, k, v = fused.unflatten(1, (8, 16)).split((4, 2, 2), dim=1)
        rotated = any_native.rope_and_store_kv(plan, q, k, v, None, paged.kv)
        assert paged.read(paged.slots).isfinite().all()
        results.append(any_native.paged_attention(plan, rotated, paged.kv, 0.25, None))
    before = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result[before], results[0][before])
        assert not torch.equal(result[9:], results[0][9:])


def test_a_pass_of_padding_alone_gives_zeros(native):
    paged = Paged.empty(native, kv_heads=2, head_dim=16, dtype=torch.bfloat16, garbage=torch.nan)
    found = paged.attend([], torch.ones(0, 4, 16, dtype=torch.bfloat16), num_rows=3)
    assert torch.equal(found, torch.zeros(3, 64, dtype=torch.bfloat16))
