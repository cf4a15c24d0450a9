"""Seeded Gumbel noise: a pure function of (seed, position, token id), so that a row's draw depends on nothing else.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) made of splitmix64
(Steele et al., OOPSLA 2014): seed and position are hashed to a key, and a token id picks a term of the sequence that
starts there. A token id's 48 bits k give u = (k + 0.5) * 2**-48, exact in float64 and strictly inside (0, 1), and the
noise -log(-log(u)).

Invariants: noise is keyed by token id, never by rank; it is finite and within [NOISE_MIN, NOISE_MAX]. The logarithms
are taken in float64 and then rounded to float32, 29 bits coarser, so that a last-bit difference between libraries (or
between the vector and the scalar code of one) practically never shows.

Why 48 bits, and why in two parts: with 24 an id less likely than 6e-8 would be drawn never or too often; with 48 that
limit is 4e-15. The 16 *coarse* bits of four neighbouring ids come from one hash, the 32 *fine* bits from one hash per
id. The coarse bits alone bound the noise, so `ids_reaching` finds the few ids of a vocabulary with much noise at a
quarter of the cost and without logarithms.
"""

from __future__ import annotations

import math
import secrets

import torch

COARSE_BITS = 16
FINE_BITS = 32
NOISE_BITS = COARSE_BITS + FINE_BITS
_HALF_STEP = 2.0 ** -(NOISE_BITS + 1)
_ROUNDING = 1e-5  # more than float32 can be off near the bounds
NOISE_MIN = -math.log(-math.log(_HALF_STEP)) - _ROUNDING  # about -3.52
NOISE_MAX = -math.log(-math.log1p(-_HALF_STEP)) + _ROUNDING  # about 33.96

_LANES = 64 // COARSE_BITS  # ids that share a coarse hash
_LANE_ONES = 0x0001_0001_0001_0001
_LANE_TOPS = 0x8000_8000_8000_8000
_MASK64 = 2**64 - 1
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX_SHIFTS = (30, 27, 31)
_MIX_FACTORS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
# What a hash is used for; part of its key, so that no two uses share bits.
_COARSE, _FINE, _CHILD = 1, 2, 3


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of `token_ids` (int64, any shape, >= 0) as float32 of the same shape and device.

    Args:
        seed: 0 <= seed < 2**64.
        position: Index in the sequence of the token being chosen, >= 0.
        token_ids: Token ids; an id's noise does not depend on which others are asked for.
    """
    keys = [_signed(_key(seed, position, use)) for use in (_COARSE, _FINE)]
    start = torch.tensor(keys, device=token_ids.device).view(2, *[1] * token_ids.dim())
    coarse, fine = _splitmix(start, torch.stack((token_ids // _LANES, token_ids))).unbind()
    coarse = (coarse >> ((token_ids & (_LANES - 1)) * COARSE_BITS)) & (2**COARSE_BITS - 1)
    fine = (fine >> (64 - FINE_BITS)) & (2**FINE_BITS - 1)
    return gumbel_from_bits((coarse << FINE_BITS) | fine)


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise (float32) of `bits` (int64, 0 <= bits < 2**NOISE_BITS): finite, and never less for larger bits."""
    uniform = bits.double().add_(0.5).mul_(2.0**-NOISE_BITS)
    return uniform.log_().neg_().log_().neg_().float()


def ids_reaching(seed: int, position: int, vocab_size: int, threshold: float) -> torch.Tensor:
    """Ids (int64, ascending, on the CPU) below `vocab_size` that may have noise >= `threshold`; all others have less.

    A superset: about 4 * exp(-threshold) of the vocabulary, found from the coarse bits of four ids at a time.
    """
    # Noise >= threshold needs u >= exp(-exp(-threshold)), and u < (coarse + 1) * 2**-16. The slack is for float32.
    smallest_uniform = math.exp(-math.exp(-max(threshold - 1e-3, NOISE_MIN)))
    num_coarse = 2**COARSE_BITS - min(int(smallest_uniform * 2**COARSE_BITS), 2**COARSE_BITS - 1)
    if num_coarse > 2 ** (COARSE_BITS - 1):  # beyond the range of the test below, and more than half of the ids
        return torch.arange(vocab_size)
    num_words = (vocab_size + _LANES - 1) // _LANES
    words = _splitmix(_signed(_key(seed, position, _COARSE)), torch.arange(num_words))
    # Which words have a lane among the `num_coarse` largest values, so an inverted lane less than `num_coarse`? Those
    # in which a lane's top bit is set below (Anderson, Bit Twiddling Hacks, "... if a word has a byte less than n").
    hit = (~words).sub_(_signed(_LANE_ONES * num_coarse)).bitwise_and_(words).bitwise_and_(_signed(_LANE_TOPS))
    ids = (hit.nonzero() * _LANES + torch.arange(_LANES)).view(-1)
    return ids[ids < vocab_size] if vocab_size % _LANES else ids


def child_seed(seed: int, index: int) -> int:
    """Seed of completion `index`: `seed` itself for the first, else a 64-bit hash, distinct for distinct indices."""
    return seed if index == 0 else _key(seed, _CHILD, index)


def fresh_seed() -> int:
    """A seed from the system's entropy, for a request that gave none: 53 bits, which every reader of JSON keeps."""
    return secrets.randbits(53)


def _key(*parts: int) -> int:
    """64-bit hash of integers; for fixed other parts, one-to-one in each part."""
    key = 0
    for part in parts:
        key = _mix((key ^ part) + _GOLDEN)
    return key


def _mix(value: int) -> int:
    """The splitmix64 finalizer, a bijection of the 64-bit integers: an input bit flips half of the output bits."""
    value &= _MASK64
    for shift, factor in zip(_MIX_SHIFTS, _MIX_FACTORS, strict=False):  # a factor follows each shift but the last
        value = ((value ^ (value >> shift)) * factor) & _MASK64
    return value ^ (value >> _MIX_SHIFTS[-1])


def _splitmix(start: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Terms `index` (int64) of the splitmix64 sequence that starts at `start`, as int64 with all 64 bits used."""
    words = index * _signed(_GOLDEN)
    words += start
    return _mix_tensor(words)


def _mix_tensor(words: torch.Tensor) -> torch.Tensor:
    """`_mix` in place on int64: products wrap; shifts copy the sign, so the bits shifted in are masked off."""
    for (shift, mask), factor in zip(_TENSOR_SHIFTS, _TENSOR_FACTORS, strict=False):
        words ^= torch.bitwise_right_shift(words, shift).bitwise_and_(mask)
        words *= factor
    shift, mask = _TENSOR_SHIFTS[-1]
    words ^= torch.bitwise_right_shift(words, shift).bitwise_and_(mask)
    return words


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


# Scalars as tensors spare torch a conversion in each call, a quarter of the time for a few ids.
_TENSOR_SHIFTS = [(torch.tensor(shift), torch.tensor(_MASK64 >> shift)) for shift in _MIX_SHIFTS]
_TENSOR_FACTORS = [torch.tensor(_signed(factor)) for factor in _MIX_FACTORS]
