"""How commands fail: one line and an exit status, or the whole traceback where that is wanted."""

from __future__ import annotations

import pytest
import typer

from llm42.cli.errors import reported
from llm42.errors import ModelError, RequestError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("top_p is 0"), 2),
        (ModelError("config.json is missing"), 2),
        (RequestError("pass failed"), 1),
        (OSError("disk is full"), 1),
    ],
)
def test_an_expected_error_is_one_line_with_its_exit_status(error, status, capsys):
    with pytest.raises(typer.Exit) as raised, reported(debug=False):
        raise error
    assert raised.value.exit_code == status
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


def test_a_long_message_of_several_lines_stays_one_line(capsys):
    with pytest.raises(typer.Exit), reported(debug=False):
        raise ValueError("many\n  words " + "x" * 300)
    assert capsys.readouterr().err == "error: many words " + "x" * 300 + "\n"


def test_text_in_brackets_survives(capsys):
    with pytest.raises(typer.Exit), reported(debug=False):
        raise ValueError("shape [1, 2] [bold]")
    assert "shape [1, 2] [bold]" in capsys.readouterr().err


def test_debug_keeps_the_error():
    with pytest.raises(ValueError, match="top_p"), reported(debug=True):
        raise ValueError("top_p is 0")


def test_a_bug_keeps_its_traceback_always():
    with pytest.raises(ZeroDivisionError), reported(debug=False):
        _ = 1 / 0


@pytest.mark.parametrize("debug", [True, False])
def test_ctrl_c_exits_with_130(debug, capsys):
    with pytest.raises(typer.Exit) as raised, reported(debug=debug):
        raise KeyboardInterrupt
    assert raised.value.exit_code == 130
    assert capsys.readouterr().err == "cancelled\n"
