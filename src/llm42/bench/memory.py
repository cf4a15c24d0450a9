"""Peak resident memory of this process, per measurement where the system can start a new high-water mark (Linux)."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_PROC = Path("/proc/self")


def reset_peak() -> None:
    """Start a new high-water mark; where that is not possible, the mark is that of the whole process."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5", encoding="ascii")  # see proc(5)


def peak_rss_mib() -> float | None:
    """The high-water mark of resident memory in MiB, or None where the system does not tell."""
    try:
        for line in (_PROC / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
