"""The tokenizer of a GGUF model as `tokenizer.json` and `tokenizer_config.json`.

Two families: byte-level BPE (`gpt2`), whose pre-tokenizer is named by `tokenizer.ggml.pre`, and SentencePiece BPE with
scores and byte fallback (`llama`), whose merges are derived from the scores. The pre-tokenizer decides which texts get
which ids, so an unknown name is refused and never replaced by a guess. The patterns are those of the models' published
`tokenizer.json` files (for `default`, llama.cpp's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from gguf.constants import TokenType

from llm42.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm42.model.gguf_file import GGUFFile

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The two tokenizer documents, and the ids that go into `generation_config.json`."""

    tokenizer: Json
    config: Json
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How byte-level BPE splits text before merging, and llama.cpp's defaults for models of that name."""

    steps: tuple[Json, ...]
    normalizer: str | None = None
    ignore_merges: bool = False  # a piece that is itself a token is taken whole
    add_bos: bool = False


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN: Final = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_PATTERNS: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_GPT2: Final = _PreTokenizer((_byte_level(use_regex=True),))
_DIGITS: Final = _PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_LLAMA3: Final = _PreTokenizer(
    (_split(_LLAMA3_PATTERN), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True
)
_QWEN2: Final = _PreTokenizer((_split(_QWEN2_PATTERN), _byte_level(use_regex=False)), normalizer="NFC")
_TEKKEN: Final = _PreTokenizer(
    (_split(_TEKKEN_PATTERN), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True
)
_DEFAULT: Final = _PreTokenizer((*map(_split, _DEFAULT_PATTERNS), _byte_level(use_regex=False)))

PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The token table: texts and types by id, and the named ids."""

    file: GGUFFile
    tokens: Sequence[str]
    types: Sequence[int]

    def of_type(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]

    def mapping(self) -> dict[str, int]:
        """Token -> id. Unused entries are left out: they are padding, and no text may ever become one."""
        used = [token_id for token_id, kind in enumerate(self.types) if kind != TokenType.UNUSED]
        mapping = {self.tokens[token_id]: token_id for token_id in used}
        for token_id in used if len(mapping) < len(used) else []:
            if (other := mapping[self.tokens[token_id]]) != token_id:
                raise ModelError(
                    f"{self.file.path}: tokenizer.ggml.tokens has {self.tokens[other]!r} twice,"
                    f" as {token_id} and {other}"
                )
        return mapping

    def special_id(self, name: str) -> int | None:
        """The id stored under `tokenizer.ggml.{name}_token_id`, checked against the table."""
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.file.optional(key, int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise ModelError(f"{self.file.path}: {key} is {token_id}, but the vocabulary has {len(self.tokens)} tokens")
        return token_id


def build_tokenizer(file: GGUFFile, vocab_size: int) -> TokenizerFiles:
    """The tokenizer of `file`, whose embedding has `vocab_size` rows. Raises `ModelError` naming the key at fault."""
    vocabulary = _read_vocabulary(file, vocab_size)
    model = file.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        parts, add_bos_default = _byte_level_bpe(vocabulary)
    elif model == "llama":
        parts, add_bos_default = _sentencepiece_bpe(vocabulary), True
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2 (byte-level BPE),"
            " llama (SentencePiece BPE)"
        )
    add_bos = file.optional("tokenizer.ggml.add_bos_token", bool)
    add_bos = add_bos_default if add_bos is None else add_bos
    add_eos = file.optional("tokenizer.ggml.add_eos_token", bool) or False
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **parts,
        "post_processor": _post_processor(vocabulary, add_bos=add_bos, add_eos=add_eos),
    }
    try:
        tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path}: the tokenizer.ggml keys do not make a working tokenizer ({error})") from error
    eos_ids = (vocabulary.special_id(name) for name in ("eos", "eot", "eom"))
    return TokenizerFiles(
        tokenizer=document,
        config=_tokenizer_config(vocabulary, add_bos=add_bos, add_eos=add_eos),
        bos_token_id=vocabulary.special_id("bos"),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        pad_token_id=vocabulary.special_id("padding"),
    )


def _read_vocabulary(file: GGUFFile, vocab_size: int) -> _Vocabulary:
    tokens = file.require("tokenizer.ggml.tokens", list)
    types = file.optional("tokenizer.ggml.token_type", list)
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    if not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is not a list of strings")
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if len(tokens) > vocab_size:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, but token_embd.weight has {vocab_size} rows"
        )
    return _Vocabulary(file, tokens, types)


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Everything but the added tokens and the post-processor, and whether such models start with BOS by default."""
    file = vocabulary.file
    name = file.optional("tokenizer.ggml.pre", str) or "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    pre_tokenizer = PRE_TOKENIZERS[name]
    mapping = vocabulary.mapping()
    merges = []
    for merge in file.require("tokenizer.ggml.merges", list):
        # A byte-level token writes its spaces as another character, so the only one here separates the two.
        left, separator, right = str(merge).partition(" ")
        if not separator or not {left, right, left + right} <= mapping.keys():
            raise ModelError(
                f"{file.path}: tokenizer.ggml.merges has {merge!r}, which is not two tokens of the vocabulary"
            )
        merges.append([left, right])
    parts: dict[str, Any] = {
        "normalizer": {"type": pre_tokenizer.normalizer} if pre_tokenizer.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(mapping, merges, ignore_merges=pre_tokenizer.ignore_merges),
    }
    return parts, pre_tokenizer.add_bos


def _bpe(mapping: Json, merges: Sequence[Sequence[str]], **overrides: object) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": mapping,
        "merges": merges,
    } | overrides


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    file = vocabulary.file
    scores = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    mapping = vocabulary.mapping()
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in mapping]:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens lacks the byte token <0x{missing[0]:02X}>")
    unknown_ids = vocabulary.of_type(TokenType.UNKNOWN)
    add_prefix = file.optional("tokenizer.ggml.add_space_prefix", bool)
    add_prefix = True if add_prefix is None else add_prefix
    to_meta = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if add_prefix else []
    from_meta = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_meta]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": from_meta + strip},
        "model": _bpe(
            mapping,
            merges_from_scores(vocabulary.tokens, vocabulary.types, scores),
            unk_token=vocabulary.tokens[unknown_ids[0]] if unknown_ids else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """SentencePiece's merges: every split of a normal token into two, the highest score of the whole first.

    SentencePiece joins the neighbouring pair whose union scores best; listing all pairs by that score makes BPE's merge
    ranks do the same. Splits of one token are ordered by the longer left part.
    """
    normal = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == TokenType.NORMAL}
    ranked = []
    for token, token_id in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[token_id], token_id, -cut, left, right))
    ranked.sort()
    return [[left, right] for *_, left, right in ranked]


def _added_tokens(vocabulary: _Vocabulary) -> list[Json]:
    special = set(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    return [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in special,
        }
        for token_id in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        if vocabulary.tokens[token_id]
    ]


def _post_processor(vocabulary: _Vocabulary, *, add_bos: bool, add_eos: bool) -> Json | None:
    """The template that adds BOS and EOS when special tokens are asked for, or None when there are none to add."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [{"Sequence": {"id": "B", "type_id": 1}}]
    special_tokens = {}
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if not wanted:
            continue
        token_id = vocabulary.special_id(name)
        if token_id is None:
            raise ModelError(
                f"{vocabulary.file.path}: tokenizer.ggml.add_{name}_token needs tokenizer.ggml.{name}_token_id"
            )
        token = vocabulary.tokens[token_id]
        special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        at_start = name == "bos"
        for template, type_id in ((single, 0), (pair, 1)):
            template.insert(0 if at_start else len(template), {"SpecialToken": {"id": token, "type_id": type_id}})
    if not special_tokens:
        return None
    return {"type": "TemplateProcessing", "single": single, "pair": single + pair, "special_tokens": special_tokens}


def _tokenizer_config(vocabulary: _Vocabulary, *, add_bos: bool, add_eos: bool) -> Json:
    file = vocabulary.file
    prefix = file.require("general.architecture", str)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.require(f"{prefix}.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := vocabulary.special_id(key)) is not None:
            config[f"{name}_token"] = vocabulary.tokens[token_id]
    if template := file.optional("tokenizer.chat_template", str):
        config["chat_template"] = template
    return config
