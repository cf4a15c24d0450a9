"""Text to token ids and back, as the model's own files define it.

Encoding and decoding use the `tokenizers` library on tokenizer.json directly; transformers is imported only when a chat
template is rendered, or for a directory that has no tokenizer.json, because that import takes seconds. As in
transformers, tokenizer_config.json adds tokens, and tokenizer.json alone says whether BOS and EOS frame a text.
Decoding never "cleans up" spaces: that would make a text depend on what follows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken

from llm42.errors import ModelError
from llm42.model.token_decoder import TokenDecoder, build_steps, piece_bytes

if TYPE_CHECKING:
    from llm42.model.token_decoder import StepFactory

Message = Mapping[str, Any]

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


class Tokenizer:
    """The tokenizer of a model directory. Safe to share between threads: nothing changes after construction.

    Raises `ModelError` naming the file when the directory has no usable tokenizer.
    """

    vocab_size: int
    """One more than the highest token id. The model's embedding may have more rows; those are never text."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """The ids that end a generation, ascending: those of generation_config.json and config.json, else eos_token."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        config_file = self._directory / "tokenizer_config.json"
        self._config = _read_json(config_file)
        self._backend = _load_backend(self._directory)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = {
            name: text for name in _NAMED_TOKENS if (text := _token_text(self._config.get(name))) is not None
        }
        try:
            _add_configured_tokens(self._backend, self._config, self._special_tokens)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{config_file}: does not fit tokenizer.json ({error})") from error
        try:
            decoder = json.loads(self._backend.to_str())["decoder"] if self._backend.decoder else None
            self._steps = build_steps(decoder)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{self._directory / 'tokenizer.json'}: decoder: {error}") from error
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self._tokens: dict[int, str] = {token_id: token for token, token_id in vocabulary.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._longest_token = max(map(len, vocabulary), default=1)
        self.vocab_size = 1 + max(self._tokens, default=-1)
        self.bos_token_id = vocabulary.get(self._special_tokens.get("bos_token", ""))
        self.eos_token_ids = self._read_eos_token_ids(vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """The ids of `text`; with `add_special_tokens` framed by the BOS/EOS tokens that the model asks for.

        Text that spells a special token becomes that token. Raises ValueError for text that is not valid Unicode, and
        for text that cannot be `max_tokens` or less: tokenizing megabytes may take minutes.
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise ValueError(
                f"text has {len(text)} characters, more than max_model_len {max_tokens} can hold; shorten it"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text has the lone surrogate {text[error.start]!r} at {error.start}; remove it") from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids without a token give no text; bytes that are not UTF-8 become U+FFFD."""
        known = [token_id for token_id in ids if token_id in self._tokens]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def new_stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A streaming decoder whose pieces join to what `decode` gives for all ids."""
        return TokenStream(self._tokens, self._special_ids if skip_special_tokens else frozenset(), self._steps)

    def token_text(self, token_id: int) -> str:
        """The text of one token as it is amid other text: with its leading space, special tokens too; "" if unknown."""
        stream = self.new_stream(skip_special_tokens=False)
        if self._anchor_id is not None:
            stream.step(self._anchor_id)  # the first token of a text may lose a space that others keep
        return stream.step(token_id) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of `token_text`; of a token that is a piece of a character, its own bytes."""
        text = self.token_text(token_id)
        piece = piece_bytes(self._tokens.get(token_id, "")) if "\N{REPLACEMENT CHARACTER}" in text else None
        return text.encode() if piece is None else piece

    def vocabulary_bytes(self, size: int) -> list[bytes]:
        """`token_bytes` of the ids below `size`; nothing for special tokens and for ids without a token."""
        return [b"" if token_id in self._special_ids else self.token_bytes(token_id) for token_id in range(size)]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation (mappings with role and content) in the model's chat format.

        `kwargs` go to the template (`tools`, `documents`, `continue_final_message`, and its own variables). Raises
        ValueError when the model has no template, or when the template refuses the messages.
        """
        rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(rendered, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The text that `apply_chat_template` encodes; `chat_template` replaces the model's own."""
        template = chat_template or self._select_template(with_tools=bool(kwargs.get("tools")))
        if template is None:
            raise ValueError(f"the model in {self._directory} has no chat template; send a prompt instead of messages")
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f"messages is {messages!r}; give at least one mapping with role and content")
        if add_generation_prompt and kwargs.get("continue_final_message"):
            raise ValueError("continue_final_message needs add_generation_prompt=False: the last message stays open")

        from jinja2 import TemplateError  # noqa: PLC0415  slow imports, needed for chats only
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        conversation = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            rendered: Any = render_jinja_template(
                [conversation],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | kwargs),
            )
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error
        return str(rendered[0][0])

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that have a role (``bos_token``, ``eos_token``, ``pad_token``, ...), by its name."""
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template, or None."""
        return self._select_template(with_tools=False)

    @property
    def tool_chat_template(self) -> str | None:
        """The template of conversations with tools: some models have one of its own for them."""
        return self._select_template(with_tools=True)

    def _select_template(self, *, with_tools: bool) -> str | None:
        return (self._templates.get("tool_use") if with_tools else None) or self._templates.get("default")

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return {"default": file.read_text(encoding="utf-8")}
        template = self._config.get("chat_template")
        if isinstance(template, list):
            return {str(entry["name"]): str(entry["template"]) for entry in template}
        return {"default": template} if isinstance(template, str) else {}

    @cached_property
    def _anchor_id(self) -> int | None:
        """A token of visible text, to stand before another one."""
        return next(iter(self._backend.encode("a", add_special_tokens=False).ids[-1:]), None)

    def _read_eos_token_ids(self, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self._directory / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise ModelError(f"{self._directory / name}: eos_token_id is {value!r}, not an id or a list of ids")
            found.update(ids)
        named = vocabulary.get(self._special_tokens.get("eos_token", ""))
        if not found and named is not None:
            found.add(named)
        return tuple(sorted(found))


class TokenStream:
    """Text of a growing sequence of ids: `step` per id, then `flush` once. Cost per step is constant."""

    def __init__(self, tokens: Mapping[int, str], skipped: frozenset[int], steps: Sequence[StepFactory]) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._decoder = TokenDecoder(steps)

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete, and for skipped or unknown ids."""
        if token_id in self._skipped or (token := self._tokens.get(token_id)) is None:
            return ""
        return self._decoder.step(token)

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._decoder.flush()


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    file = directory / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file}: cannot be read as a tokenizer ({error}); get the file again") from error
    if not (directory / "tokenizer.model").is_file() and not (directory / "vocab.json").is_file():
        raise ModelError(f"{directory}: has no tokenizer.json (nor tokenizer.model or vocab.json to make it from)")

    from transformers import AutoTokenizer  # noqa: PLC0415  a slow import, needed here only

    try:
        backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    except Exception as error:  # conversion runs code of several libraries
        raise ModelError(
            f"{directory}: has no tokenizer.json, and transformers cannot make one ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{directory}: has no tokenizer.json, and transformers has no fast tokenizer for it")
    return backend


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Mark as added or special what only tokenizer_config.json says, as older models have it.

    A named special token that is no token of the vocabulary is left out: it has no row in the embedding. Raises
    ValueError when a listed token has another id in tokenizer.json.
    """
    listed = {int(token_id): entry for token_id, entry in (config.get("added_tokens_decoder") or {}).items()}
    wanted = [_added_token(entry) for _, entry in sorted(listed.items())]
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    named = [*special_tokens.values(), *filter(None, map(_token_text, extra))]
    wanted += [
        AddedToken(text, special=True, normalized=False) for text in named if backend.token_to_id(text) is not None
    ]
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in wanted if known.get(token.content, -1) < token.special])
    for token_id, entry in listed.items():
        if (actual := backend.token_to_id(entry["content"])) != token_id:
            raise ValueError(f"added token {entry['content']!r} has id {token_id} here and {actual} there")


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry.get(name, False)) for name in _TOKEN_FLAGS}
    return AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: holds {type(document).__name__}, not a JSON object")
    return document


def _token_text(entry: object) -> str | None:
    """A special token is written as its text, or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
