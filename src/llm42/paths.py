"""Where this package keeps what it downloads, converts, builds and measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The directory in LLM42_CACHE, else `llm42` in the platform's user cache."""
    if override := os.environ.get("LLM42_CACHE"):
        return Path(override).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llm42"
