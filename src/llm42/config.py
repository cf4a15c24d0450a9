"""The engine's one configuration: frozen, validated at once, and never steered by environment variables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

MODES = ("auto", "verify", "invariant", "off")
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = ("auto", "native", "portable", "jitter")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs. Every field is validated; ``None`` means a default derived from the model or the machine.

    Raises:
        ValueError: A field is out of range; the message names the field, its value and what is allowed.
    """

    model: str
    """A pulled name, a directory in Hugging Face layout, a GGUF file, or a hub id."""
    mode: str = "auto"
    """`auto`: commit at once what canonical passes decode, draft and verify the rest; `verify`: draft and verify
    everything; `invariant`: every pass canonical, at one row count; `off`: deterministic requests are refused."""
    kernels: str = "auto"
    """The kernel backend: `native` (C++ for CPUs), `portable` (PyTorch), or `auto`: native where it can be built.
    `jitter` is the adversary, for demonstrations and tests."""
    dtype: str = "bfloat16"
    window_size: int | None = None
    """W: the most rows of one verification window. Default: from the measured cost of passes and rate of flips."""
    verify_batch_size: int | None = None
    """G: so many ready windows launch a verification pass at once; fewer wait for others, a few steps at most.
    Default: as `window_size`."""
    canonical_rows: int | None = None
    """M: one row count for all canonical passes. Part of the contract. Default: the measured canonical class."""
    canonical_logit_rows: int | None = None
    """The same for the lm_head, which sees only rows that need logits."""
    max_num_seqs: int = 64
    """The most requests that run together."""
    max_num_batched_tokens: int | None = None
    """The most rows that one pass carries. Default: offline as many as the class has; for streams as many as run in
    about a fifth of a second, so that neighbours do not wait long."""
    max_model_len: int | None = None
    """The most positions of one request. Default: what the model was trained for, or fewer if KV memory is short."""
    kv_cache_bytes: int | None = None
    """Memory for KV. Default: 1 GiB, more if one full request needs more, less if all requests need less."""
    block_size: int = 16
    """Positions of one KV block, the unit of paging and of prefix caching."""
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    """CPU threads of a pass. Part of the contract. Default: PyTorch's choice, usually the number of cores."""
    max_queue_len: int = 1024
    """Requests that may wait; one more is refused."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(f"model must be a name, a directory, a GGUF file or a hub id, not {self.model!r}")
        for name, choices in (("mode", MODES), ("dtype", DTYPES), ("kernels", KERNELS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, not {self.enable_prefix_caching!r}")
        minimum = {"window_size": 2, "block_size": 2}
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.type.startswith("int") or (value is None and field.type.endswith("None")):
                continue
            least = minimum.get(field.name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} must be an integer of at least {least}, not {value!r}")
        if self.canonical_rows is not None and self.window_size is not None and self.window_size > self.canonical_rows:
            raise ValueError(
                f"window_size {self.window_size} does not fit a pass of canonical_rows {self.canonical_rows}; "
                "lower window_size or raise canonical_rows"
            )

    def describe(self) -> dict[str, Any]:
        """All fields, for printing."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
