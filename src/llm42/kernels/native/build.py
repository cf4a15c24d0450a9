"""Building the native library: once for each combination of sources, compiler, flags, processor and torch.

The library's OpenMP symbols are left to the copy that torch has loaded, so that there is one pool of threads in the
process. Invariant: a file in the cache is whole; its name says everything it was built from.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

from llm42.paths import cache_dir

SOURCES = Path(__file__).parent / "src"
# No contraction and no fast-math: the order of operations is what the sources say.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fopenmp", "-fPIC")
# GNU only: the OpenMP library that torch brings has the entry points of GCC and not those of clang.
_COMPILERS = ("g++", "c++")
_TIMEOUT_S = 600


class NativeBuildError(Exception):
    """The native library cannot be built or loaded here; the message says why."""


def target_flags() -> tuple[str, ...]:
    """The flags that select this machine's instructions."""
    return ("-mcpu=native",) if platform.machine() in {"aarch64", "arm64"} else ("-march=native",)


def load_library(flags: Sequence[str] | None = None) -> ctypes.CDLL:
    """The library, built first if the cache does not have it.

    Args:
        flags: Instruction set flags instead of `target_flags()`.

    Raises:
        NativeBuildError: There is no compiler, or it failed, or the cache cannot be written.
    """
    path = build_library(target_flags() if flags is None else tuple(flags))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path.name} does not load: {error}") from error


def build_library(flags: tuple[str, ...]) -> Path:
    """Path of the shared library for these instruction set flags."""
    if sys.platform != "linux":
        raise NativeBuildError(f"native kernels are built on Linux only, not on {sys.platform}")
    compiler = _find_compiler()
    folder = cache_dir() / "native"
    path = folder / f"llm42-{_build_key(compiler, flags)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    _build(compiler, flags, path)
    except OSError as error:
        raise NativeBuildError(f"{folder} cannot be written: {error}; set LLM42_CACHE to another directory") from error
    return path


def sources_digest() -> str:
    """SHA-256 over the sources, for the contract."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def compiler_version() -> str:
    """The first line of what the compiler says about itself."""
    return _output([_find_compiler(), "--version"]).splitlines()[0]


def _find_compiler() -> str:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS
    for name in candidates:
        if (path := shutil.which(name)) is not None:
            return path
    raise NativeBuildError(f"no C++ compiler found ({', '.join(candidates)}); install g++")


def target_digest(flags: tuple[str, ...]) -> str:
    """A short hash of all that the compiler predefines: what ``-march=native`` stands for on this machine."""
    macros = _output([_find_compiler(), *flags, "-E", "-dM", "-x", "c++", os.devnull])
    return hashlib.sha256(macros.encode()).hexdigest()[:16]


def _build_key(compiler: str, flags: tuple[str, ...]) -> str:
    parts = [
        sources_digest(),
        _output([compiler, "--version"]),
        repr(FLAGS + flags),
        # A home directory may be shared between machines.
        target_digest(flags),
        torch.__version__,
        _torch_lib(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _torch_lib() -> str:
    return str(Path(torch.__file__).parent / "lib")


def _build(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    started = time.monotonic()
    sys.stderr.write("Building native kernels (once on this machine, about 10 seconds) ...\n")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))]
        commands = [
            [compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{item.stem}.cpp"), "-o", str(item)] for item in objects
        ]
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            list(workers.map(_output, commands))
        library = Path(scratch) / target.name
        # Linked against libtorch_cpu for the sake of the OpenMP library that it brings.
        torch_cpu = [f"-L{_torch_lib()}", "-Wl,--no-as-needed", "-ltorch_cpu", f"-Wl,-rpath,{_torch_lib()}"]
        _output([compiler, "-shared", "-o", str(library), *map(str, objects), *torch_cpu])
        library.replace(target)
    sys.stderr.write(f"Native kernels built in {time.monotonic() - started:.0f} s.\n")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if "error" in line] or lines
        raise NativeBuildError(f"{Path(command[0]).name} failed: {errors[0]}")
    return done.stdout
