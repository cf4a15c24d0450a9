"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.cli.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("512m", 512 * 2**20),
        ("2G", 2 * 2**30),
        ("2 GB", 2 * 2**30),
        ("2GiB", 2 * 2**30),
        ("1.5K", 1536),
        ("1T", 2**40),
        (" 16K ", 16384),
        ("100B", 100),
    ],
)
def test_size_is_a_number_of_bytes_with_a_binary_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "0", "0.1", "-1G", "1e9", "12X", "1GG", "inf", "nan", "2 G i B", "٣M"])
def test_what_is_not_a_positive_size_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="is not a size") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@given(st.integers(1, 2**53))
def test_a_plain_number_of_bytes_is_taken_exactly(size):
    assert parse_size(str(size)) == size


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB")])
def test_a_size_is_shown_in_its_largest_whole_unit(size, text):
    assert format_size(size) == text
