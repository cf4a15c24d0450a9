"""Make .venv in the repository root and install the project into it. Standard library only, idempotent.

Invariant: the stamp file inside .venv exists only while the environment holds what pyproject.toml asks for; it is
removed before anything is changed and written last. It holds a hash of everything the environment was made from, so
that an up-to-date environment costs one file read. A file lock lets two terminals start at once.

The user's pip configuration (index, mirrors, wheel folders, proxies) is used as it is. On Linux the torch of the
default index is a CUDA build of several GB; an index or wheel folder of the user's own that offers a CPU build
("2.13.0+cpu") wins without further ado, because pip orders a local version above the plain one. To choose otherwise,
put pip arguments into LLM42_TORCH:

    LLM42_TORCH="torch==2.13.0 --index-url <an index with CPU builds>" scripts/demo
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "llm42-stamp"
LOG = VENV / "llm42-setup.log"
LOCK = ROOT / ".venv.lock"


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def say(message: str) -> None:
    print(f"[setup] {message}", file=sys.stderr, flush=True)


def fingerprint() -> str:
    """Hash of everything the environment depends on; the path counts because an editable install records it."""
    parts = [
        (ROOT / "pyproject.toml").read_bytes(),
        Path(__file__).read_bytes(),
        sys.version.encode(),
        os.fsencode(ROOT),
        os.environ.get("LLM42_TORCH", "").encode(),
    ]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def is_current() -> bool:
    """Whether .venv exists, was completed, and was made from what is here now."""
    try:
        return STAMP.read_text(encoding="utf-8") == fingerprint() and VENV_PYTHON.exists()
    except OSError:
        return False


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Hold the set-up lock; it is freed by the operating system even when the process is killed."""
    try:
        import fcntl  # noqa: PLC0415  (not on Windows, where the last one to start simply wins)
    except ImportError:
        yield
        return
    with LOCK.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another terminal is setting up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def venv_version() -> str | None:
    """sys.version of .venv's Python, or None where it does not run (its base may have been removed)."""
    command = [str(VENV_PYTHON), "-c", "import sys, pip; print(sys.version)"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def make_venv() -> None:
    """Create .venv, or replace one that is broken or belongs to another Python."""
    if venv_version() == sys.version:
        return
    try:
        import ensurepip  # noqa: F401, PLC0415
        import venv  # noqa: PLC0415
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} has no module {error.name!r}; on Debian and Ubuntu: apt install python{version}-venv. "
            "Or set PYTHON to another Python >= 3.10"
        ) from error
    say(f"creating {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
    if VENV.exists():
        shutil.rmtree(VENV)
    venv.create(VENV, with_pip=True, symlinks=True)


def progress_line(line: str) -> str | None:
    """The short form of one line of pip's output, or None where it is of no interest to somebody who waits."""
    words = line.split()
    if line.startswith("Installing collected packages:"):
        return f"installing {len(words) - 3} packages"
    if len(words) == 4 and words[0] == "Downloading" and words[3] in {"MB)", "GB)"}:
        name, version = words[1].rsplit("/", 1)[-1].split("-")[:2]
        return f"downloading {name} {version} {words[2]} {words[3]}"
    return None


def pip_install(arguments: list[str]) -> None:
    """Run pip in .venv with the user's configuration, a line per download; everything it says goes to the log."""
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_USER": "0"}  # a configured --user fails in any venv
    with LOG.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*pip, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for line in process.stdout or ():
            log.write(line)
            if short := progress_line(line):
                say(short)
        status = process.wait()
    if status != 0:
        tail = "".join(LOG.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
        raise SetupError(f"pip install {shlex.join(arguments)} failed with status {status}:\n{tail}(all of it: {LOG})")


def set_up() -> None:
    """Bring .venv up to date."""
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    make_venv()
    LOG.unlink(missing_ok=True)
    if torch := os.environ.get("LLM42_TORCH"):
        say(f"installing {torch}")
        pip_install(shlex.split(torch))
    say("installing llm42 and what it needs; several hundred MB where nothing is there yet")
    pip_install(["--editable", ".[dev]"])
    STAMP.write_text(fingerprint(), encoding="utf-8")
    say(f"ready after {time.monotonic() - started:.0f} s")


def main() -> int:
    """Set up when needed; returns the exit status."""
    if is_current():
        return 0
    try:
        with lock():
            if not is_current():  # another terminal may have done it while this one waited
                set_up()
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("cancelled; the next start continues")
        return 130
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
