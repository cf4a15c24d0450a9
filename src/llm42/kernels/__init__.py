"""Kernels: the few operations a decoder needs, behind one interface, and the backends that implement it.

Owns numerics and nothing of requests or scheduling. Imports `llm42.cache` for the reserved slots only.
"""

from llm42.kernels.interface import Kernels, KVPool, PreparedLinear, RowBatch, RowSegment
from llm42.kernels.jitter import JitterKernels
from llm42.kernels.portable import PortableKernels

__all__ = [
    "BACKENDS",
    "JitterKernels",
    "KVPool",
    "Kernels",
    "PortableKernels",
    "PreparedLinear",
    "RowBatch",
    "RowSegment",
    "create_kernels",
]

BACKENDS: dict[str, type[Kernels]] = {"portable": PortableKernels, "jitter": JitterKernels}


def create_kernels(name: str) -> Kernels:
    """The backend of that name.

    Raises:
        ValueError: There is no such backend.
    """
    if name not in BACKENDS:
        raise ValueError(f"kernels must be one of {', '.join(BACKENDS)}, not {name!r}")
    return BACKENDS[name]()
