"""The command line as a user meets it: help that needs no manual, and bad values that name their field."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from llm42 import __version__
from llm42.cli import app
from llm42.cli.chat import chat
from llm42.cli.demo import demo
from llm42.cli.doctor import doctor
from llm42.cli.pull import pull
from llm42.cli.run import run

COMMANDS = {"run": run, "chat": chat, "pull": pull, "demo": demo, "doctor": doctor}
WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, list(arguments), input=stdin, env=WIDE)


def test_help_names_every_command_and_gives_examples():
    text = invoke("--help").output
    assert all(name in text for name in (*COMMANDS, "bench"))
    assert 'llm42 run smollm2-135m-instruct "Why is the sky blue?"' in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_every_option(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    other_names = {"model": "MODEL", "prompt": "PROMPT", "name": "NAME", "show_list": "--list", "as_json": "--json"}
    other_names["target"] = "MODEL|URL"
    for parameter in inspect.signature(COMMANDS[name]).parameters:
        option = f"--{parameter.replace('_', '-')}"
        assert option in result.output or other_names[parameter] in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_explained(name):
    lines = invoke(name, "--help").output.splitlines()
    options = [line for line in lines if line.strip(" │|").startswith("--")]
    assert options
    for line in options:
        words = [word for word in line.strip(" │|").split() if not word.startswith(("-", "<"))]
        assert len(words) >= 3, line


def test_help_starts_without_importing_torch():
    code = (
        "import sys, llm42.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(llm42.cli.app, ['run', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_python_dash_m_is_the_command_line():
    result = subprocess.run([sys.executable, "-m", "llm42", "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"llm42 {__version__}\n")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--top-k", "-2", "top_k"),
        ("--min-p", "1.5", "min_p"),
        ("--seed", str(2**64), "seed"),
        ("--max-tokens", "0", "max_tokens"),
        ("--repetition-penalty", "0", "repetition_penalty"),
        ("--stop", "", "stop"),
        ("--mode", "fast", "mode"),
        ("--kernels", "cuda", "kernels"),
        ("--dtype", "int8", "dtype"),
        ("--window-size", "0", "window_size"),
        ("--verify-batch-size", "0", "verify_batch_size"),
        ("--num-threads", "0", "num_threads"),
        ("--max-model-len", "0", "max_model_len"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_field_before_a_model_is_looked_for(option, value, field):
    result = invoke("run", "no-such-model", "hello", option, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {field} ")
    assert result.stderr.count("\n") == 1
    assert "no-such-model" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "value"), [("--kv-cache-bytes", "2X"), ("--seed", "abc"), ("--top-k", "1.5"), ("--no-such-option", "1")]
)
def test_a_value_of_the_wrong_form_names_the_option(option, value):
    result = invoke("run", "no-such-model", "hello", option, value)
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no-such-model", ""], "prompt is empty"),
        (["run", "no-such-model", "-"], "prompt is empty"),
        (["demo", "--prompts", "0"], "prompts is 0"),
        (["demo", "--prompts", "17"], "prompts is 17"),
        (["demo", "--batch", "8"], "batch is 8"),
        (["demo", "--max-tokens", "0"], "max_tokens is 0"),
        (["demo", "--dtype", "int8"], "dtype must be"),
        (["pull"], "name is missing"),
        (["chat", "no-such-model"], "stdin is empty"),
    ],
)
def test_bad_input_of_a_command_exits_with_2_and_says_why(arguments, message):
    result = invoke(*arguments, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1", "--mode", "auto"], "--mode is for a model in this process"),
        (["no-such-model", "--api-key-file", "keys"], "--api-key-file is for a server"),
        (["http://127.0.0.1:1", "--api-key", "a", "--api-key-file", "keys"], "--api-key and --api-key-file"),
        (["http://127.0.0.1:1", "--api-key-file", "no-such-file"], "api_key_file no-such-file"),
        (["no-such-model", "--temperature", "-1"], "temperature must be"),
    ],
)
def test_an_option_of_a_chat_that_does_not_fit_is_bad_input(arguments, message):
    result = invoke("chat", *arguments, stdin="Hi")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_debug_shows_the_traceback():
    result = invoke("run", "no-such-model", "hello", "--top-p", "0", "--debug")
    assert isinstance(result.exception, ValueError)
