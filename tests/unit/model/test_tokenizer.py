"""The tokenizer of a model directory: agreement with transformers, streaming, chat templates, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors
from transformers import AutoTokenizer

from llm42.errors import ModelError
from llm42.model.gguf import convert_gguf
from llm42.model.tokenizer import Tokenizer, TokenStream
from tiny_gguf import sentencepiece_vocabulary, write_tiny_gguf
from tiny_models import write_tiny_tokenizer

CHAT = [{"role": "user", "content": "What is 12 + 3?"}, {"role": "assistant", "content": "15"}]


@pytest.fixture
def directory(tmp_path):
    """A fresh directory with a byte-level tokenizer."""
    write_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Both kinds of tokenizer, and transformers' own for the same files."""
    byte_level = tmp_path_factory.mktemp("byte_level")
    write_tiny_tokenizer(byte_level)
    source = tmp_path_factory.mktemp("sentencepiece")
    write_tiny_gguf(source / "model.gguf", vocabulary=sentencepiece_vocabulary())
    convert_gguf(source / "model.gguf", source / "out")
    directories = {"byte-level": byte_level, "sentencepiece": source / "out"}
    return {name: (Tokenizer(path), AutoTokenizer.from_pretrained(path)) for name, path in directories.items()}


def configure(directory, **changes):
    """Change tokenizer_config.json and load."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return Tokenizer(directory)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("hello ab 12\n<|>", max_size=40))
def test_ids_and_text_are_those_of_transformers(loaded, kind, text):
    ours, theirs = loaded[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(data=st.data(), skip=st.booleans())
def test_a_stream_of_any_ids_joins_to_their_text(loaded, kind, data, skip):
    tokenizer, _ = loaded[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    stream = tokenizer.new_stream(skip_special_tokens=skip)
    assert "".join([stream.step(token_id) for token_id in ids]) + stream.flush() == tokenizer.decode(ids, skip)


def test_a_step_looks_at_one_token_only(loaded):
    class Counting(dict):
        lookups = 0

        def get(self, key, default=None):
            Counting.lookups += 1
            return super().get(key, default)

    tokenizer, _ = loaded["byte-level"]
    ids = tokenizer.encode("ça marche. " * 50)
    stream = TokenStream(Counting(tokenizer._tokens), frozenset(), tokenizer._steps)
    assert "".join(map(stream.step, ids)) == "ça marche. " * 50
    assert Counting.lookups == len(ids)


def test_special_tokens_are_skipped_only_when_asked(loaded):
    tokenizer, _ = loaded["byte-level"]
    ids = tokenizer.encode("<|im_start|>ab<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>ab<|im_end|>"


def test_ids_without_a_token_are_no_text(loaded):
    tokenizer, _ = loaded["byte-level"]
    assert tokenizer.decode([-1, *tokenizer.encode("ab"), tokenizer.vocab_size, 2**70]) == "ab"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""


def test_text_of_one_token_keeps_its_space_and_shows_special_tokens(loaded):
    for kind in ("byte-level", "sentencepiece"):
        tokenizer, _ = loaded[kind]
        text = "a hello" if kind == "sentencepiece" else "a token"
        assert "".join(map(tokenizer.token_text, tokenizer.encode(text, add_special_tokens=False))).strip() == text
        assert tokenizer.token_text(tokenizer.encode(text)[-1])[0] == " "
        assert tokenizer.token_text(1) in ("<|im_start|>", "<s>")


def test_chats_are_encoded_as_transformers_does(loaded):
    ours, theirs = loaded["byte-level"]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    continued = ours.render_chat(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("assistant\n15")


def test_the_template_sees_special_tokens_and_further_arguments(directory):
    tokenizer = configure(directory, chat_template="{{ bos_token }}{{ mood }}{{ messages[0]['content'] }}{{ tools }}")
    assert tokenizer.render_chat([{"role": "user", "content": "a", "tool_calls": None}], mood="glad") == (
        "<|im_start|>gladaNone"
    )


def test_a_template_comes_from_its_own_file_or_from_a_list(directory):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = configure(directory, chat_template=named)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"type": "function"}]) == "tools"
    (directory / "chat_template.jinja").write_text("from the file")
    assert Tokenizer(directory).render_chat(CHAT) == "from the file"


def test_a_chat_without_a_template_is_refused(directory):
    tokenizer = configure(directory, chat_template=None)
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "arguments", "mentioned"),
    [
        ([], {}, "messages is"),
        (["hello"], {}, "messages is"),
        ([{"content": "no role"}], {}, "do not fit"),
        ([{"role": "bad", "content": "a"}], {}, "roles must alternate"),
        (CHAT, {"continue_final_message": True}, "add_generation_prompt=False"),
    ],
)
def test_messages_that_do_not_fit_are_refused(directory, messages, arguments, mentioned):
    template = (
        "{% if messages[0].role == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ messages[0].role + messages[0].content }}"
    )
    tokenizer = configure(directory, chat_template=template)
    with pytest.raises(ValueError, match=mentioned):
        tokenizer.apply_chat_template(messages, **arguments)


def test_tokenizer_json_alone_decides_about_bos_as_in_transformers(directory):
    tokenizer = configure(directory, add_bos_token=True)
    assert tokenizer.encode("ab") == AutoTokenizer.from_pretrained(directory).encode("ab")
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = configure(directory, add_bos_token=False)
    assert tokenizer.encode("ab") == AutoTokenizer.from_pretrained(directory).encode("ab")
    assert tokenizer.encode("ab") == [1, *tokenizer.encode("ab", add_special_tokens=False)]


def test_tokens_that_only_the_configuration_lists_are_added(directory):
    size = Tokenizer(directory).vocab_size
    listed = {
        str(size): {"content": "<extra>", "special": True},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    tokenizer = configure(directory, added_tokens_decoder=listed, additional_special_tokens=["<nowhere>"])
    assert tokenizer.encode("<extra><plain>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<plain>"
    assert tokenizer.vocab_size == size + 2
    with pytest.raises(ModelError, match="'<extra>' has id 7"):
        configure(directory, added_tokens_decoder={"7": {"content": "<extra>", "special": True}})


def test_end_ids_come_from_the_generation_config_and_the_model_config(directory):
    assert Tokenizer(directory).eos_token_ids == (2,)
    (directory / "config.json").write_text('{"eos_token_id": 7}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 0]}')
    assert Tokenizer(directory).eos_token_ids == (0, 7, 9)
    (directory / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelError, match="eos_token_id is 'two'"):
        Tokenizer(directory)


def test_text_that_is_not_unicode_is_refused(loaded):
    with pytest.raises(ValueError, match=r"lone surrogate .* at 1"):
        loaded["byte-level"][0].encode("a\ud800b")


def test_truncation_and_padding_of_the_file_do_not_apply(directory):
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("seven days in a week")) == "seven days in a week"


def test_a_directory_without_tokenizer_json_is_converted_by_transformers(directory):
    document = json.loads((directory / "tokenizer.json").read_text())
    expected = Tokenizer(directory).encode("seven days")
    (directory / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    merges = [" ".join(merge) for merge in document["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (directory / "tokenizer.json").unlink()
    assert configure(directory, tokenizer_class="GPT2Tokenizer").encode("seven days") == expected


def test_unusable_files_are_refused_by_name(directory, tmp_path_factory):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path_factory.mktemp("empty"))
    backend = Backend(models.BPE())
    backend.save(str(directory / "tokenizer.json"))
    document = json.loads((directory / "tokenizer.json").read_text())
    document["decoder"] = {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder: .*CTC"):
        Tokenizer(directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: holds list"):
        Tokenizer(directory)


def test_encoding_and_decoding_do_not_import_transformers(directory):
    program = (
        "import sys; from llm42.model.tokenizer import Tokenizer; t = Tokenizer(sys.argv[1]); "
        "assert t.decode(t.encode('ab')) == 'ab'; print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
