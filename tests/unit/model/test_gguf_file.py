"""Reading GGUF files that are cut, damaged, or no GGUF files at all."""

from __future__ import annotations

import struct

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm42.errors import ModelError
from llm42.model.gguf import convert_gguf, stale_partials
from tiny_gguf import refusal_of, write_tiny_gguf


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else altogether")
    assert "not a GGUF file" in refusal_of(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    assert "version 1" in refusal_of(path)
    path.write_bytes(b"")
    assert "truncated" in refusal_of(path)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        convert_gguf(path, tmp_path / "out")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The bytes of a small valid file."""
    path = tmp_path_factory.mktemp("intact") / "model.gguf"
    write_tiny_gguf(path, matrix_type=Type.Q8_0)
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused_and_nothing_is_written(intact, tmp_path, data):
    header = intact.index(b"blk.1.ffn_up.weight")
    length = data.draw(st.integers(0, header) | st.integers(0, len(intact) - 1))
    path = tmp_path / "model.gguf"
    path.write_bytes(intact[:length])
    refusal_of(path)


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_byte_is_refused_or_harmless_but_never_a_crash(intact, tmp_path, data):
    header = intact.index(b"blk.1.ffn_up.weight")
    position, value = data.draw(st.integers(4, header)), data.draw(st.integers(0, 255))
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    path.write_bytes(intact[:position] + bytes([value]) + intact[position + 1 :])
    try:
        convert_gguf(path, out)
    except ModelError:
        assert not out.exists()
    else:
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
    assert stale_partials(out) == []
