"""Streaming decoding of token strings against the `tokenizers` decoders that it mirrors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llm42.model.token_decoder import TokenDecoder, build_steps, byte_level_alphabet
from tiny_gguf import byte_alphabet

BYTES = byte_alphabet()
BYTE_LEVEL_TOKENS = st.one_of(
    st.sampled_from([BYTES[byte] for byte in b"A \x80\xbf\xc0\xc2\xe0\xe2\x82\xac\xed\xa0\xf0\x9f\x98\xf4\x90\xff"]),
    st.binary(max_size=5).map(lambda raw: "".join(BYTES[byte] for byte in raw)),
    st.sampled_from(["Ġx", "ðŁĺĢ", "ðŁ", "a b", "€", "<|end|>"]),
)
PIECES = st.one_of(
    st.sampled_from([f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]),
    st.sampled_from(["▁", "▁a", "b▁", "x", " ", "  ", "▁▁x", "a▁▁b", "<0xff>", "<0x1>", "<s>"]),
)
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "byte-level": (decoders.ByteLevel(), BYTE_LEVEL_TOKENS),
    "llama": (decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), PIECES),
    "llama without prefix": (decoders.Sequence(LLAMA), PIECES),
    "two spaces stripped": (decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]), PIECES),
    "metaspace": (decoders.Metaspace(), PIECES),
    "metaspace, first": (decoders.Metaspace(prepend_scheme="first"), PIECES),
    "metaspace, never": (decoders.Metaspace(prepend_scheme="never"), PIECES),
    "bytes, then metaspace": (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), PIECES),
}


def steps_of(decoder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoder
    return build_steps(json.loads(tokenizer.to_str())["decoder"])


def stream(steps, tokens):
    decoder = TokenDecoder(steps)
    return [*(decoder.step(token) for token in tokens), decoder.flush()]


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
@settings(max_examples=50)
def test_a_stream_joins_to_the_text_of_the_whole(name, data):
    decoder, tokens = DECODERS[name]
    sequence = data.draw(st.lists(tokens, max_size=12))
    assert "".join(stream(steps_of(decoder), sequence)) == decoder.decode(sequence)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
@settings(max_examples=50)
def test_what_was_streamed_is_never_taken_back(name, data):
    """Text given after some tokens begins the text of every continuation, so it can be sent at once."""
    decoder, tokens = DECODERS[name]
    sequence, more = data.draw(st.lists(tokens, max_size=8)), data.draw(st.lists(tokens, max_size=8))
    given_so_far = "".join(stream(steps_of(decoder), sequence)[:-1])
    assert decoder.decode(sequence + more).startswith(given_so_far)


def test_decoding_token_by_token_would_take_text_back():
    """The partner of the test above: without holding back, the pieces do not join to the text."""
    decoder, tokens = decoders.ByteLevel(), ["ðŁ", "ĺ", "Ģ"]
    assert decoder.decode(tokens) == "😀"
    assert "".join(decoder.decode([token]) for token in tokens) != "😀"


def test_a_character_comes_with_its_last_byte():
    assert stream(steps_of(decoders.ByteLevel()), ["a", "ðŁ", "ĺ", "Ģ", "b"]) == ["a", "", "", "😀", "b", ""]


def test_an_incomplete_character_at_the_end_is_flushed_as_a_replacement():
    assert stream(steps_of(decoders.ByteLevel()), ["a", "ðŁ"]) == ["a", "", "\ufffd"]


def test_a_run_of_byte_tokens_comes_with_the_token_after_it():
    run = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    steps = steps_of(DECODERS["llama"][0])
    assert stream(steps, ["▁a", *run, "b"]) == ["a", "", "", "", "", "😀b", ""]
    assert stream(steps, [*run, "<0xFF>", "b"])[-2] == "\ufffd" * 5 + "b"


def test_without_a_decoder_tokens_are_separated_by_spaces():
    assert "".join(stream(build_steps(None), ["a", "b"])) == "a b"


def test_the_byte_alphabet_is_that_of_the_library():
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert list(map(byte_level_alphabet().get, BYTES)) == list(range(256))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder):
    with pytest.raises(ValueError, match="is not supported"):
        steps_of(decoder)
