"""Building the native library: what is cached under which name, what happens when it fails, and whose threads it uses.

Most builds here are of one small function by the real compiler, or by a script that plays a compiler.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llm42.kernels import NativeBuildError, NativeKernels, PortableKernels, create_kernels
from llm42.kernels.native import backend, build

FLAGS = ("-O1",)
SOURCE = 'extern "C" __attribute__((visibility("default"))) int llm42_answer() { return 42; }\n'
# Writes its output in two halves, so that a reader who does not wait finds one of them.
PRETENCE = """
previous=""
for argument in "$@"; do [ "$previous" = "-o" ] && output="$argument"; previous="$argument"; done
printf 'first half, ' > "$output"
sleep 0.2
printf 'last half' >> "$output"
"""
FAILURE = """
echo 'In file included from somewhere:' >&2
echo 'simd.h:7:1: error: what is this' >&2
echo 'simd.h:9:1: error: and this' >&2
exit 1
"""


class Compiler:
    """A script in CXX that writes down how it is called and then does as it was told."""

    def __init__(self, folder: Path) -> None:
        self._path, self._log = folder / "c++", folder / "calls"
        self._log.touch()

    def does(self, body: str, *, version: str = "compiler 1", macros: str = "#define __AVX2__") -> Compiler:
        self._path.write_text(
            "#!/bin/sh\n"
            f"printf '%s\\n' \"$*\" >> '{self._log}'\n"
            f"case \"$*\" in *--version) echo '{version}'; exit ;; *-dM*) echo '{macros}'; exit ;; esac\n"
            f"{body}"
        )
        self._path.chmod(0o755)
        return self

    def count(self, flag: str) -> int:
        return sum(f" {flag} " in f" {line} " for line in self._log.read_text().splitlines())

    @property
    def compiled(self) -> int:
        return self.count("-c")

    @property
    def linked(self) -> int:
        return self.count("-shared")


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Compiler:
    """A compiler of one's own, a cache of one's own, and one small source."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(backend, "_library", backend._library.__wrapped__)
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(sys, "platform", "linux")
    return Compiler(tmp_path)


def files(tmp_path) -> list[str]:
    """What lies in the cache, locks apart."""
    return sorted(path.name for path in (tmp_path / "cache" / "native").iterdir() if path.suffix != ".lock")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++")
def test_the_second_load_does_not_compile(compiler, tmp_path):
    compiler.does('exec g++ "$@"\n')
    assert build.load_library(FLAGS).llm42_answer() == 42
    assert (compiler.compiled, compiler.linked) == (1, 1)
    assert len(files(tmp_path)) == 1
    compiler.does(FAILURE)
    assert build.load_library(FLAGS).llm42_answer() == 42
    assert (compiler.compiled, compiler.linked) == (1, 1)
    with pytest.raises(NativeBuildError):
        build.load_library(("-O2",))


def test_whatever_may_change_the_library_changes_its_name(compiler, tmp_path, monkeypatch):
    compiler.does(PRETENCE.replace("sleep 0.2", ""))
    names = [build.build_library(FLAGS)]
    names.append(build.build_library(("-O2",)))
    (tmp_path / "src" / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    names.append(build.build_library(FLAGS))
    (tmp_path / "src" / "simd.h").write_text("")
    names.append(build.build_library(FLAGS))
    compiler.does(PRETENCE, version="compiler 2")
    names.append(build.build_library(FLAGS))
    compiler.does(PRETENCE, version="compiler 2", macros="#define __AVX512F__")
    names.append(build.build_library(FLAGS))
    monkeypatch.setattr(build.torch, "__version__", "99.0")
    names.append(build.build_library(FLAGS))
    assert len(set(names)) == 7
    assert files(tmp_path) == sorted(name.name for name in names)
    assert build.build_library(FLAGS) == names[-1]
    assert compiler.linked == 7


def build_at_once(compiler, *, builders: int = 4) -> list[str]:
    """What each of several builders, starting together, finds in the file that it is given."""
    compiler.does(PRETENCE)
    start = threading.Barrier(builders)

    def build_and_read(_):
        start.wait()
        return build.build_library(FLAGS).read_text()

    with ThreadPoolExecutor(builders) as pool:
        return list(pool.map(build_and_read, range(builders)))


def test_concurrent_builders_build_once_and_end_with_one_whole_file(compiler, tmp_path):
    """Each has a lock of its own on the file, as processes have."""
    assert build_at_once(compiler) == ["first half, last half"] * 4
    assert (compiler.compiled, compiler.linked) == (1, 1)
    assert len(files(tmp_path)) == 1


def test_builders_that_do_not_wait_for_each_other_are_noticed(compiler, tmp_path, monkeypatch):
    """The partner. Even so, each finds a whole file: it is complete before it gets its name."""
    monkeypatch.setattr(build, "FileLock", lambda _: contextlib.nullcontext())
    assert build_at_once(compiler) == ["first half, last half"] * 4
    assert compiler.linked > 1
    assert len(files(tmp_path)) == 1


def test_a_compiler_that_fails_is_quoted_by_its_first_error_and_leaves_nothing(compiler, tmp_path):
    compiler.does(FAILURE)
    with pytest.raises(NativeBuildError, match=r"^c\+\+ failed: simd.h:7:1: error: what is this$"):
        build.build_library(FLAGS)
    assert files(tmp_path) == []
    compiler.does(PRETENCE)
    build.build_library(FLAGS)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("stage", ["-c", "-shared"])
def test_a_build_that_breaks_off_halfway_leaves_nothing(compiler, tmp_path, stage):
    compiler.does(f'{PRETENCE}case " $* " in *" {stage} "*) exit 1 ;; esac\n')
    with pytest.raises(NativeBuildError, match=r"^c\+\+ failed: exit status 1$"):
        build.build_library(FLAGS)
    assert compiler.count(stage) == 1
    assert files(tmp_path) == []


def test_a_library_that_does_not_load_is_a_build_error(compiler):
    compiler.does(PRETENCE)
    with pytest.raises(NativeBuildError, match=r"llm42-\w+\.so does not load: .*"):
        build.load_library(FLAGS)


def test_a_cache_that_cannot_be_written_is_a_build_error_with_a_remedy(compiler, tmp_path, monkeypatch):
    compiler.does(PRETENCE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLM42_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(NativeBuildError, match=r"cannot be written: .*set LLM42_CACHE"):
        build.build_library(FLAGS)


def test_other_systems_are_named(compiler, monkeypatch):
    compiler.does(PRETENCE)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(NativeBuildError, match="on Linux only, not on win32"):
        build.build_library(FLAGS)


@pytest.mark.parametrize("cxx", ["", "nosuch++"])
def test_without_a_compiler_the_error_says_what_to_install(compiler, monkeypatch, tmp_path, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError) as caught:
        build.build_library(FLAGS)
    assert f"no C++ compiler found ({cxx or 'g++, c++'}); install g++" in str(caught.value)
    assert compiler.compiled == 0


def test_auto_takes_the_portable_kernels_with_one_warning_and_native_is_an_error(compiler, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "nosuch++")
    with caplog.at_level(logging.WARNING):
        kernels = create_kernels("auto")
    assert type(kernels) is PortableKernels
    assert len(caplog.records) == 1
    assert "portable" in caplog.text
    assert "no C++ compiler found (nosuch++)" in caplog.text
    with pytest.raises(ValueError, match=r"'native' cannot be used here: no C\+\+ .*; choose 'auto' or 'portable'"):
        create_kernels("native")
    assert len(caplog.records) == 1
    compiler.does(FAILURE)
    monkeypatch.setenv("CXX", str(compiler._path))
    with pytest.raises(ValueError, match="error: what is this"):
        create_kernels("native")


def test_auto_takes_the_native_kernels_where_they_can_be_built(native):
    assert type(create_kernels("auto")) is type(native) is NativeKernels
    assert create_kernels("auto").versions() == NativeKernels().versions()


def test_the_versions_tell_flags_and_sources_apart(any_native, native):
    versions = any_native.versions()
    assert versions["kernels"] == "native"
    assert versions["sources"] == build.sources_digest()
    assert (versions == native.versions()) == (any_native._flags == native._flags)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 instruction set")
def test_the_library_compiles_for_processors_with_512_bit_vectors(native):
    flags = ("-march=sapphirerapids", "-O0")  # what the compiler makes of it is not run, so it need not be good
    try:
        build._output([build._find_compiler(), *flags, "-E", "-x", "c++", "/dev/null"])
    except NativeBuildError as error:
        pytest.skip(f"the compiler is too old: {error}")
    path = build.build_library(flags)
    assert path.stat().st_size > 0
    assert path != build.build_library(native._flags)


THREADS = """
import os, re, sys, torch
from pathlib import Path
from llm42.kernels import NativeKernels

def pools():
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"\\S*/lib(?:g|i|)omp[^/\\s]*\\.so\\S*", maps)))

def tasks():
    return len(os.listdir("/proc/self/task"))

before = pools()
kernels = NativeKernels(linears="own")
linear = kernels.prepare_linear(torch.ones(512, 64))
print(before, pools())
torch.set_num_threads(1)
x = torch.ones(64, 64)
kernels.linear(x, linear)
alone = tasks()
torch.set_num_threads(2)
kernels.linear(x, linear)
print(tasks() - alone)
torch.ones(1 << 20).add_(1.0)
print(tasks() - alone)
"""


def test_threads_are_those_of_torchs_own_pool(native):  # noqa: ARG001 - built before it is timed
    """One OpenMP library in the process; the thread that the kernels start is the one that torch then uses."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=120)
    pools, first, second = done.stdout.splitlines()
    before, after = (part.strip("[] ") for part in pools.split("] ["))
    assert before == after
    assert len(before.split(", ")) == 1
    assert "omp" in before
    assert (first, second) == ("1", "1")


EXHAUSTION = """
import resource, torch
from llm42.kernels import NativeKernels

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
kernels = NativeKernels(linears="own")
packed = kernels.prepare_linear(torch.ones(16, 64)).weight
x, out = torch.ones(1, 64), torch.empty(2, 16)
kernels._library.llm42_linear(0, x.data_ptr(), ROWS, 0, packed.data_ptr(), 16, 64, None, out.data_ptr())
print("done")
"""


@pytest.mark.parametrize("rows", [2, 2**44])
def test_without_memory_for_its_work_the_library_says_so_and_ends_the_process(native, rows):  # noqa: ARG001 - built
    script = EXHAUSTION.replace("ROWS", str(rows))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    if rows == 2:
        assert (done.returncode, done.stdout) == (0, "done\n")
    else:
        assert done.returncode == -signal.SIGABRT
        assert done.stderr.endswith(f"llm42: no memory for {rows * 64 * 4} bytes of intermediate results\n")
