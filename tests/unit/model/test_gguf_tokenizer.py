"""Tokenizers out of GGUF files: which ids a text gets, and that its bytes come back."""

from __future__ import annotations

import inspect
import itertools
import unicodedata

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from llm42.errors import ModelError
from llm42.model.gguf import convert_gguf
from llm42.model.gguf_tokenizer import PRE_TOKENIZERS, merges_from_scores
from llm42.model.tokenizer import Tokenizer
from tiny_gguf import Vocabulary, byte_level_vocabulary, sentencepiece_vocabulary, write_tiny_gguf

BYTE_LEVEL_NAMES = sorted(PRE_TOKENIZERS)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function from a vocabulary (and further keys) to the converted tokenizer."""

    def convert(vocabulary: Vocabulary, **keys) -> Tokenizer:
        directory = tmp_path_factory.mktemp("tokenizer")
        write_tiny_gguf(directory / "model.gguf", vocabulary=vocabulary, keys=keys)
        convert_gguf(directory / "model.gguf", directory / "out")
        return Tokenizer(directory / "out")

    return convert


@pytest.fixture(scope="module")
def byte_level(load):
    return {name: load(byte_level_vocabulary(name)) for name in BYTE_LEVEL_NAMES}


@pytest.fixture(scope="module")
def sentencepiece(load):
    return load(sentencepiece_vocabulary())


@pytest.fixture(scope="module")
def without_prefix(load):
    return load(sentencepiece_vocabulary(add_space_prefix=False))


def pieces(tokenizer, text):
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_smollm_splits_digits_one_by_one(byte_level):
    assert pieces(byte_level["smollm"], "ab 123") == ["ab", " ", "1", "2", "3"]


def test_gpt2_joins_digits_that_smollm_splits(byte_level):
    """The partner of the test above: the vocabulary does have the merged digits."""
    assert pieces(byte_level["gpt-2"], "ab 123") == ["ab", " ", "123"]


def test_llama3_takes_up_to_three_digits_and_qwen2_one(byte_level):
    assert pieces(byte_level["llama-bpe"], "1231") == ["123", "1"]
    assert pieces(byte_level["qwen2"], "1231") == ["1", "2", "3", "1"]
    assert pieces(byte_level["tekken"], "1231") == ["1", "2", "3", "1"]


def test_llama3_starts_with_bos_unless_the_file_says_otherwise(load, byte_level):
    assert byte_level["llama-bpe"].encode("a")[0] == 1
    assert byte_level["smollm"].encode("a")[0] != 1
    assert load(byte_level_vocabulary("llama-bpe", add_bos_token=False)).encode("a")[0] != 1
    assert load(byte_level_vocabulary("smollm", add_bos_token=True, add_eos_token=True)).encode("a")[::2] == [1, 2]


def test_a_file_without_a_pre_tokenizer_name_gets_the_default(load, byte_level):
    text = "it's 1234, ab!"
    assert load(byte_level_vocabulary(None)).encode(text) == byte_level["default"].encode(text)


def test_patterns_are_those_of_transformers():
    patterns = {name: PRE_TOKENIZERS[name].steps[0]["pattern"]["Regex"] for name in ("qwen2", "llama-bpe")}
    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    assert patterns == {"qwen2": PRETOKENIZE_REGEX, "llama-bpe": llama3}


def test_qwen2_composes_characters(byte_level):
    assert byte_level["qwen2"].decode(byte_level["qwen2"].encode("e\N{COMBINING ACUTE ACCENT}")) == "é"
    assert byte_level["smollm"].decode(byte_level["smollm"].encode("e\N{COMBINING ACUTE ACCENT}")) != "é"


@pytest.mark.parametrize("name", BYTE_LEVEL_NAMES)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab 12\n\t'sx<|>", max_size=30))
@settings(max_examples=40)
def test_byte_level_text_comes_back_exactly(byte_level, name, text):
    tokenizer = byte_level[name]
    text = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].normalizer else text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_text(byte_level):
    tokenizer = byte_level["smollm"]
    tool = tokenizer.vocab_size - 1
    ids = tokenizer.encode("<|im_start|>ab<tool><|im_end|>")
    assert (ids[0], ids[-2], ids[-1]) == (1, tool, 2)
    assert tokenizer.decode(ids) == "ab<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>ab<tool><|im_end|>"


def test_unused_tokens_are_no_text(load):
    vocabulary = byte_level_vocabulary()
    vocabulary.tokens.append("[PAD265]")
    vocabulary.types.append(int(TokenType.UNUSED))
    tokenizer = load(vocabulary)
    padding = len(vocabulary.tokens) - 1
    assert tokenizer.decode(tokenizer.encode("[PAD265]")) == "[PAD265]"
    assert padding not in tokenizer.encode("[PAD265]")
    assert tokenizer.decode([padding]) == ""


def test_chat_template_and_end_ids_are_carried_over(load):
    tokenizer = load(byte_level_vocabulary(eot_token_id=0))
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.bos_token_id == 1
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nab<|im_end|>\n"


def test_two_tokens_of_one_text_are_refused(load):
    vocabulary = byte_level_vocabulary()
    vocabulary.tokens[-1] = "ab"
    with pytest.raises(ModelError, match="'ab' twice"):
        load(vocabulary)


def test_sentencepiece_joins_the_best_scores_and_falls_back_to_bytes(sentencepiece):
    assert sentencepiece.encode("hello")[0] == 1
    assert pieces(sentencepiece, "hello") == [" hello"]
    assert pieces(sentencepiece, "hell a") == [" hell", " ", "a"]
    assert sentencepiece.encode("é", add_special_tokens=False)[1:] == [3 + 0xC3, 3 + 0xA9]


def test_sentencepiece_scores_decide_between_merges(load):
    scored = {"ab": -1.0, "bc": -2.0} | dict.fromkeys("abc▁", -9.0)
    swapped = scored | {"ab": -2.0, "bc": -1.0}
    assert pieces(load(sentencepiece_vocabulary(scored)), "abc")[1:] == ["ab", "c"]
    assert pieces(load(sentencepiece_vocabulary(swapped)), "abc")[1:] == ["a", "bc"]


@pytest.mark.parametrize("add_prefix", [True, False])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")) | st.text("helo ab", max_size=20))
def test_sentencepiece_text_comes_back_exactly(sentencepiece, without_prefix, add_prefix, text):
    tokenizer = sentencepiece if add_prefix else without_prefix
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_space_is_put_in_front_only_where_the_file_wants_it(sentencepiece, without_prefix):
    assert pieces(sentencepiece, "ll")[0] == " "
    assert pieces(without_prefix, "ll") == ["ll"]


def reference_pieces(text, scores):
    """SentencePiece's rule: join the neighbours whose union scores best (of equals, the longer left), and again."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[left + right], -len(left), index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        index = min(pairs)[-1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@given(
    words=st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=12),
    texts=st.lists(st.text("ab▁", min_size=1, max_size=20), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_merges_from_scores_tokenize_as_sentencepiece_does(words, texts, order):
    tokens = [*"ab▁", *words]
    order.shuffle(tokens)
    scores = {token: -float(rank) for rank, token in enumerate(tokens)}
    merges = merges_from_scores(tokens, [TokenType.NORMAL] * len(tokens), list(scores.values()))
    model = models.BPE({token: rank for rank, token in enumerate(tokens)}, [tuple(merge) for merge in merges])
    for text in texts:
        assert [token.value for token in model.tokenize(text)] == reference_pieces(text, scores)


@pytest.mark.parametrize(
    ("field", "value", "mentioned"),
    [
        ("scores", None, "tokenizer.ggml.scores is missing"),
        ("scores", [0.0], "tokenizer.ggml.scores has 1 entries"),
        ("tokens", ["<unk>", "<s>", "</s>"], "lacks the byte token <0x00>"),
    ],
)
def test_an_incomplete_sentencepiece_vocabulary_is_refused_by_key(load, field, value, mentioned):
    vocabulary = sentencepiece_vocabulary()
    setattr(vocabulary, field, value)
    if field == "tokens":
        vocabulary.types, vocabulary.scores = vocabulary.types[:3], vocabulary.scores[:3]
    with pytest.raises(ModelError, match=mentioned):
        load(vocabulary)
