"""Choosing tokens from logits: the request's parameters, the seeded noise, the sampler, and log-probabilities.

This package owns every decision between a row of logits and a token id. Its invariant: the token and the numbers of a
row are a function of that row alone (its logits, parameters, seed, position and prefix), bit for bit. It knows
nothing of requests, caches or models and may import `llm42.errors` and `llm42.protocol` only.
"""

from __future__ import annotations

from llm42.sampling.backend import Draw, SamplerBackend
from llm42.sampling.logprobs import TokenLogprobs, token_logprobs
from llm42.sampling.noise import child_seed, fresh_seed, gumbel
from llm42.sampling.params import SamplingParams, validate_for_vocab
from llm42.sampling.sampler import SAMPLER_VERSION, UNUSABLE, SampleRow, sample
from llm42.sampling.structured import StructuredOutputs
from llm42.sampling.torch_sampler import TORCH

__all__ = [
    "SAMPLER_VERSION",
    "TORCH",
    "UNUSABLE",
    "Draw",
    "SampleRow",
    "SamplerBackend",
    "SamplingParams",
    "StructuredOutputs",
    "TokenLogprobs",
    "child_seed",
    "fresh_seed",
    "gumbel",
    "sample",
    "token_logprobs",
    "validate_for_vocab",
]
