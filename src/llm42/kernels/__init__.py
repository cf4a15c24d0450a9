"""Kernels: the few operations a decoder needs, behind one interface, and the backends that implement it.

Owns numerics and nothing of requests or scheduling. Imports `llm42.cache` for the reserved slots, `llm42.protocol` for
shape classes and `llm42.sampling` for the interface of the sampler.
"""

import logging

from llm42.kernels.interface import Kernels, PreparedLinear, RowBatch, RowSegment
from llm42.kernels.jitter import JitterKernels
from llm42.kernels.kv import KVPool, KVShape
from llm42.kernels.native import NativeBuildError, NativeKernels
from llm42.kernels.portable import PortableKernels

__all__ = [
    "BACKENDS",
    "JitterKernels",
    "KVPool",
    "KVShape",
    "Kernels",
    "NativeKernels",
    "PortableKernels",
    "PreparedLinear",
    "RowBatch",
    "RowSegment",
    "create_kernels",
]

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[Kernels]] = {"native": NativeKernels, "portable": PortableKernels, "jitter": JitterKernels}


def create_kernels(name: str) -> Kernels:
    """The backend of that name; for `auto` the native one, or the portable one with a warning.

    Raises:
        ValueError: There is no such backend, or it cannot be built here.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernels must be auto or one of {', '.join(BACKENDS)}, not {name!r}")
    try:
        return BACKENDS["native" if name == "auto" else name]()
    except NativeBuildError as error:
        if name != "auto":
            raise ValueError(f"kernels {name!r} cannot be used here: {error}; choose 'auto' or 'portable'") from error
        logger.warning("native kernels are not available, portable ones are several times slower: %s", error)
        return PortableKernels()
