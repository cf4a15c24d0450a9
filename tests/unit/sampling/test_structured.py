"""What forms of output are accepted, and that what would not be enforced is refused."""

from __future__ import annotations

import json
import re

import pytest

from llm42 import SamplingParams, StructuredOutputs

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json": "{"}, "json must be JSON, got"),
        ({"json": 3}, "JSON text or a dict, got 3"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"type": {1}}}, "must be JSON"),
        ({"json": '{"minimum": NaN, "type": "number"}'}, "json must be JSON"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a\x00b"}, "at 1; remove it"),
        ({"regex": "\ud800"}, "remove it"),
        ({"regex": "a^b"}, "in the middle"),
        ({"choice": []}, "at least one string"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a", ""]}, "choice must be a string that is not empty"),
        ({"choice": ["a"] * 1001}, "at most 1000"),
        ({"grammar": "x" * 100_001}, "at most 100000 characters"),
        ({"structural_tag": {"type": "other"}}, 'must be {"type": "structural_tag"'),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for json"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
    ],
)
def test_a_bad_form_names_field_value_and_remedy(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "([a-z]{1,100}){1,100}"},
        {"regex": "|".join(f"[a-z]{{1,{n}}}" for n in range(1, 120))},
        {"json": {"type": "array", "prefixItems": [{"type": "string", "maxLength": 100}] * 50}},
        {"grammar": 'root ::= (("a"{100} | "b"){100})'},
        {"json": '{"items":' * 65 + "{}" + "}" * 65},
        {"json": '{"items":' * 50_000 + "{}" + "}" * 50_000},
    ],
)
def test_what_would_take_minutes_to_compile_is_refused(fields):
    with pytest.raises(ValueError, match=r"repeats too much|nested at most 64|must be JSON"):
        StructuredOutputs(**fields)


def test_equal_forms_are_one_key_and_keep_no_reference_to_what_was_given():
    schema = json.loads(json.dumps(OBJECT))
    first = StructuredOutputs(json=schema)
    assert first == StructuredOutputs(json=json.dumps(OBJECT))
    assert hash(first) == hash(StructuredOutputs(json=OBJECT))
    schema["required"].append("b")
    assert json.loads(first.json) == OBJECT
    assert (first.kind, StructuredOutputs(json_object=True).kind) == ("json", "json_object")


@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 2},
        {"type": "string", "minimum": 2},
        {"type": "string", "pattern": "^a+$", "maxLength": 1},
        {"type": "string", "format": "date", "minLength": 3},
        {"type": "string", "format": "idn-email"},
        {"type": "string", "pattern": 'a"b'},
        {"type": "string", "pattern": "a\\nb"},
        {"type": "string", "pattern": "a\\\\b"},
        {"type": "number", "multipleOf": 0.5},
        {"type": "array", "items": {}, "uniqueItems": True},
        {"type": "array", "contains": {"const": 2}},
        {"type": "array", "minItems": 2},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 0}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object", "additionalProperties": {}, "minProperties": 2},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "string", "enum": [1, "a"]},
        {"enum": [1, 2], "minimum": 2},
        {"enum": []},
        {"type": []},
        {"type": "nonsense"},
        {"type": "integer", "anyOf": [{"type": "integer", "minimum": 2}]},
        {"anyOf": []},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]},
        {"not": {"type": "integer"}},
        {"if": {"type": "integer"}, "then": {"minimum": 2}},
        {"$ref": "https://example.com/x.json"},
        {"$ref": "#/$defs/s", "$defs": {"s": {"type": "integer"}}, "minimum": 2},
        {"$dynamicRef": "#"},
        {"type": "string", "nullable": True},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("place", ["itself", "property", "item", "branch", "definition", "tool"])
def test_a_keyword_that_would_be_ignored_is_refused_wherever_it_is(schema, place):
    fields = {
        "itself": {"json": schema},
        "property": {"json": {"type": "object", "properties": {"p": schema}}},
        "item": {"json": {"type": "array", "items": schema}},
        "branch": {"json": {"anyOf": [{"type": "null"}, schema]}},
        "definition": {"json": {"$defs": {"d": schema}, "type": "null"}},
        "tool": {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": schema},
            }
        },
    }[place]
    with pytest.raises(ValueError, match=r"structured_outputs\.\w+.*;"):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        OBJECT,
        {"type": ["object", "null"], "properties": {"a": {"title": "A", "description": "d", "default": 1}}},
        {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
        {
            "$defs": {
                name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"
            },
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": r'^[^"]+\.$'}},
            "additionalProperties": {},
        },
        {"allOf": [{"type": "string", "format": "uuid"}]},
    ],
)
def test_common_schemas_are_taken(schema):
    assert StructuredOutputs(json=json.dumps(schema)).kind == "json"


def test_a_form_excludes_ignore_eos_and_must_be_a_form():
    form = StructuredOutputs(choice=["a"])
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    with pytest.raises(ValueError, match="ignore_eos must be False with structured_outputs"):
        SamplingParams(structured_outputs=form, ignore_eos=True)
    with pytest.raises(ValueError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"choice": ["a"]})
