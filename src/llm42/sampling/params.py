"""What a user may ask of one request, checked on construction so that a bad value never reaches the engine loop.

Names, defaults and meanings follow vLLM and the OpenAI API. Every `SamplingParams` that exists is valid by itself;
what depends on the model's vocabulary is checked by `validate_for_vocab`. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from llm42.sampling.structured import StructuredOutputs

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_ADDITIVE_PENALTY = 2.0
MAX_STOPS = 256
MAX_LISTED_IDS = 16_384
"""Limits of what is looked at for every token; far above what anybody needs."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Raises `ValueError` naming the field, its value and the remedy. Numbers are normalised to `int` and `float`,
    sequences to tuples.

    Attributes:
        n: Number of independent completions of the prompt, >= 1.
        temperature: 0 is greedy decoding (the lowest id wins ties); otherwise logits are divided by it.
        top_k: Keep that many best ids; 0 or -1 keeps all.
        top_p: Keep the smallest set of best ids whose probability reaches it, in (0, 1].
        min_p: Keep ids at least that probable relative to the best one, in [0, 1].
        seed: 0 <= seed < 2**64; None lets the engine draw one (and return it).
        logit_bias: Added to the logits of the given token ids, each in [-100, 100]; up to 16,384 of them.
        presence_penalty: Subtracted once from every token of the output so far, in [-2, 2].
        frequency_penalty: Subtracted per occurrence in the output so far, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        min_tokens: End-of-sequence and stop ids are masked until the output has that many tokens.
        max_tokens: Longest output; None goes on up to the model's length.
        stop: Up to 256 strings that end the output.
        stop_token_ids: Token ids that end the output, beside the model's own end-of-sequence ids.
        ignore_eos: Go on after the model's end-of-sequence ids.
        include_stop_str_in_output: Leave the stop string in the text.
        logprobs: Return log-probabilities of the chosen token and of that many best ones, 0..20; None returns none.
        prompt_logprobs: The same for the prompt's tokens.
        skip_special_tokens: Leave special tokens out of the text.
        deterministic: Same ids and log-probabilities, bit for bit, whatever else the engine is doing.
        structured_outputs: The form that the output must have. A token that ends it is allowed exactly where the form
            is complete.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict has no hash
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    deterministic: bool = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, None, "ask for at least one completion"))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf, "use 0 for greedy decoding"))
        self._set("top_k", _integer("top_k", self.top_k, -1, None, "use 0 or -1 to keep all ids"))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, "use 1 to keep all ids", above_low=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0, "use 0 to keep all ids"))
        self._set("seed", _optional_integer("seed", self.seed, 0, MAX_SEED, "use None to let the engine draw one"))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in ("presence_penalty", "frequency_penalty"):
            limit = MAX_ADDITIVE_PENALTY
            self._set(name, _number(name, getattr(self, name), -limit, limit, "use 0 for no penalty"))
        remedy = "use 1 for no penalty"
        repetition = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, remedy, above_low=True)
        self._set("repetition_penalty", repetition)
        self._check_lengths()
        self._set("stop", _stop(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            self._set(name, _optional_integer(name, getattr(self, name), 0, MAX_LOGPROBS, "use None for none"))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "deterministic"):
            _check_bool(name, getattr(self, name))
        self._check_structured_outputs()

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without noise."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty if there are none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _check_lengths(self) -> None:
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, None, "use 0 for no minimum"))
        remedy = "use None to go on up to the model's length"
        self._set("max_tokens", _optional_integer("max_tokens", self.max_tokens, 1, None, remedy))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}; "
                "raise max_tokens or lower min_tokens"
            )

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, StructuredOutputs):
            raise ValueError(f"structured_outputs must be a StructuredOutputs, got {form!r:.80}; make one of it")
        if self.ignore_eos:
            raise ValueError(
                "ignore_eos must be False with structured_outputs, got True: an output ends where its form is "
                "complete; remove one of them"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ValueError` if `params` names a token id that a vocabulary of `vocab_size` ids does not have."""
    ids = [("logit_bias", token_id) for token_id in params.logit_bias or ()]
    ids += [("stop_token_ids", token_id) for token_id in params.stop_token_ids or ()]
    for name, token_id in ids:
        if token_id >= vocab_size:
            raise ValueError(f"{name} has token id {token_id}, but this model's ids are 0..{vocab_size - 1}; remove it")


def _check_bool(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise ValueError(f"{name} must be True or False, got {value!r}; use a bool")


def _integer(name: str, value: object, low: int, high: int | None, remedy: str) -> int:
    """`value` as an `int` within [low, high]; a bool is not an integer here."""
    number = low - 1 if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number < low or (high is not None and number > high):
        limits = f">= {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}; {remedy}")
    return number


def _optional_integer(name: str, value: object, low: int, high: int | None, remedy: str) -> int | None:
    return None if value is None else _integer(name, value, low, high, remedy)


def _number(name: str, value: object, low: float, high: float, remedy: str, *, above_low: bool = False) -> float:
    """`value` as a finite `float` within [low, high], or (low, high] if `above_low`; a bool is not a number here."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an int beyond the floats
        number = math.inf
    within = (low < number if above_low else low <= number) and number <= high
    if not (within and math.isfinite(number)):
        limits = f"{'>' if above_low else '>='} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
        raise ValueError(f"{name} must be a finite number {limits}, got {value!r}; {remedy}")
    return number


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else None
    if pairs is None:
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}; use a dict or None")
    if len(pairs) > MAX_LISTED_IDS:
        raise ValueError(f"logit_bias must have at most {MAX_LISTED_IDS} token ids, got {len(pairs)}; remove some")
    bias = {}
    for key, number in pairs:
        token_id = _integer("logit_bias token id", key, 0, None, "use the ids of the model's tokenizer")
        remedy = f"the value of token id {token_id} is out of range"
        bias[token_id] = _number("logit_bias", number, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, remedy)
    return bias or None


def _stop(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    strings = (value,) if isinstance(value, str) else _list_or_none(value)
    if strings is None or not all(isinstance(text, str) for text in strings):
        raise ValueError(f"stop must be a string or a list of strings, got {value!r}; use stop_token_ids for token ids")
    if len(strings) > MAX_STOPS:
        raise ValueError(f"stop must have at most {MAX_STOPS} strings, got {len(strings)}; remove some")
    if not all(strings):
        raise ValueError(f"stop must not have an empty string, got {value!r}; remove it")
    return tuple(str(text) for text in strings)


def _stop_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _list_or_none(value)
    if ids is not None and len(ids) > MAX_LISTED_IDS:
        raise ValueError(f"stop_token_ids must have at most {MAX_LISTED_IDS} ids, got {len(ids)}; remove some")
    if ids is None:
        raise ValueError(f"stop_token_ids must be a list of integers, got {value!r}; use stop for strings")
    remedy = "use the ids of the model's tokenizer"
    return tuple(_integer("stop_token_ids", token_id, 0, None, remedy) for token_id in ids)


def _list_or_none(value: object) -> Sequence[object] | None:
    """`value` if it is a list, tuple or the like; text and bytes are not lists here."""
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)) else None
