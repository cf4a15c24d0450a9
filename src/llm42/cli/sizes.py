"""Sizes in bytes as people write them: 512M, 2G, 1.5GiB. Always powers of 1024, as in GPU and cache sizes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Number of bytes of a size such as "2G".

    Raises:
        ValueError: not a positive number with an optional K, M, G or T (a following B or iB is allowed).
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size; give a positive number of bytes such as 536870912, 512M or 2G")
    return size


def format_size(size: int) -> str:
    """A size in bytes in the largest unit that keeps it at 1 or more: 269030400 is "256.6 MiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
