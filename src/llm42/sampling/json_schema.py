"""Which JSON schemas are enforced to the letter: everything else is refused.

xgrammar turns a schema into a grammar and leaves out what it cannot express: some keywords always, some beside others,
some where no type is given. An output would then break the schema without a word. So a keyword passes here only where
it is known to be enforced; annotations, which constrain nothing, always pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm42.sampling.regex import check_regex, needs_escape

_ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "discriminator",
    ]
)
_OF_TYPE = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "patternProperties",
            "propertyNames",
        ]
    ),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_FORMATS = frozenset(
    [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Beside these, others are ignored."""
_IS_TYPE: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def check_schema(schema: object, path: str) -> None:
    """Raise `ValueError` naming the place and the keyword of `schema` that would not be enforced.

    Args:
        schema: A JSON schema, as `json.loads` gives it, not nested too deep for recursion.
        path: The name of the field, for messages.
    """
    _check(schema, path, schema)


def _check(schema: object, path: str, root: object) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"{path} must be a JSON schema, got {schema!r:.80}; use an object")
    for name in ("$defs", "definitions"):
        for key, child in _mapping(schema, name, path).items():
            _check(child, f"{path}.{name}.{key}", root)
    keywords = [key for key in schema if key not in _ANNOTATIONS]
    alone = next((key for key in _ALONE if key in schema), None)
    if alone is None:
        _check_typed(schema, keywords, path, root)
        return
    beside = ("type",) if alone in ("const", "enum") else ()
    for key in keywords:
        if key != alone and key not in beside:
            raise ValueError(
                f"{path} has {key!r} beside {alone!r}, where it is not supported; put it inside, or remove it"
            )
    _ALONE_CHECKS[alone](schema, path, root)


def _check_ref(schema: Mapping[str, Any], path: str, _root: object) -> None:
    reference = schema["$ref"]
    if reference != "#" and not (isinstance(reference, str) and reference.startswith("#/")):
        raise ValueError(
            f"{path}.$ref is {reference!r:.80}; only places in the schema itself are supported (#/$defs/...)"
        )


def _check_values(schema: Mapping[str, Any], path: str, _root: object) -> None:
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    types = _types(schema, path)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}.enum must be a list of at least one value, got {values!r:.80}; list the values")
    for value in values:
        if types and not any(_IS_TYPE[name](value) for name in types):
            raise ValueError(f"{path} has the value {value!r:.80}, which is not of type {schema['type']!r}; remove it")


def _check_any(schema: Mapping[str, Any], path: str, root: object) -> None:
    name = "anyOf" if "anyOf" in schema else "oneOf"
    branches = _branches(schema, name, path)
    for index, branch in enumerate(branches):
        _check(branch, f"{path}.{name}[{index}]", root)
    if name == "oneOf" and not _are_disjoint([_resolve(branch, root) for branch in branches]):
        raise ValueError(
            f"{path}.oneOf has branches that may both hold, which is not supported; use anyOf, or give each branch "
            "another type, or a required property with another const"
        )


def _check_all(schema: Mapping[str, Any], path: str, root: object) -> None:
    branches = _branches(schema, "allOf", path)
    if len(branches) > 1:
        raise ValueError(f"{path}.allOf has {len(branches)} schemas, and more than one is not supported; merge them")
    _check(branches[0], f"{path}.allOf[0]", root)


_ALONE_CHECKS = {
    "$ref": _check_ref,
    "const": _check_values,
    "enum": _check_values,
    "anyOf": _check_any,
    "oneOf": _check_any,
    "allOf": _check_all,
}


def _check_typed(schema: Mapping[str, Any], keywords: Sequence[str], path: str, root: object) -> None:
    types = _types(schema, path)
    for key in keywords:
        owners = [name for name, keys in _OF_TYPE.items() if key in keys]
        if key != "type" and not owners:
            raise ValueError(f"{path} has {key!r}, which is not supported; remove it")
        if key != "type" and not any(name in types for name in owners):
            raise ValueError(f'{path} has {key!r} without its type; add "type": "{owners[0]}"')
    if "number" in types and "multipleOf" in schema:
        raise ValueError(f"{path}.multipleOf is not supported for type number; use type integer")
    _check_string(schema, path)
    _check_array(schema, path, root)
    _check_object(schema, path, root)


def _check_string(schema: Mapping[str, Any], path: str) -> None:
    given = [name for name in ("pattern", "format") if name in schema]
    given += ["minLength or maxLength"] if "minLength" in schema or "maxLength" in schema else []
    if len(given) > 1:
        raise ValueError(f"{path} has {given[0]!r} beside {given[1]}, where it is not supported; use one of them")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise ValueError(
            f"{path}.format is {schema['format']!r:.80}, which is not supported; use a pattern, or one of "
            f"{', '.join(sorted(_FORMATS))}"
        )
    if "pattern" in schema:
        _check_pattern(schema["pattern"], f"{path}.pattern")


def _check_array(schema: Mapping[str, Any], path: str, root: object) -> None:
    has_items = "items" in schema or "prefixItems" in schema
    if not has_items and ("minItems" in schema or "maxItems" in schema):
        raise ValueError(
            f"{path} has minItems or maxItems without items, which is not supported; add items (true for any)"
        )
    if "items" in schema:
        _check(schema["items"], f"{path}.items", root)
    if "prefixItems" in schema:
        for index, child in enumerate(_branches(schema, "prefixItems", path)):
            _check(child, f"{path}.prefixItems[{index}]", root)


def _check_object(schema: Mapping[str, Any], path: str, root: object) -> None:
    properties = _mapping(schema, "properties", path)
    for key, child in properties.items():
        _check(child, f"{path}.properties.{key}", root)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"{path}.required must be a list of strings, got {required!r:.80}; list names of properties")
    if missing := [key for key in required if key not in properties]:
        raise ValueError(f"{path}.required names {missing[0]!r}, which properties does not have; add it there")
    open_names = [
        name
        for name in ("patternProperties", "propertyNames", "additionalProperties")
        if schema.get(name, False) is not False
    ]
    if len(open_names) > 1 or (properties and open_names and open_names != ["additionalProperties"]):
        beside = open_names[1] if len(open_names) > 1 else "properties"
        raise ValueError(f"{path} has {open_names[0]!r} beside {beside!r}, where it is not supported; remove one")
    if open_names and ("minProperties" in schema or "maxProperties" in schema):
        # Keys may come twice, and would be counted twice.
        raise ValueError(
            f"{path} limits the number of properties beside {open_names[0]!r}, which is not supported; remove it"
        )
    if "additionalProperties" in schema:
        _check(schema["additionalProperties"], f"{path}.additionalProperties", root)
    if "propertyNames" in schema:
        _check(schema["propertyNames"], f"{path}.propertyNames", root)
    for pattern, child in _mapping(schema, "patternProperties", path).items():
        _check_pattern(pattern, f"{path}.patternProperties")
        _check(child, f"{path}.patternProperties.{pattern}", root)


def _check_pattern(pattern: object, path: str) -> None:
    if not isinstance(pattern, str):
        raise ValueError(f"{path} must be a regular expression, got {pattern!r:.80}; use a string")
    check_regex(pattern, path)
    if piece := needs_escape(pattern):
        raise ValueError(
            f"{path} matches {piece!r} in {pattern!r:.80}, which JSON text can only have escaped, and that is not "
            "supported; remove it"
        )


def _types(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types that a schema names; none if it does not."""
    if "type" not in schema:
        return []
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(name, str) and name in _OF_TYPE for name in types):
        raise ValueError(f"{path}.type is {given!r:.80}; use one or more of {', '.join(_OF_TYPE)}")
    return types


def _mapping(schema: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}.{name} must be an object, got {value!r:.80}; map names to schemas")
    return value


def _branches(schema: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = schema[name]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}.{name} must be a list of at least one schema, got {value!r:.80}; list schemas")
    return value


def _resolve(schema: object, root: object) -> object:
    """What a branch refers to, if that is easily found; references to references stay."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return schema
    node = root
    for key in str(schema["$ref"]).split("/")[1:]:
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _are_disjoint(branches: Sequence[object]) -> bool:
    """Whether no value can satisfy two branches, as far as their types and their required constants show."""
    return all(
        _exclude_each_other(first, second) for index, first in enumerate(branches) for second in branches[index + 1 :]
    )


def _exclude_each_other(first: object, second: object) -> bool:
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return False
    values = [_constants(branch) for branch in (first, second)]
    if values[0] and values[1]:
        return not values[0] & values[1]
    kinds = [
        {"number" if name == "integer" else name for name in _types(branch, "oneOf")} for branch in (first, second)
    ]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(
        (a := _constants(first["properties"][key])) and (b := _constants(second["properties"][key])) and not a & b
        for key in shared
    )


def _constants(schema: object) -> set[str]:
    """The values of a `const` or `enum`, as text; none if it has neither."""
    if not isinstance(schema, Mapping) or not ("const" in schema or "enum" in schema):
        return set()
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return {json.dumps(value, sort_keys=True) for value in values}
