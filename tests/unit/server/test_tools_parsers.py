"""Parsers of tool calls: what they find, what they leave, and that it never matters how the answer was cut."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm42.server.tools import PARSERS, ContentDelta, ForcedToolParser, ToolCallDelta, call_ids, collect
from llm42.server.tools.json_scanner import JsonScanner

FACTORIES = {
    **PARSERS,
    "required": ForcedToolParser,
    "named": lambda id_of, **options: ForcedToolParser(id_of, name="f", **options),
}
NAMES = st.sampled_from(sorted(FACTORIES))


def deltas_of(name, pieces, **options):
    parser = FACTORIES[name](lambda index: f"id{index}", **options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def read(name, *pieces, **options):
    """Content, and (name, arguments) of each call."""
    content, calls = collect(deltas_of(name, pieces, **options))
    assert [call.id for call in calls] == [f"id{index}" for index in range(len(calls))]
    return content, [(call.name, call.arguments) for call in calls]


NASTY = '{"a": "}{\\" </tool_call> [TOOL_CALLS] \\u00e9 é", "b": [1.5e3, {"c": {}}, null]}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ' + NASTY + "}\n</tool_call>", None, [("f", NASTY)]),
        (
            "hermes",
            'A\n<tool_call>{"name":"f"}</tool_call>\n<tool_call>{ "arguments" : {"x": 1}, "name":"g"}</tool_call>\n\nB',
            "A\n\n\nB",
            [("f", "{}"), ("g", '{"x": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null, "id": 7}</tool_call>', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', None, [("f", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "1\n2"}}</tool_call>', None, [("f", '{"x": "1\\n2"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call> ', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', None, [("f", "{}")]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', None, [("f", "{}"), ("g", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', None, [("f", "{}"), ("g", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": ' + NASTY + "}", None, [("f", NASTY)]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"type": "function", "name": "g", "parameters": {"x": 1}}',
            None,
            [("f", "{}"), ("g", '{"x": 1}')],
        ),
        ("llama3_json", 'Sure:\n{"name": "f", "parameters": {}}\nOk.', "Sure:\n\nOk.", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": ' + NASTY + ', "id": "abcdefg"}]', None, [("f", NASTY)]),
        (
            "mistral",
            'Hm.[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]',
            "Hm.",
            [("f", "{}"), ("g", '{"x": 1}')],
        ),
        (
            "mistral",
            "[TOOL_CALLS]f[ARGS]" + NASTY + '[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{"x": 1}',
            None,
            [("f", NASTY), ("g", "{}"), ("h", '{"x": 1}')],
        ),
        (
            "required",
            '[{"name": "f", "parameters": {"x": [1]}}, {"name": "g", "parameters": {}}]',
            None,
            [("f", '{"x": [1]}'), ("g", "{}")],
        ),
        ("named", ' {"x": {"y": 1}}\n', None, [("f", '{"x": {"y": 1}}')]),
    ],
)  # fmt: skip
def test_calls_are_found_with_their_arguments_as_written(parser, text, content, calls):
    assert read(parser, text) == (content, calls)
    assert read(parser, *text) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arg'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> and on'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"function": {"name": "f"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "not JSON"}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", " a < b <tool <tool_call"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "Bob", "age": 3, "parameters": {}}'),
        ("llama3_json", '{"name": "Bob"}\n{"title": "x"}'),
        ("llama3_json", 'As JSON: {"name": "f", "parameters": {}}'),
        ("llama3_json", '[\n  {"name": "f", "parameters": {}}\n]'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] none of them"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", "[1, 2] [TOOL"),
        ("required", "no list"),
        ("named", "\n\n[1]"),
        *((name, " \n") for name in FACTORIES),
    ],
)
def test_what_is_no_call_stays_in_the_content_whole(parser, text):
    assert read(parser, text) == (text, [])
    assert read(parser, *text) == (text, [])


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1', None, [("f", '{"x": [1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>!', "!", [("f", '{"x": oops}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>', None, [("f", '{"x": 1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} {"name": "g"', ' {"name": "g"', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": oops <', None, [("f", '{"x": oops <')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {} oops}', "oops}", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{1}[TOOL_CALLS]g[ARGS]{}", None, [("f", "{1}"), ("g", "{}")]),
    ],
)
def test_a_call_that_breaks_after_its_arguments_began_keeps_what_it_has(parser, text, content, calls):
    assert read(parser, text) == (content, calls)
    assert read(parser, *text) == (content, calls)


FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    '{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {"x": "}"}}', '{"name": ', '"arguments": ', '"f"',
    "{", "}", "[", "]", ",", ";", ":", '"', "\\", "\\u00", " ", "\n", "1.", "-", "null", "tru", "text",
    "<", "name", "é", "\x1c", '{"x": [1, {"y": "\\n"}]}',
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(NAMES, st.lists(FRAGMENTS, max_size=14).map("".join), st.data(), st.booleans())
@example("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', None, True)
def test_the_message_is_the_same_however_the_answer_is_cut(name, text, data, parallel):
    whole = read(name, text, parallel=parallel)
    assert read(name, *text, parallel=parallel) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, *pieces, parallel=parallel) == whole


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)
RENDERINGS = {
    "hermes": lambda calls: "\n".join(f'<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>' for n, a in calls),
    "llama3_json": lambda calls: "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls),
    "required": lambda calls: "[" + ", ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls) + "]",
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(RENDERINGS)), st.lists(OBJECTS, min_size=1, max_size=3), st.booleans(), st.integers(1, 9))
def test_every_call_comes_back_exactly(name, objects, ascii_only, size):
    calls = [(f"tool_{index}", json.dumps(value, ensure_ascii=ascii_only)) for index, value in enumerate(objects)]
    text = RENDERINGS[name](calls)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(name, *pieces) == (None, calls)
    assert read(name, *pieces, parallel=False) == (None, calls[:1])


@settings(max_examples=80, deadline=None)
@given(JSON_VALUES.map(json.dumps), st.data())
def test_the_scanner_agrees_with_json_about_damaged_values(text, data):
    place = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:place]
        + data.draw(st.sampled_from(["", "0", "}", "]", ",", '"', ".", "\\", " ", "e"]))
        + text[place + 1 :]
    )
    scanner = JsonScanner()
    end, accepted = scanner.scan(damaged + "\n", 0)
    is_whole = scanner.is_complete and not (damaged + "\n")[end:].strip()
    try:
        assert json.loads(damaged) == json.loads(accepted)
    except json.JSONDecodeError:
        assert not is_whole
    else:
        assert is_whole
        assert accepted.strip() == damaged.strip()


@pytest.mark.parametrize("number", ["0", "-1.5e+3", "10", "01", "-", "1.", ".5", "+1", "1e", "1.2.3", "--1", "NaN"])
def test_the_scanner_agrees_with_json_about_numbers(number):
    scanner = JsonScanner()
    scanner.scan(f"[{number}]", 0)
    assert scanner.is_complete == (number in {"0", "-1.5e+3", "10"})


def test_a_stream_begins_a_call_with_id_and_name_and_goes_on_with_arguments():
    parser = PARSERS["hermes"](call_ids([1, 2], 7))
    assert parser.feed("Hi <tool") == [ContentDelta("Hi ")]
    assert parser.feed('_call>{"name": "f", "argum') == []
    first, rest = parser.feed('ents": {"x"')
    assert (first.index, first.name, first.arguments, rest) == (0, "f", "", ToolCallDelta(0, None, None, '{"x"'))
    assert first.id.startswith("call_")
    assert parser.feed(": 1") == [ToolCallDelta(0, None, None, ": 1")]
    assert parser.feed("}}</tool_call") == [ToolCallDelta(0, None, None, "}")]
    assert parser.feed("> ") == parser.finish() == []
    assert parser.num_calls == 1


def test_text_is_held_back_only_while_it_may_become_a_marker():
    parser = PARSERS["hermes"](str)
    assert parser.feed("a <") == [ContentDelta("a ")]
    assert parser.feed("b") == [ContentDelta("<b")]
    assert parser.feed("<<tool_ca") == [ContentDelta("<")]
    assert parser.feed("p") == [ContentDelta("<tool_cap")]


def test_call_ids_follow_from_prompt_seed_and_index():
    ids = call_ids([1, 2, 3], 7)
    assert ids(0) == call_ids([1, 2, 3], 7)(0)
    assert len({ids(0), ids(1), call_ids([1, 2], 7)(0), call_ids([1, 2, 3], 8)(0)}) == 4
    assert len(ids(0)) == len("call_") + 24
    assert len(call_ids([1], 7, short=True)(0)) == 9


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_a_hostile_answer_is_read_whole(name):
    # A pattern that backtracks would take minutes, and a recursive parser would run out of stack.
    for hostile in ('{"name":' * 5_000, "[TOOL_CALLS]a[A]" + " " * 20_000 + "[B]" + " " * 20_000 + "!", "a\n{" * 5_000):
        content, calls = collect(deltas_of(name, [hostile]))
        assert (content or "") + "".join(call.arguments for call in calls) == hostile
    nested = '{"name": "f", "arguments": {"x": ' + "[" * 20_000
    content, calls = collect(deltas_of(name, ["<tool_call>", nested]))
    assert (
        nested.endswith((content or "") + "".join(call.arguments for call in calls))
        or content == "<tool_call>" + nested
    )
