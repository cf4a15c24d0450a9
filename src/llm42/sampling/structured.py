"""What form an output must have: a JSON schema, a regular expression, a list of choices, a grammar or structural tags.

Names follow vLLM's `StructuredOutputsParams`. Every `StructuredOutputs` that exists is well formed by itself and small
enough to be compiled; whether xgrammar takes it is decided by `grammar`, still before the engine loop. This module
imports neither torch nor xgrammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llm42.sampling import json_schema
from llm42.sampling.regex import check_regex, unrolled_states

MAX_SOURCE_CHARS = 100_000
MAX_NESTING = 64
MAX_CHOICES = 1000
MAX_UNROLLED = 4000
"""States that bounded repetitions may be unrolled to: each may cost milliseconds of compilation."""

_ABSENT = ("json_object", False)
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an output: exactly one of the first six fields.

    Raises `ValueError` naming the field, its value and the remedy. Documents are normalised to JSON text, lists to
    tuples.

    Attributes:
        json: A JSON schema, as text or as a dict. Objects have their properties in the schema's order, and no others
            unless `additionalProperties` says so. A keyword that would not be enforced is refused.
        json_object: True: any JSON object.
        regex: A regular expression that the whole output matches.
        choice: The output is one of these strings.
        grammar: An EBNF grammar in the notation of GBNF, with a rule named `root`.
        structural_tag: A structural tag of xgrammar, as text or as a dict, for calls of tools amid other text.
        disable_any_whitespace: JSON on one line, in one spelling, instead of whitespace as the model likes.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}; "
                "give one"
            )
        for field in fields(self):
            if field.name in ("json_object", "disable_any_whitespace"):
                _check_flag(field.name, getattr(self, field.name))
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(f"disable_any_whitespace is for json and json_object, not for {given[0]}; remove it")
        object.__setattr__(self, given[0], _CHECKS[given[0]](getattr(self, given[0])))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and (name, getattr(self, name)) != _ABSENT]

    @property
    def text(self) -> str:
        """The field as text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


def _check_flag(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"structured_outputs.{name} must be True or False, got {value!r:.80}; use a bool")


def _json(value: object) -> str:
    text, document = _document("json", value)
    if not isinstance(document, (dict, bool)):
        raise ValueError(f"structured_outputs.json must be a JSON schema, got {text:.80}; use an object")
    json_schema.check_schema(document, "structured_outputs.json")
    _limit_repetition("json", _schema_repetitions(document))
    return text


def _structural_tag(value: object) -> str:
    text, document = _document("structural_tag", value)
    if not isinstance(document, dict) or document.get("type") != "structural_tag" or "format" not in document:
        raise ValueError(
            f'structured_outputs.structural_tag must be {{"type": "structural_tag", "format": ...}}, got {text:.80}; '
            "see xgrammar's structural tags"
        )
    path = "structured_outputs.structural_tag"
    repetitions = 0
    for node in _objects(document):
        if node.get("type") == "json_schema" and "json_schema" in node:
            json_schema.check_schema(node["json_schema"], f"{path} json_schema")
            repetitions += _schema_repetitions(node["json_schema"])
        elif node.get("type") == "regex" and isinstance(node.get("pattern"), str):
            check_regex(node["pattern"], f"{path} pattern")
            repetitions += unrolled_states(node["pattern"])
        elif node.get("type") == "grammar" and isinstance(node.get("grammar"), str):
            repetitions += unrolled_states(node["grammar"])
    _limit_repetition("structural_tag", repetitions)
    return text


def _regex(value: object) -> str:
    text = _source("regex", value)
    check_regex(text, "structured_outputs.regex")
    _limit_repetition("regex", unrolled_states(text))
    return text


def _grammar(value: object) -> str:
    text = _source("grammar", value)
    _limit_repetition("grammar", unrolled_states(text))
    return text


def _choice(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"structured_outputs.choice must be a list of at least one string, got {value!r:.80}; list the choices"
        )
    if len(value) > MAX_CHOICES:
        raise ValueError(
            f"structured_outputs.choice must have at most {MAX_CHOICES} choices, got {len(value)}; drop some"
        )
    return tuple(_source("choice", text) for text in value)


def _json_object(value: bool) -> bool:
    return value


_CHECKS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _source(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"structured_outputs.{name} must be a string that is not empty, got {value!r:.80}; give one")
    if len(value) > MAX_SOURCE_CHARS:
        raise ValueError(
            f"structured_outputs.{name} must have at most {MAX_SOURCE_CHARS} characters, got {len(value)}; shorten it"
        )
    if bad := re.search("[\x00\ud800-\udfff]", value):
        raise ValueError(f"structured_outputs.{name} has {bad[0]!r} at {bad.start()}; remove it")
    return value


def _document(name: str, value: object) -> tuple[str, Any]:
    """Canonical JSON text and its value."""
    if not isinstance(value, (str, Mapping)):
        raise ValueError(f"structured_outputs.{name} must be JSON text or a dict, got {value!r:.80}; give one of them")
    try:
        document = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.{name} must be JSON, got {value!r:.80} ({error}); correct it") from None
    _check_nesting(name, document)
    return _source(name, text), document


def _check_nesting(name: str, document: object) -> None:
    level = [document]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ValueError(f"structured_outputs.{name} must be nested at most {MAX_NESTING} deep; flatten it")


def _children(node: object) -> Sequence[object]:
    return list(node.values()) if isinstance(node, Mapping) else node if isinstance(node, list) else ()


def _objects(node: object) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in a document, itself first."""
    if isinstance(node, Mapping):
        yield node
    for child in _children(node):
        yield from _objects(child)


def _schema_repetitions(schema: object) -> int:
    total = 0
    for node in _objects(schema):
        if isinstance(pattern := node.get("pattern"), str):
            total += unrolled_states(pattern)
        total += sum(unrolled_states(key) for key in node.get("patternProperties") or ())
        if isinstance(properties := node.get("properties"), Mapping):  # counted in every state of the count
            bounds = [node[name] for name in ("minProperties", "maxProperties") if type(node.get(name)) is int]
            total += len(properties) * max(bounds, default=0)
        for low, high in (("minLength", "maxLength"), ("minItems", "maxItems")):
            counts = [node[name] for name in (low, high) if type(node.get(name)) is int]
            total += unrolled_states(f"x{{{max(counts)}}}") if counts and max(counts) >= 0 else 0
    return total


def _limit_repetition(name: str, states: int) -> None:
    if states > MAX_UNROLLED:
        raise ValueError(
            f"structured_outputs.{name} repeats too much: {states} states where {MAX_UNROLLED} are allowed; use fewer "
            "or smaller bounded repetitions, or none with * and +"
        )
