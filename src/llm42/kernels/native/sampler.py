"""The sampler of the native library: the rows of one call are shared out to the threads, each row to one.

Invariant: tokens, ranks and lists are those of `TorchSampler` except where the rounding of an exponential decides
about an id at the end of top_p; log-probabilities agree within a few float32 roundings. Logits are bfloat16, float16 or
float32 on the CPU, and are read where they lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from llm42.sampling.backend import Draw, SamplerBackend
from llm42.sampling.logprobs import TokenLogprobs

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers are those of `common.h`
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_LOGITS = [_INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE]
_SIGNATURES: dict[str, list[type]] = {
    "greedy": [*_LOGITS, _POINTER],
    "draw": [*_LOGITS, _POINTER, _POINTER],
    "token_logprobs": [*_LOGITS, _POINTER, _POINTER, _SIZE, *[_POINTER] * 4],
}
# The struct Draw of `sampling.cpp`.
_DRAW = np.dtype(
    [("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("seed", "u8"), ("position", "u8")]
)
_Ids = npt.NDArray[np.int64]


class NativeSampler(SamplerBackend):
    """Greedy choice, draws and log-probabilities in C++.

    Args:
        library: The native library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"llm42_{name}")
            function.argtypes = arguments
            function.restype = None

    def greedy(self, logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """A maximum and a search for it; no copy of the logits."""
        logits, chosen = _operands(logits, rows)
        tokens = np.empty(len(chosen), dtype=np.int64)
        self._library.llm42_greedy(*_logits_arguments(logits, chosen), tokens.ctypes.data)
        return _list(tokens)

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """Noise for the few ids that can win, found by what 16 of its 48 bits allow."""
        logits, chosen = _operands(logits, rows)
        vocab = logits.shape[1]
        how = np.array(
            [
                (d.temperature, d.top_p, d.min_p, d.top_k if 0 < d.top_k < vocab else 0, d.seed, d.position)
                for _, d in zip(rows, draws, strict=True)
            ],
            dtype=_DRAW,
        )
        tokens = np.empty(len(chosen), dtype=np.int64)
        self._library.llm42_draw(*_logits_arguments(logits, chosen), how.ctypes.data, tokens.ctypes.data)
        return _list(tokens)

    def token_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Float32 exponentials relative to the largest logit, a float64 sum, and one rounding of each result."""
        logits, chosen = _operands(logits, rows)
        count, vocab = len(chosen), logits.shape[1]
        tokens = np.array([token_id for _, token_id in zip(rows, token_ids, strict=True)], dtype=np.int64)
        for token_id in token_ids:
            if not 0 <= token_id < vocab:
                raise ValueError(f"token_id must be in 0..{vocab - 1}, got {token_id}; use an id of the vocabulary")
        lengths = np.array([min(max(k, 0), vocab) for _, k in zip(rows, ks, strict=True)], dtype=np.int64)
        width = int(lengths.max(initial=0))
        ranks, top_ids = np.empty(count, dtype=np.int64), np.empty((count, width), dtype=np.int64)
        scores, top_scores = np.empty(count, dtype=np.float32), np.empty((count, width), dtype=np.float32)
        self._library.llm42_token_logprobs(
            *_logits_arguments(logits, chosen),
            tokens.ctypes.data,
            lengths.ctypes.data,
            width,
            ranks.ctypes.data,
            scores.ctypes.data,
            top_ids.ctypes.data,
            top_scores.ctypes.data,
        )
        lists = zip(top_ids.tolist(), top_scores.tolist(), lengths.tolist(), strict=True)
        tops = [tuple(zip(ids[:k], values[:k], strict=True)) for ids, values, k in lists]
        rows_of_numbers = zip(token_ids, scores.tolist(), ranks.tolist(), tops, strict=True)
        return [
            TokenLogprobs(token_id, score, rank, top) if rank else None
            for token_id, score, rank, top in rows_of_numbers
        ]


def _operands(logits: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, _Ids]:
    """Logits with contiguous rows, and the row indices: the library trusts both."""
    if logits.dtype not in _DTYPES or logits.device.type != "cpu":
        raise ValueError(
            f"logits must be float32, bfloat16 or float16 on the CPU, got {logits.dtype} on {logits.device}; "
            "use the torch sampler"
        )
    chosen = np.array(rows, dtype=np.int64)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < logits.shape[0]:
        raise ValueError(f"rows must be in 0..{logits.shape[0] - 1}, got {list(rows)}; pass indices of rows of logits")
    return (logits if logits.stride(1) == 1 else logits.contiguous()), chosen


def _logits_arguments(logits: torch.Tensor, rows: _Ids) -> tuple[int, int, int, int, int, int]:
    return _DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), logits.shape[1], rows.ctypes.data, len(rows)


def _list(tokens: _Ids) -> list[int]:
    values: list[int] = tokens.tolist()
    return values
