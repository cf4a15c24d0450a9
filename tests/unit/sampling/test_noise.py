"""Noise is a pure, finite, well distributed function of (seed, position, token id)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm42.sampling import noise

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**40)
MAX_BITS = 2**noise.NOISE_BITS - 1


def splitmix64_term(start, index):
    """Term of the published generator, in Python's own integers."""
    mask = 2**64 - 1
    x = (start + index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def reference_noise(seed, position, token_id):
    """The noise from its description: 16 coarse bits shared out of one hash per four ids, 32 fine bits of its own."""

    def key(use):
        state = 0
        for part in (seed, position, use):
            state = splitmix64_term(state ^ part, 1)
        return state

    coarse = splitmix64_term(key(1), token_id // 4) >> (16 * (token_id % 4)) & 0xFFFF
    fine = splitmix64_term(key(2), token_id) >> 32
    return -math.log(-math.log(((coarse << 32 | fine) + 0.5) * 2.0**-48))


def test_generator_is_splitmix64_as_published():
    # The first outputs for seed 1234567 in the reference implementation's own test vector.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64_term(1234567, index) for index in range(1, 5)] == published
    assert noise._splitmix(1234567, torch.arange(1, 5)).tolist() == [noise._signed(term) for term in published]


@settings(max_examples=50)
@given(SEEDS, POSITIONS, st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
def test_noise_follows_its_description(seed, position, ids):
    expected = torch.tensor([reference_noise(seed, position, token_id) for token_id in ids])
    torch.testing.assert_close(noise.gumbel(seed, position, torch.tensor(ids)), expected, rtol=1e-6, atol=1e-6)


def test_noise_is_pinned():
    # A change here changes every seeded output: raise SAMPLER_VERSION and say so in the changelog.
    pinned = torch.tensor([-0.6063326597213745, -0.17165862023830414, 3.1740403175354004, -0.10752373188734055])
    assert torch.equal(noise.gumbel(42, 7, torch.arange(4)), pinned)


@settings(max_examples=30)
@given(SEEDS, POSITIONS, st.randoms(use_true_random=False))
def test_noise_is_keyed_by_token_id_alone(seed, position, random):
    everything = noise.gumbel(seed, position, torch.arange(1000))
    ids = torch.tensor(random.sample(range(1000), random.randint(1, 70)))
    assert torch.equal(noise.gumbel(seed, position, ids), everything[ids])


def test_noise_keyed_by_rank_would_be_seen():
    ids = torch.tensor([5, 900, 3])
    assert not torch.equal(noise.gumbel(1, 2, torch.arange(3)), noise.gumbel(1, 2, ids))


def test_noise_keeps_shape_and_input():
    ids = torch.arange(12).view(3, 4)
    values = noise.gumbel(1, 2, ids)
    assert torch.equal(values.view(-1), noise.gumbel(1, 2, torch.arange(12)))
    assert values.dtype == torch.float32
    assert torch.equal(ids, torch.arange(12).view(3, 4))
    assert noise.gumbel(1, 2, torch.tensor(5)).shape == ()


def test_hash_of_all_zeros_and_all_ones_gives_finite_noise_at_the_bounds():
    lowest, highest = noise.gumbel_from_bits(torch.tensor([0, MAX_BITS])).tolist()
    assert lowest == pytest.approx(noise.NOISE_MIN, abs=1e-4)
    assert highest == pytest.approx(noise.NOISE_MAX, abs=1e-4)
    assert noise.NOISE_MIN <= lowest < highest <= noise.NOISE_MAX


def test_all_bits_in_float32_would_be_infinite():
    uniform = torch.tensor(MAX_BITS).float().add(0.5).mul(2.0**-noise.NOISE_BITS)
    assert torch.isinf(-(-uniform.log()).log())


@given(st.lists(st.integers(0, MAX_BITS), min_size=2, max_size=50))
def test_noise_is_finite_bounded_and_monotone_in_its_bits(bits):
    values = noise.gumbel_from_bits(torch.tensor(sorted(bits)))
    assert values.isfinite().all()
    assert (values.diff() >= 0).all()
    assert values.min() >= noise.NOISE_MIN
    assert values.max() <= noise.NOISE_MAX


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_extreme_seeds_give_ordinary_noise(seed):
    values = noise.gumbel(seed, 0, torch.arange(49152)).double()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.03)  # Euler's constant; standard error 0.006
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.08)


def test_neighbouring_seeds_positions_and_ids_are_unrelated():
    base = noise.gumbel(7, 100, torch.arange(20000))
    others = [noise.gumbel(8, 100, torch.arange(20000)), noise.gumbel(7, 101, torch.arange(20000)), base.roll(1)]
    others += [base.roll(shift) for shift in (2, 3, 4)]
    others.append(noise.gumbel(7 + 2**63, 100, torch.arange(20000)))
    for other in others:
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1].item()
        assert abs(correlation) < 0.035  # five standard errors


def test_uniforms_behind_the_noise_fill_all_bins_evenly():
    values = torch.cat([noise.gumbel(seed, position, torch.arange(512)) for seed in range(8) for position in range(32)])
    uniform = (-(-values.double()).exp()).exp()
    counts = torch.histc(uniform.float(), bins=256, min=0, max=1)
    expected = values.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 5 * math.sqrt(510)


@given(SEEDS, POSITIONS, st.integers(1, 3000), st.floats(noise.NOISE_MIN - 1, 12))
def test_no_id_that_reaches_the_threshold_is_left_out(seed, position, vocab, threshold):
    values = noise.gumbel(seed, position, torch.arange(vocab))
    ids = noise.ids_reaching(seed, position, vocab, threshold)
    assert torch.equal(ids, ids.unique())
    assert set((values >= threshold).nonzero().view(-1).tolist()) <= set(ids.tolist()) <= set(range(vocab))


@pytest.mark.parametrize("threshold", [-800.0, noise.NOISE_MIN, 0.36, 0.3665, 0.37, noise.NOISE_MAX, 800.0])
def test_thresholds_at_the_edges_are_safe(threshold):
    values = noise.gumbel(3, 4, torch.arange(5000))
    ids = noise.ids_reaching(3, 4, 5000, threshold)
    assert set((values >= threshold).nonzero().view(-1).tolist()) <= set(ids.tolist())


def test_high_thresholds_leave_few_ids():
    assert noise.ids_reaching(3, 4, 49152, 6.0).numel() < 49152 * 8 * math.exp(-6)


def test_every_lane_can_be_hit():
    hits = noise.ids_reaching(1, 1, 49152, 7.0)
    strong = hits[noise.gumbel(1, 1, hits) >= 7.0]
    assert set((strong % 4).tolist()) == {0, 1, 2, 3}


@given(SEEDS)
def test_child_seeds_are_distinct_64_bit_and_start_with_the_seed(seed):
    children = [noise.child_seed(seed, index) for index in range(200)]
    assert children[0] == seed
    assert len(set(children)) == 200
    assert all(0 <= child < 2**64 for child in children)


def test_children_of_neighbouring_seeds_are_unrelated():
    children = {noise.child_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(children) == 100 * 100


def test_fresh_seeds_survive_json_and_differ():
    seeds = {noise.fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(int(float(seed)) == seed for seed in seeds), "a reader of JSON numbers as doubles would change it"
    assert max(seeds) > 2**48


@given(SEEDS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_wrapping_tensor_arithmetic_equals_exact_integers(start, words):
    index = torch.tensor(words)
    terms = noise._splitmix(noise._signed(start), index).tolist()
    assert terms == [noise._signed(splitmix64_term(start, word % 2**64)) for word in words]
