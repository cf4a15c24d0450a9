"""A loaded engine: the model, its memory and the core, and the one place where calls become requests.

`LLM` and `AsyncLLM` are two ways to drive it. Invariant: nothing invalid gets past `make_requests`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from llm42.cache import BlockPool
from llm42.config import EngineConfig
from llm42.engine.calibration import calibrate
from llm42.engine.contract import contract, fingerprint
from llm42.engine.core import EngineCore
from llm42.engine.request import Request, SequenceSpec
from llm42.engine.runner import Runner
from llm42.engine.selftest import PROBE_LENGTH
from llm42.engine.text import OutputText
from llm42.kernels import create_kernels
from llm42.kernels.attention import KEY_TILE
from llm42.model.config import ModelConfig
from llm42.model.decoder import Decoder, element_types, kv_bytes_per_position
from llm42.model.hub import resolve_model
from llm42.model.tokenizer import Tokenizer
from llm42.model.weights import load_weights
from llm42.sampling.grammar import Grammar, GrammarCompiler
from llm42.sampling.noise import child_seed, fresh_seed
from llm42.sampling.params import SamplingParams, validate_for_vocab

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any]
"""A text, or ``{"prompt_token_ids": [...]}``."""

_DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """One call and the n sequences it became."""

    request_id: str
    prompt: str | None
    sequences: tuple[Request, ...]


class Engine:
    """Loads a model and turns prompts into requests.

    Args:
        config: The configuration.
        prefers_throughput: Whether passes may be large though neighbours wait for their end: nobody watches a stream.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: The configuration does not fit the model.
    """

    def __init__(self, config: EngineConfig, *, prefers_throughput: bool = True) -> None:
        self.config = config
        self.model_path = resolve_model(config.model, progress=True)
        model_config = ModelConfig.from_directory(self.model_path)
        dtype = element_types()[config.dtype]
        self.max_model_len, num_blocks = _plan_memory(config, model_config, dtype)
        self.tokenizer = Tokenizer(self.model_path)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.num_threads = torch.get_num_threads()
        kernels = create_kernels(config.kernels)
        weights = load_weights(self.model_path, model_config, dtype)
        # The self-test probes positions around a border of key tiles, however short requests may be.
        num_positions = max(self.max_model_len, KEY_TILE + PROBE_LENGTH)
        self.decoder = Decoder(model_config, weights, kernels, num_positions)
        without_classes = contract(config, self.decoder, self.model_path)
        start = calibrate(config, self.decoder, without_classes, prefers_throughput=prefers_throughput)
        self.atlas = start.atlas
        self._contract = start.contract
        self.refusal = start.refusal
        pool = BlockPool(num_blocks, config.block_size)
        kv = self.decoder.new_kv_pool(num_blocks, config.block_size)
        runner = Runner(self.decoder, kv, config.block_size, start.atlas.logit_rows)
        self.core = EngineCore(config, pool, runner, start.shapes, start.costs)
        self._ids = itertools.count()
        self._grammars = GrammarCompiler(self.tokenizer.vocabulary_bytes, model_config.vocab_size)
        self._eos = frozenset(model_config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)

    @property
    def contract(self) -> dict[str, Any]:
        """Everything that may change bits; a class that a spot check refuted is replaced by what is used since."""
        if not self.core.num_violations:
            return self._contract
        return {**self._contract, "canonical_class": {"rows": list(self.core.scheduler.shapes.canonical.row_counts)}}

    @property
    def system_fingerprint(self) -> str:
        """The contract's hash."""
        return fingerprint(self.contract)

    def pin_threads(self) -> None:
        """Give the calling thread the contract's thread count, which OpenMP keeps for each thread by itself."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def make_requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """Validate a call and make its n sequences, not queued yet.

        Args:
            prompt: A text, or ``{"prompt_token_ids": [...]}``.
            params: How to choose tokens; the defaults if None.
            request_id: A name for messages and logs; one is made if None.
            priority: Lower is served first; equal ones in order of arrival.

        Raises:
            ValueError: The prompt or a parameter is unusable; the message names field and value.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        text, token_ids = self._tokenize(prompt)
        validate_for_vocab(params, self.decoder.config.vocab_size)
        if params.deterministic and self.refusal is not None:
            raise ValueError(f"deterministic=True is refused: {self.refusal}")
        if params.n > self.config.max_queue_len:
            raise ValueError(
                f"n is {params.n}, more than the queue holds: max_queue_len is {self.config.max_queue_len}; lower n"
            )
        max_tokens = self._max_tokens(len(token_ids), params)
        grammars = self._compile(params)
        seed = fresh_seed() if params.seed is None else params.seed
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        sequences = tuple(
            Request(
                SequenceSpec(
                    request_id=name,
                    index=index,
                    prompt_token_ids=token_ids,
                    params=params,
                    seed=child_seed(seed, index),
                    max_tokens=max_tokens,
                    eos_token_ids=self._eos,
                    priority=priority,
                    grammar=grammars[index],
                ),
                self.core.pool,
                OutputText(self.tokenizer, params),
            )
            for index in range(params.n)
        )
        return RequestGroup(name, text, sequences)

    def _compile(self, params: SamplingParams) -> Sequence[Grammar | None]:
        """The grammar that each of the n outputs must follow."""
        if params.structured_outputs is None:
            return [None] * params.n
        if not self._eos and not params.stop_token_ids:
            raise ValueError(
                "structured_outputs needs a token that ends an output, and this model has none; give stop_token_ids"
            )
        return self._grammars.compile(params.structured_outputs, params.n)

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """The most tokens an output of this prompt may have."""
        self._check_length(prompt_len)
        room = self.max_model_len - prompt_len
        if params.max_tokens is not None and params.max_tokens > room:
            raise ValueError(
                f"prompt ({prompt_len} tokens) + max_tokens ({params.max_tokens}) exceeds max_model_len "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens"
            )
        if params.min_tokens > room:
            raise ValueError(
                f"prompt ({prompt_len} tokens) + min_tokens ({params.min_tokens}) exceeds max_model_len "
                f"{self.max_model_len}; shorten the prompt or lower min_tokens"
            )
        return room if params.max_tokens is None else params.max_tokens

    def _check_length(self, prompt_len: int) -> None:
        if prompt_len >= self.max_model_len:
            raise ValueError(
                f"prompt has {prompt_len} tokens, and max_model_len {self.max_model_len} must hold it and at least one "
                "more; shorten the prompt"
            )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt, max_tokens=self.max_model_len)
        elif isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            given = prompt["prompt_token_ids"]
            if isinstance(given, Sequence):
                self._check_length(len(given))  # before a million of them are looked at
            text, token_ids = None, _token_ids(given, self.decoder.config.vocab_size)
        else:
            raise ValueError(f'prompt must be a string or {{"prompt_token_ids": [...]}}, not {prompt!r:.80}')
        if not token_ids:
            raise ValueError(f"prompt must have at least one token, and {prompt!r:.80} has none")
        return text, tuple(token_ids)


def _token_ids(value: object, vocab_size: int) -> list[int]:
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise ValueError(f"prompt_token_ids must be a list of integers, not {value!r:.80}")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < vocab_size:
            raise ValueError(
                f"prompt_token_ids[{index}] must be an integer of 0..{vocab_size - 1}, not {token_id!r:.80}"
            )
    return [int(token_id) for token_id in value]


def _plan_memory(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """max_model_len, and the number of KV blocks (one of them reserved)."""
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's max_position_embeddings "
            f"{model.max_position_embeddings}; lower it"
        )
    longest = config.max_model_len or model.max_position_embeddings
    per_block = kv_bytes_per_position(model, dtype) * config.block_size
    blocks_of_one = -(-longest // config.block_size)
    if config.kv_cache_bytes is None:
        available = max(1, _available_memory() // 2 // per_block)
        wanted = max(_DEFAULT_KV_BYTES // per_block, blocks_of_one)
        usable = min(wanted, blocks_of_one * config.max_num_seqs, available)
    else:
        usable = config.kv_cache_bytes // per_block - 1
    if usable < 1:
        raise ValueError(
            f"kv_cache_bytes {config.kv_cache_bytes} holds no block besides the reserved one; "
            f"give at least {2 * per_block} bytes"
        )
    if usable < blocks_of_one:
        if config.max_model_len is not None:
            raise ValueError(
                f"KV memory of {usable} blocks cannot hold one request of max_model_len {longest}; "
                f"raise kv_cache_bytes to {(blocks_of_one + 1) * per_block} or lower max_model_len"
            )
        longest = usable * config.block_size
        logger.warning("max_model_len is %d: KV memory holds no more", longest)
    return longest, usable + 1


def _available_memory() -> int:
    """Bytes of physical memory that are free now; half of all where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * _DEFAULT_KV_BYTES
