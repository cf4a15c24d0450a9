"""Native kernels for CPUs: C++ in `src/`, built with the machine's own compiler on first use, called through a C ABI.

Owns the sources, their build and the backend that calls them. It imports `llm42.kernels` and nothing above it.
"""

from llm42.kernels.native.backend import NativeKernels
from llm42.kernels.native.build import NativeBuildError

__all__ = ["NativeBuildError", "NativeKernels"]
