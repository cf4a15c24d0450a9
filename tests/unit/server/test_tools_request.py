"""What a request says about tools, what it forces, and how models are told."""

import json

import pytest
import xgrammar
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from llm42.model.tokenizer import Tokenizer
from llm42.server.tools import (
    PARSERS,
    ForcedToolParser,
    collect,
    demands_short_ids,
    describe_tools,
    forced_schema,
    knows_tools,
    messages_for_template,
    needs_special_tokens,
    parse_tools,
    parser_name_for,
    strict_structural_tag,
    template_arguments,
)

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Next"}},
    "required": ["v"],
    "additionalProperties": False,
    "$defs": {"Next": {"type": "object", "properties": {"k": {"$ref": "#"}}, "additionalProperties": False}},
}


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def choice_of(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choice_of(name) for name in names]}}


F, G = function("f", parameters=NODE), function("g", description="No arguments.", parameters=None, strict=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, r"tools is \{\}; give a list"),
        ({"tools": [3]}, r"tools\[0\] is 3; give"),
        ({"tools": [{"type": "custom"}]}, r"tools\[0\]\.type is 'custom', but only functions"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function is None"),
        ({"tools": [F, function("a b")]}, r"tools\[1\]\.function\.name is 'a b'; use 1 to 64 letters"),
        ({"tools": [function("a\n")]}, r"function\.name is 'a\\n'"),
        ({"tools": [function("x" * 65)]}, r"function\.name is 'x+'"),
        ({"tools": [F, G, F]}, r"tools\[2\]\.function\.name is 'f', as in tools\[0\]; rename"),
        ({"tools": [function(description=3)]}, r"description is 3; give a string"),
        ({"tools": [function(strict="yes")]}, r"strict is 'yes'; give true or false"),
        ({"tools": [function(parameters=[])]}, r"parameters is \[\]; give a JSON schema"),
        ({"tools": [function(parameters={"type": "string"})]}, r"parameters\.type is 'string'; .* use \"object\""),
        ({"tools": [function(parameters={"properties": []})]}, r"parameters\.properties is \[\]"),
        ({"tools": [function(parameters=json.loads('{"x":' * 300 + "1" + "}" * 300))]}, r"more than 64 deep"),
        ({"tools": [function(f"f{index}") for index in range(129)]}, r"tools has 129 functions; give at most 128"),
        ({"tools": [F], "parallel_tool_calls": 1}, r"parallel_tool_calls is 1; give true or false"),
        ({"tools": [F], "tool_choice": "any"}, r"tool_choice is 'any'; use \"none\", \"auto\""),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "f"}}, r"tool_choice names None, which is not"),
        ({"tools": [F], "tool_choice": choice_of("g")}, r"tool_choice names 'g', which is not among .* \['f'\]"),
        ({"tools": [F], "tool_choice": allowed("none", "f")}, r"tool_choice\.allowed_tools is .*'none'"),
        ({"tools": [F], "tool_choice": allowed("auto", "h")}, r"allowed_tools\.tools\[0\] names 'h'"),
        ({"tool_choice": "auto"}, r"tool_choice is 'auto' but there are no tools"),
        ({"tools": [], "tool_choice": choice_of("f")}, r"but there are no tools; add tools"),
    ],
)
def test_errors_name_the_field_its_value_and_a_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_tools(**fields)


def test_options_say_what_the_model_may_call():
    assert parse_tools() is parse_tools([], "none", True) is parse_tools([F], "none") is None
    options = parse_tools([F, G], None, False)
    assert (options.choice, options.named, options.parallel) == ("auto", None, False)
    assert [tool.name for tool in options.tools] == ["f", "g"]
    named = parse_tools([F, G], choice_of("g"))
    assert (named.choice, named.named.name, named.parallel) == ("required", "g", True)
    some = parse_tools([F, G], allowed("required", "g"))
    assert (some.choice, some.named, [tool.name for tool in some.tools]) == ("required", None, ["g"])


def accepts(grammar, text):
    vocabulary = [*map(chr, range(32, 127)), "\n", "<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.accept_token(len(vocabulary) - 1)


def list_of(*calls):
    return "[" + ", ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls) + "]"


GOOD, BAD = '{"v": 1, "next": {"k": {"v": 2}}}', '{"v": 1, "next": {"k": {"w": 2}}}'


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        (choice_of("f"), True, GOOD, BAD),
        (choice_of("g"), True, "{}", '{"x": 1}'),
        ("required", True, list_of(("f", GOOD), ("g", "{}")), "[]"),
        ("required", False, list_of(("f", GOOD)), list_of(("f", BAD))),
        ("required", False, list_of(("g", "{}")), list_of(("h", "{}"))),
        ("required", False, list_of(("g", "{}")), list_of(("g", "{}"), ("g", "{}"))),
    ],
)
def test_a_forced_answer_follows_the_functions_schemas_and_is_read_as_calls(choice, parallel, good, bad):
    options = parse_tools([F, G], choice, parallel)
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(forced_schema(options)))
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)
    parser = ForcedToolParser(str, name=options.named and options.named.name, parallel=parallel)
    content, calls = collect(parser.feed(good) + parser.finish())
    named = options.named and [{"name": options.named.name, "parameters": json.loads(good)}]
    assert content is None
    assert [{"name": call.name, "parameters": json.loads(call.arguments)} for call in calls] == (
        named or json.loads(good)
    )


def test_nothing_is_forced_where_the_choice_is_the_models():
    assert forced_schema(parse_tools([F, G])) is None
    assert strict_structural_tag(parse_tools([F, G]), PARSERS["hermes"]) is None


def test_a_strict_function_is_held_to_its_schema_whenever_it_is_called():
    options = parse_tools([function("f", parameters=NODE, strict=True), G])
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(strict_structural_tag(options, PARSERS["hermes"])))

    def call(name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert accepts(grammar, "No call.")
    assert accepts(grammar, "Well: " + call("f", GOOD) + "\n" + call("g", '{"any": 1}'))
    assert not accepts(grammar, call("f", BAD))
    assert not accepts(grammar, call("h", "{}"))
    with pytest.raises(ValueError, match="strict"):
        strict_structural_tag(options, PARSERS["mistral"])


QWEN = "{%- if tools %}<tools>{{ tools }}</tools> <tool_call>{%- endif %}{{ message.tool_calls }} == 'tool'"
LLAMA = """{{ tools }} Respond in the format {"name": function name, "parameters": ...}. 'tool' tool_calls
raise_exception("This model only supports single tool-calls at once!")"""
MISTRAL = """[AVAILABLE_TOOLS]{{ tools }} [TOOL_CALLS] "tool" tool_calls {% if tool_call.id|length != 9 %}"""
PLAIN = "{% for message in messages %}{{ message.role + message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "name", "knows", "short"),
    [
        (QWEN, "hermes", True, False),
        (LLAMA, "llama3_json", True, False),
        ("{{ builtin_tools }} <|python_tag|> {{ tools }}", "llama3_json", True, False),
        (MISTRAL, "mistral", True, True),
        (PLAIN, "hermes", False, False),
        ("<tools>{{ tools }}</tools> <tool_call><function=name>", None, True, False),
        ("{{ tools }} <another_format>", None, True, False),
    ],
)
def test_the_family_is_recognised_by_the_template(template, name, knows, short):
    assert parser_name_for(template) == name
    assert knows_tools(template) == knows
    assert demands_short_ids(template) == short


def test_without_a_template_there_is_no_parser():
    assert parser_name_for(None) is None


def test_special_tokens_are_needed_where_markers_are_special(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.add_special_tokens(["[TOOL_CALLS]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    needed = {name: needs_special_tokens(parser, Tokenizer(tmp_path)) for name, parser in PARSERS.items()}
    assert needed == {"hermes": False, "llama3_json": False, "mistral": True}


def test_the_template_gets_the_tools_as_sent_without_nulls():
    tools = parse_tools([F, G]).tools
    shown = template_arguments(tools, QWEN)["tools"]
    assert shown[0] == F
    assert shown[1] == function("g", description="No arguments.", parameters={"type": "object", "properties": {}})
    assert template_arguments(tools, PLAIN) == template_arguments([], QWEN) == {}
    assert template_arguments(tools, "{{ xml_tools }}")["xml_tools"] == shown


def call(call_id="call_1", arguments='{"x": 1}', name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION = [
    {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "hi", "name": None, "tool_calls": []},
    {"role": "assistant", "content": None, "tool_calls": [call(), call("call_2", "", "g")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    {"role": "assistant", "refusal": "no"},
]


def test_messages_are_converted_as_templates_want_them():
    assert messages_for_template(CONVERSATION, QWEN) == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"x": 1}), call("call_2", {}, "g")]},
        CONVERSATION[3],
        CONVERSATION[4],
        {"role": "assistant", "content": "no"},
    ]
    assert messages_for_template(CONVERSATION, QWEN + "developer")[0]["role"] == "developer"


def test_ids_become_short_and_still_match_where_the_template_demands_it():
    converted = messages_for_template([*CONVERSATION[2:5], {**CONVERSATION[3], "tool_call_id": "abcdefgh9"}], MISTRAL)
    ids = [each["id"] for each in converted[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in converted[1:]] == [*ids, "abcdefgh9"]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_calls_made_together_are_told_one_by_one_where_the_template_takes_one_only():
    converted = messages_for_template(CONVERSATION, LLAMA)
    assert [message["role"] for message in converted[2:]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["tool_calls"][0]["id"] for message in converted[2:5:2]] == ["call_1", "call_2"]
    assert [message["content"] for message in converted[3:6:2]] == ["one", "two"]


def test_a_template_without_tools_is_told_in_words_and_hermes_reads_the_calls_back():
    converted = describe_tools(messages_for_template(CONVERSATION[:4], PLAIN), parse_tools([F]).tools)
    assert [message["role"] for message in converted] == ["system", "user", "assistant", "user"]
    assert converted[0]["content"].startswith("a\nb\n\n")
    assert json.dumps(F["function"]) in converted[0]["content"]
    assert converted[3]["content"] == "<tool_response>\none\n</tool_response>"
    parser = PARSERS["hermes"](str)
    content, calls = collect(parser.feed(converted[2]["content"]) + parser.finish())
    assert (content, [(each.name, each.arguments) for each in calls]) == (None, [("f", '{"x": 1}'), ("g", "{}")])
    assert describe_tools(converted, []) == converted


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "x"}, r"messages\[0\]\.role is None; use"),
        ({"role": "function", "content": "x"}, r"role is 'function'"),
        ({"role": "user"}, r"messages\[0\]\.content is None; give a string"),
        ({"role": "assistant", "content": None}, r"content is None"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"content\[0\] has type 'image_url', but",
        ),
        ({"role": "user", "content": [{"type": ["text"]}]}, r"content\[0\] has type \['text'\]"),
        ({"role": "user", "content": ["x"]}, r"content\[0\] has type None"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, r"tool_calls is .* of the assistant only"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\] is \{\}; give"),
        ({"role": "assistant", "tool_calls": [call(None)]}, r"tool_calls\[0\]\.id is None"),
        ({"role": "assistant", "tool_calls": [call(name=3)]}, r"function\.name is 3"),
        ({"role": "assistant", "tool_calls": [call(arguments='{"x": ')]}, r"arguments is '\{\"x\": '; give the text"),
        ({"role": "assistant", "tool_calls": [call(arguments="[" * 100_000)]}, r"arguments is "),
        ({"role": "assistant", "content": "", "function_call": {}}, r"function_call is \{\}; use tool_calls"),
        ({"role": "tool", "content": "x"}, r"tool_call_id is None; give the id"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_name(message, error):
    with pytest.raises(ValueError, match=error):
        messages_for_template([message], QWEN)
