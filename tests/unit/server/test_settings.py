"""`ServerSettings`: what cannot be meant is refused by name; and files of keys."""

from __future__ import annotations

import math

import pytest

from llm42.server.settings import ServerSettings, read_api_keys


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_names", ()),
        ("model_names", ("",)),
        ("api_keys", ("",)),
        ("api_keys", ("good", " spaces ")),
        ("api_keys", ("line\nbreak",)),
        ("cors_origins", ("page.example",)),
        ("cors_origins", ("https://page.example/",)),
        ("max_body_size", 1023),
        *[(name, value) for name in ("body_timeout_s", "request_timeout_s", "keep_alive_s")
          for value in (0, -1, math.inf, math.nan)],
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        ServerSettings(**{"model_names": ("tiny",), field: value})


def test_origins_and_keys_that_browsers_and_clients_send_are_accepted():
    origins = ("*", "http://localhost:3000", "https://page.example")
    settings = ServerSettings(model_names=("tiny",), cors_origins=origins, api_keys=("a b", "schlüssel"))
    assert settings.cors_origins == origins


def test_keys_are_read_one_a_line_without_comments(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the lab\nfirst\n\n  second key  \r\n#no\nschlüssel", encoding="utf-8")
    assert read_api_keys(file) == ("first", "second key", "schlüssel")


@pytest.mark.parametrize("content", [b"", b"# only\n\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_refused_by_name(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"api_key_file .*keys"):
        read_api_keys(file)


def test_a_file_of_keys_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"api_key_file .*nothing"):
        read_api_keys(tmp_path / "nothing")
