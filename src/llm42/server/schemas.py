"""The bodies of requests, as the OpenAI API and vLLM name them, and what each field means to the engine.

Invariant: a field that is not here, or that has a value this server cannot honour, is an error; nothing is ignored.
Values are checked in one place only, `SamplingParams`; here are names and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from llm42.sampling import SamplingParams, StructuredOutputs
from llm42.sampling.params import MAX_LOGPROBS

Item = TypeVar("Item")


class _FirstErrorOnly(FailFast):
    """Pydantic's, for use in unions, whose parts Python hashes."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


List = Annotated[list[Item], _FirstErrorOnly()]
"""A list that is refused at its first wrong item: one message about each of a million items would be much memory."""

_MAX_FIELDS = 256

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "skip_special_tokens",
)
"""Fields that have the name of their parameter; null stands for the parameter's default."""


class Body(BaseModel):
    """A request body: no other fields, and no conversions between JSON's types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        """Refuse what would make a message about each of a million unknown fields."""
        if isinstance(data, dict) and len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are more than the {_MAX_FIELDS} that an object may have; send fewer")
        return data


class StreamOptions(Body):
    """What a stream contains besides the deltas."""

    include_usage: bool | None = None
    """A last chunk has the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""
    include_obfuscation: Literal[False] | None = None


def constraint(field: str, **form: Any) -> StructuredOutputs:
    """A constraint that comes from a field of a request.

    Raises:
        ValueError: It is not valid; the message begins with the field.
    """
    try:
        return StructuredOutputs(**form)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


class JSONSchemaFormat(Body):
    """A named JSON schema."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    def to_structured_outputs(self) -> StructuredOutputs | None:
        """The constraint for the sampler."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("response_format needs json_schema with type json_schema, and only there")
        if self.type == "json_object":
            return constraint("response_format", json_object=True)
        if self.json_schema is None:
            return None
        return constraint("response_format", json=self.json_schema.json_schema or {})


class SamplingBody(Body):
    """What chat completions and completions have in common."""

    accepted: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of the OpenAI API that this server knows, with the values that mean what it does anyway."""

    model: str | None = Field(None, description="A name that /v1/models lists; the server's model if missing.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="Number of independent outputs.")
    temperature: float | None = None
    top_p: float | None = None
    stop: str | List[str] | None = None
    seed: int | None = Field(None, description="-2**63 to 2**64-1; negative seeds count from 2**64 down.")
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    response_format: ResponseFormat | None = None

    deterministic: bool | None = Field(
        None, description="The same tokens and log-probabilities, bit for bit, whatever else the server does."
    )

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens of log-probabilities are named token_id:ID instead of by their text."
    )
    priority: int | None = Field(None, description="Lower is served first.")
    request_id: str | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar, structural_tag."
    )
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        for name, values in self.accepted.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise ValueError(f"{name} is not supported by this server; remove it")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def to_params(
        self,
        *,
        deterministic_default: bool,
        max_tokens: int | None,
        logprobs: int | None,
        tool_constraint: StructuredOutputs | None = None,
        **replaced: Any,
    ) -> SamplingParams:
        """The engine's parameters.

        Args:
            deterministic_default: What `deterministic` is if the body does not say.
            max_tokens: The longest output.
            logprobs: How many of the best tokens have their log-probabilities returned; None returns none.
            tool_constraint: What an output that must call tools looks like.
            **replaced: Parameters to set in spite of the body.

        Raises:
            ValueError: A value is out of range; the message names the field.
        """
        fields: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        fields["deterministic"] = deterministic_default if self.deterministic is None else self.deterministic
        fields["logit_bias"] = _token_ids_of(self.logit_bias)
        if self.seed is not None:
            if self.seed < -(2**63):
                raise ValueError(f"seed must be at least -2**63, not {self.seed}")
            fields["seed"] = self.seed + (2**64 if self.seed < 0 else 0)
        structured = [value for value in (*self._structured(), tool_constraint) if value is not None]
        if len(structured) > 1:
            raise ValueError(
                "structured_outputs, guided_*, response_format and a forced tool_choice exclude each other; give one"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured_outputs=structured[0] if structured else None,
            **{**fields, **replaced},
        )

    def _structured(self) -> list[StructuredOutputs]:
        """The constraints of OpenAI's field, and of vLLM's, new and old."""
        form = self.response_format.to_structured_outputs() if self.response_format else None
        found = [] if form is None else [form]
        if self.structured_outputs is not None:
            given = {name: value for name, value in self.structured_outputs.items() if value is not None}
            try:
                found.append(StructuredOutputs(**given))
            except TypeError as error:
                raise ValueError(f"structured_outputs has a field that is not supported: {error}") from None
        old = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        found.extend(constraint(f"guided_{name}", **{name: value}) for name, value in old.items() if value is not None)
        return found


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    accepted = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "reasoning_effort": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "functions": (),
        "function_call": (),
        "chat_template": (),  # a template is a program; only the model's own is run
    }

    messages: List[dict[str, Any]] = Field(description="The conversation; contents are texts or lists of text parts.")
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: List[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Frame the rendered conversation by BOS and EOS.")
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None
    echo: Literal[False] | None = None

    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    modalities: List[str] | None = None
    verbosity: str | None = None
    reasoning_effort: str | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    @property
    def limit(self) -> int | None:
        """The longest output; None goes on up to the model's length."""
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens {both[0]} and max_completion_tokens {both[1]} contradict; give one")
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens have their log-probabilities returned."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(SamplingBody):
    """The body of /v1/completions."""

    accepted = {"best_of": (1,), "suffix": ("",)}

    prompt: str | List[str] | List[int] | List[List[int]] = Field(
        description="A text, or token ids; or a list of either."
    )
    max_tokens: int | None = Field(16, description="0 scores the prompt only; it needs echo.")
    logprobs: int | None = Field(None, description="How many of the best tokens are returned, up to 20.")
    echo: bool | None = Field(None, description="The text of the prompt, and its log-probabilities, come first.")
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = Field(None, description="Frame texts by BOS and EOS, if the model asks for it.")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one by one.

        Raises:
            ValueError: There is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ValueError("prompt must not be an empty list; give a text, token ids, or a list of either")
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: List[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: List[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: List[int]


def _token_ids_of(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings."""
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"logit_bias token id must be a number, not {key!r:.40}")
    return {int(key): value for key, value in bias.items()}
