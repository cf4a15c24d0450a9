"""How the server runs, beside the engine: validated at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything about HTTP that can be set.

    Raises:
        ValueError: A field is out of range; the message names the field, its value and what is allowed.
    """

    model_names: tuple[str, ...]
    """The names that requests may use for the model; the first one stands in responses."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a request must carry one; none means that everybody is let in."""
    deterministic_default: bool = False
    """Whether requests that do not say are deterministic."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API; `*` is every origin."""
    max_body_size: int = 32 << 20
    """The most bytes of a request body."""
    body_timeout_s: float = 60.0
    """How long a client may take to send its body."""
    request_timeout_s: float | None = None
    """The longest that a request may run; None has no limit."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to say for so long sends a comment."""
    tool_call_parser: str | None = None
    """How tool calls are written by the model; None recognises it from the chat template."""

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"model_names must hold at least one name, not {self.model_names!r}")
        if not all(key and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("api_keys must be printable and not empty, without spaces around them")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ValueError(f"cors_origins must be * or like https://example.org, without a path, not {origin!r}")
        if self.max_body_size < 1024:
            raise ValueError(f"max_body_size must be at least 1024 bytes, not {self.max_body_size!r}")
        for name in ("body_timeout_s", "request_timeout_s", "keep_alive_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and lines that begin with # do not count.

    Raises:
        ValueError: The file cannot be read or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file {path} cannot be read ({error})") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ValueError(f"api_key_file {path} has no key; write one a line")
    return keys
