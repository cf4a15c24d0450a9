"""Grammars that an output must follow: compiled by xgrammar once for an engine, matched token by token for a row.

Invariant: what a row may choose is a function of the grammar and of the row's own prefix of the output. A matcher is a
memory of which prefix it has accepted; each row rolls it back to what the two have in common and lets it accept the
rest. So a rollback, a window of candidates, or a row that is run again needs no word to the matcher.

A token that ends the output is allowed exactly where the grammar is complete. The matcher knows nothing of such tokens:
it is given a vocabulary with one more id, whose place in the mask says that the grammar is complete.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llm42.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 32
"""Most characters of whitespace in one place of JSON: a line break and an indent, but no endless run of them."""
MAX_GRAMMAR_BYTES = 2 << 20
"""Most memory that a grammar may have before its masks are made; they cost about a second for each of these."""
MAX_STEP_S = 0.1
"""Most CPU time that one token or one mask may take: hundreds of times the usual, yet soon reached where it grows."""
CACHE_BYTES = 64 << 20
"""Memory for compiled grammars that are kept."""

_NOT_JSON = re.compile(rb"[\x00-\x09\x0b-\x1f]")


def grammar_version() -> str:
    """The version of what decides which tokens a grammar allows; part of the contract."""
    return version("xgrammar")


class Grammar:
    """A compiled grammar for one output: which tokens may follow a prefix.

    Args:
        compiled: The grammar, over a vocabulary of ``vocab_size`` ids and one more.
        vocab_size: Columns of the logits.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        import xgrammar  # noqa: PLC0415  brings transformers along, which takes seconds

        self._vocab_size = vocab_size
        self._accepted: list[int] = []
        self._without_text = frozenset(compiled.tokenizer_info.special_token_ids)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size + 1)
        self.is_exhausted = False
        """Whether it took too long once; it allows nothing since."""
        started = time.thread_time()
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._spend(started)

    def allowed(self, output_token_ids: Sequence[int], stop_token_ids: frozenset[int]) -> torch.Tensor | None:
        """A mask [vocab], bool, of the tokens that may follow; None if none may, since the prefix breaks the grammar.

        Args:
            output_token_ids: The row's prefix of the output.
            stop_token_ids: The ids that end the output.
        """
        if not self._follow(output_token_ids):
            return None
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(self._bitmask)
        if not self._spend(started):
            return None
        bits = np.unpackbits(self._bitmask.numpy().view(np.uint8)[0], bitorder="little")[: self._vocab_size + 1]
        mask = torch.from_numpy(bits.view(np.bool_))
        if stop_token_ids:
            mask[list(stop_token_ids)] = mask[self._vocab_size].item()
        return mask[: self._vocab_size]

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Bring the matcher to a prefix; return False, with what fits of it accepted, if it breaks the grammar."""
        if self.is_exhausted:
            return False
        common = _common_length(self._accepted, tokens)
        if common < len(self._accepted):
            self._matcher.rollback(len(self._accepted) - common)
            del self._accepted[common:]
        for token_id in tokens[common:]:
            started = time.thread_time()
            if token_id in self._without_text:  # the matcher would write a warning
                return False
            if not self._matcher.accept_token(token_id) or not self._spend(started):
                return False
            self._accepted.append(token_id)
        return True

    def _spend(self, started: float) -> bool:
        self.is_exhausted = self.is_exhausted or time.thread_time() - started > MAX_STEP_S
        return not self.is_exhausted


class GrammarCompiler:
    """Makes grammars for one model. Safe to use from many threads; never used by the engine's.

    Args:
        vocabulary_bytes: Gives what each id adds to a text; nothing for special tokens and ids that are no token.
        vocab_size: Columns of the logits.
    """

    def __init__(self, vocabulary_bytes: Callable[[int], list[bytes]], vocab_size: int) -> None:
        self._vocabulary_bytes = vocabulary_bytes
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compilers: dict[bool, tuple[xgrammar.GrammarCompiler, xgrammar.GrammarCompiler]] = {}
        self._cache: OrderedDict[StructuredOutputs, xgrammar.CompiledGrammar] = OrderedDict()

    def compile(self, form: StructuredOutputs, count: int = 1) -> list[Grammar]:
        """The grammar of a form, for ``count`` outputs.

        Raises:
            ValueError: The form is not valid, or would take too much time or memory.
        """
        # One at a time: however many hostile ones come together, they have one core.
        with self._lock:
            compiled = self._cache.get(form)
            if compiled is None:
                compiled = self._cache[form] = self._compile(form)
            self._cache.move_to_end(form)
            while len(self._cache) > 1 and self._cache_bytes() > CACHE_BYTES:
                self._cache.popitem(last=False)
        grammars = [Grammar(compiled, self._vocab_size) for _ in range(count)]
        allowed = grammars[0].allowed((), frozenset())
        if grammars[0].is_exhausted:
            raise ValueError(f"structured_outputs.{form.kind} takes too long to match ({form.text:.80}); simplify it")
        if allowed is None or not allowed.any():
            raise ValueError(f"structured_outputs.{form.kind} allows no output ({form.text:.80}); correct it")
        return grammars

    def _cache_bytes(self) -> int:
        return sum(compiled.memory_size_bytes for compiled in self._cache.values())

    def _compile(self, form: StructuredOutputs) -> xgrammar.CompiledGrammar:
        is_json = form.kind in ("json", "json_object", "structural_tag")
        if is_json not in self._compilers:
            self._compilers[is_json] = self._new_compilers(is_json=is_json)
        without_masks, with_masks = self._compilers[is_json]
        try:
            size = _compile_with(without_masks, form).memory_size_bytes
            if size > MAX_GRAMMAR_BYTES:
                raise ValueError(
                    f"structured_outputs.{form.kind} is too large: {size} bytes as a grammar where {MAX_GRAMMAR_BYTES} "
                    "are allowed; simplify it"
                )
            return _compile_with(with_masks, form)
        except RuntimeError as error:
            raise ValueError(
                f"structured_outputs.{form.kind} is refused by xgrammar: {_reason(error)} ({form.text:.80}); correct it"
            ) from None

    def _new_compilers(self, *, is_json: bool) -> tuple[xgrammar.GrammarCompiler, xgrammar.GrammarCompiler]:
        """One that leaves masks for later, to see how large a grammar is, and one that makes them all."""
        import xgrammar  # noqa: PLC0415

        contents = self._vocabulary_bytes(self._vocab_size)
        if is_json:  # where a string has a maximal length, xgrammar lets control characters in, which JSON does not
            contents = [b"" if _NOT_JSON.search(content) else content for content in contents]
        vocabulary = xgrammar.TokenizerInfo(
            [*contents, b""],
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size + 1,
            stop_token_ids=[self._vocab_size],
        )
        first, second = (
            xgrammar.GrammarCompiler(
                vocabulary, max_threads=1, cache_enabled=False, enable_dynamic_compilation=is_dynamic
            )
            for is_dynamic in (True, False)
        )
        return first, second


def _compile_with(compiler: xgrammar.GrammarCompiler, form: StructuredOutputs) -> xgrammar.CompiledGrammar:
    if form.kind in ("json", "json_object"):
        schema = form.text if form.kind == "json" else '{"type": "object"}'
        if form.disable_any_whitespace:
            return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
    if form.kind == "regex":
        return compiler.compile_regex(form.text)
    if form.kind == "grammar":
        return compiler.compile_grammar(form.text)
    tag: str | dict[str, Any] = form.text
    if form.kind == "choice":
        choices = [{"type": "const_string", "value": text} for text in form.choice or ()]
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": choices}}
    return compiler.compile_structural_tag(tag if isinstance(tag, str) else json.dumps(tag))


def _reason(error: RuntimeError) -> str:
    """The library's message without its source file and line."""
    return str(error).strip().rsplit("] /project/", 1)[-1].split(": ", 1)[-1].removeprefix("Check failed: ")[:300]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(index for index in range(length) if first[index] != second[index])
