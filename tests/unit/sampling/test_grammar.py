"""Grammars on a vocabulary of bytes and a few longer tokens: prefixes in any order, ends, and hostile input."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading

import pytest
import torch

from llm42.sampling import SampleRow, SamplingParams, StructuredOutputs, sample
from llm42.sampling import grammar as grammar_module
from llm42.sampling.grammar import GrammarCompiler

VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"", b'{"', b'": ', b"true", b"ab", b"abc", b""]
EOS, UNUSED = 256, 262
STOPS = frozenset({EOS})
SIZE = 270  # the logits have more columns than the tokenizer has ids
FORMS = [
    StructuredOutputs(
        json={"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 4}}}
    ),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="(ab|abc)*c{0,3}"),
    StructuredOutputs(choice=["ab", 'a"\\\n', "abc", "é"]),
    StructuredOutputs(grammar='root ::= "a" root "b" | ""'),
]


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda size: [*VOCABULARY, *[b""] * (size - len(VOCABULARY))], SIZE)


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def allowed(grammar, tokens, stops=STOPS) -> list[int] | None:
    mask = grammar.allowed(tokens, stops)
    return None if mask is None else mask.nonzero().squeeze(1).tolist()


def walks(compiler, form, rng):
    """Prefixes that the form takes, and after each of some of them a token that it refuses."""
    (grammar,) = compiler.compile(form)
    tokens: list[int] = []
    for _ in range(14):
        yield list(tokens)
        choices = [token for token in allowed(grammar, tokens) if token != EOS]
        if rng.random() < 0.3:
            yield [*tokens, rng.choice([token for token in range(SIZE) if token not in choices]), rng.randrange(SIZE)]
        if not choices:
            return
        tokens.append(rng.choice(choices))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_row_depends_on_its_prefix_and_not_on_what_the_matcher_saw_before(compiler, form):
    rng = random.Random(3)
    prefixes = [prefix for _ in range(6) for prefix in walks(compiler, form, rng)]
    expected = [allowed(compiler.compile(form)[0], prefix) for prefix in prefixes]
    assert None in expected
    (grammar,) = compiler.compile(form)
    order = [rng.randrange(len(prefixes)) for _ in range(300)]
    assert [allowed(grammar, prefixes[index]) for index in order] == [expected[index] for index in order]


def test_an_end_is_allowed_exactly_where_the_form_is_complete(compiler):
    (grammar,) = compiler.compile(StructuredOutputs(regex="ab?"))
    assert allowed(grammar, []) == [ord("a"), 260]
    assert allowed(grammar, [ord("a")]) == [ord("b"), EOS]
    assert allowed(grammar, [260]) == [EOS]
    assert allowed(grammar, [260, EOS]) is None
    assert allowed(grammar, [260], frozenset({EOS, UNUSED})) == [EOS, UNUSED]
    assert allowed(grammar, [ord("a")], frozenset({ord("b")})) == [ord("b")], "a stop id ends a complete form"
    assert allowed(grammar, [], frozenset({260})) == [ord("a")], "and may not cut one short"


def test_ids_without_text_and_control_characters_never_stand_in_json(compiler):
    (grammar,) = compiler.compile(StructuredOutputs(json={"type": "string", "maxLength": 9}))
    inside = allowed(grammar, [ord('"')])
    assert not set(inside) & {EOS, UNUSED, *range(32), *range(len(VOCABULARY), SIZE)}
    assert ord("a") in inside


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_cannot_break_a_form_and_min_tokens_comes_after_it(compiler, temperature):
    params = SamplingParams(
        temperature=temperature, logit_bias={7: 100.0}, min_tokens=3, structured_outputs=StructuredOutputs(regex="aa?")
    )
    (grammar,) = compiler.compile(params.structured_outputs)
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    prefixes = ([], [ord("a")], [ord("a")] * 2)
    rows = [SampleRow(params, 1, [1], prefix, STOPS, grammar) for prefix in prefixes]
    assert sample(logits, rows) == [ord("a"), ord("a"), -1]
    assert rows[1].dead_end is None
    assert "complete after 2 tokens; lower min_tokens, which is 3" in rows[2].dead_end
    broken = SampleRow(params, 1, [1], [7], STOPS, grammar)
    assert sample(logits[:1], [broken]) == [-1]
    assert sample(logits[:1], rows[:1]) == [ord("a")], "the matcher recovers"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "refused by xgrammar"),
        ({"json": {"$ref": "#"}}, "Circular"),
        ({"json": {"$ref": "#/$defs/missing"}}, "refused by xgrammar"),
        ({"json": "false"}, "refused by xgrammar"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"regex": "[z-a]"}, "lower bound"),
        ({"grammar": "root ::= missing"}, "not defined"),
        ({"grammar": "root ::= root"}, "allows no output"),
        ({"grammar": 'x ::= "a"'}, "root"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "nope"}}}, "nope"),
    ],
)
def test_what_xgrammar_refuses_is_a_value_error(compiler, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        compiler.compile(StructuredOutputs(**fields))
    assert "structured_outputs." in str(caught.value)
    assert "/project/" not in str(caught.value)


HOSTILE = [
    {"regex": "(a{1000}){1000}"},
    {"regex": "(((a{0,50}){0,50}){0,50})"},
    {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"regex": "a{99999999999999999999}"},
    {"regex": "[^a]{0,100000}(b|c){0,100000}"},
    {"grammar": "root ::= " + "(" * 49_000 + '"a"' + ")" * 49_000},
    {"grammar": 'root ::= "a"{1000000000}'},
    {
        "grammar": "root ::= "
        + " ".join(f"a{i}" for i in range(3000))
        + "\n"
        + "\n".join(f'a{i} ::= "x"' for i in range(3000))
    },
    {"grammar": "\n".join(f'a{i} ::= a{i + 1} | a{i + 1} "y"' for i in range(3000)) + '\na3000 ::= "x"\nroot ::= a0'},
    {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9}},
    {"json": {"type": "integer", "minimum": -(10**300)}},
    {"json": {"type": "string", "enum": [f"value {i}" for i in range(4000)]}},
    {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}, "minProperties": 500}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {
        "json": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}},
            "$ref": "#/$defs/d0",
        }
    },
]

_CHILD = """
import json, sys
sys.path.insert(0, {here!r})
from test_grammar import HOSTILE, new_compiler
from llm42.sampling import StructuredOutputs
compiler = new_compiler()
for fields in HOSTILE:
    try:
        (grammar,) = compiler.compile(StructuredOutputs(**fields))
        tokens = []
        for _ in range(30):
            mask = grammar.allowed(tokens, frozenset())
            if mask is None or not mask.any():
                break
            tokens.append(int(mask.nonzero()[0]))
    except ValueError as error:
        assert "structured_outputs." in str(error), error
print("survived", len(HOSTILE))
"""


def test_hostile_forms_neither_end_the_process_nor_hang_it():
    here = str(__file__).rsplit("/", 1)[0]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD.format(here=here)], capture_output=True, text=True, timeout=240, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert f"survived {len(HOSTILE)}" in child.stdout


def test_a_form_that_takes_longer_and_longer_to_match_is_given_up(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_STEP_S", 0.002)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="(a*)*(a*)*(a*)*(a*)*"))
    (grammar,) = compiler.compile(params.structured_outputs)
    tokens: list[int] = []
    while grammar.allowed(tokens, STOPS) is not None and len(tokens) < 400:
        tokens.append(ord("a"))
    row = SampleRow(params, 1, [1], tokens, STOPS, grammar)
    assert "takes too long to match" in row.dead_end
    assert sample(torch.zeros(1, SIZE), [row]) == [-1]


def test_many_threads_compile_at_once_and_leave_thread_counts_alone():
    compiler, before = new_compiler(), torch.get_num_threads()
    schemas = [StructuredOutputs(json={"type": "array", "items": {"enum": [f"v{i % 3}", "x"]}}) for i in range(12)]
    found: list[object] = [None] * len(schemas)

    def work(index: int) -> None:
        (grammar,) = compiler.compile(schemas[index])
        found[index] = allowed(grammar, [ord(c) for c in f'["v{index % 3}"'])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(schemas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tokens and ord("]") in tokens for tokens in found)
    assert torch.get_num_threads() == before


def test_the_cache_is_bounded(monkeypatch):
    fresh = new_compiler()
    monkeypatch.setattr(grammar_module, "CACHE_BYTES", 50_000)
    for number in range(30):
        fresh.compile(StructuredOutputs(json={"type": "array", "items": {"const": f"value {number}"}}))
    assert 1 <= len(fresh._cache) < 30
    assert json.loads(next(reversed(fresh._cache)).json)["items"]["const"] == "value 29"
