"""The native library for the tests of its kernels: for this machine, and for the instruction sets below it.

Each is built once and stays in the package's cache, as for any user. Only where there is no compiler are the tests
skipped: one that fails is a failure.
"""

from __future__ import annotations

import platform
import shutil
import sys

import pytest
import torch

from llm42.kernels import NativeKernels

_X86 = platform.machine() in {"x86_64", "AMD64"}
_AVX512 = _X86 and torch.backends.cpu.get_cpu_capability() == "AVX512"
_AVX2 = _AVX512 or (_X86 and torch.backends.cpu.get_cpu_capability() == "AVX2")
_VARIANTS = {
    "own": (None, True),
    "x86-64": (("-march=x86-64",), _X86),
    "x86-64-v3": (("-march=x86-64-v3",), _AVX2),
    "x86-64-v4": (("-march=x86-64-v4",), _AVX512),
}


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    """The kernels for this machine, with linear layers of their own even where oneDNN's are the default."""
    return _kernels("own")


@pytest.fixture(scope="session", params=_VARIANTS)
def any_native(request) -> NativeKernels:
    """The kernels for this machine, then for each instruction set that it can run."""
    return _kernels(request.param)


def _kernels(variant: str) -> NativeKernels:
    if sys.platform != "linux" or not any(map(shutil.which, ("g++", "c++"))):
        pytest.skip("native kernels are built on Linux with a C++ compiler")
    flags, runs_here = _VARIANTS[variant]
    if not runs_here:
        pytest.skip(f"this processor does not run {variant}")
    return NativeKernels(flags, linears="own")
