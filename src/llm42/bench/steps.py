"""How the time of a decode step grows: with the rows of the step, and with the context of each row.

Beside it stands the time to read all weights once, taken in the same rounds: a step cannot be faster than that.
Only kernels run here (layers, logits, greedy choice); what the engine adds is in `throughput`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm42.engine.engine import Engine
from llm42.kernels import KVPool, RowBatch, RowSegment
from llm42.kernels.interface import PreparedLinear

_BLOCK_SIZE = 16


@torch.inference_mode()
def measure_steps(
    engine: Engine, configurations: Sequence[tuple[int, int]], repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time decode steps.

    Args:
        engine: A loaded engine, idle.
        configurations: Pairs of rows and context: so many sequences, each with so many positions of KV.
        repeats: Rounds; each times every configuration once, after one round that is not counted.
        say: Told about progress.

    Returns:
        ``{"stream_ms": [...], "weight_bytes": n, "steps": [{"rows", "context", "ms": [...]}, ...]}``.

    Raises:
        ValueError: A context is longer than the engine's max_model_len.
    """
    longest = max(context for _, context in configurations) + 1
    if longest > engine.max_model_len:
        raise ValueError(f"context {longest - 1} needs max_model_len {longest}, and it is {engine.max_model_len}")
    engine.pin_threads()
    blocks = max(rows * _blocks_of(context) for rows, context in configurations) + 1
    kv = engine.decoder.new_kv_pool(blocks, _BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    for slots in torch.split(torch.arange(blocks * _BLOCK_SIZE), 1024):
        kv.write(slots, torch.randn(kv.read(slots).shape, generator=generator))
    weights = [_readable(linear) for linear in engine.decoder.all_linears]
    stream: list[float] = []
    steps: list[dict[str, Any]] = [{"rows": rows, "context": context, "ms": []} for rows, context in configurations]
    for round_index in range(repeats + 1):
        say(f"round {round_index} of {repeats}" if round_index else "warming up")
        streamed = _stream_ms(weights)
        if round_index:
            stream.append(streamed)
        for step in steps:
            took = _step_ms(engine, kv, step["rows"], step["context"])
            if round_index:
                step["ms"].append(took)
    return {
        "stream_ms": stream,
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "steps": steps,
    }


def _blocks_of(context: int) -> int:
    return -(-(context + 1) // _BLOCK_SIZE)


def _readable(linear: PreparedLinear) -> torch.Tensor:
    """The weights of a linear, or as many bytes in place of those that only oneDNN can read."""
    if not linear.weight.is_mkldnn:
        return linear.weight
    return torch.ones(linear.out_features, linear.in_features, dtype=linear.dtype)


def _stream_ms(weights: Sequence[torch.Tensor]) -> float:
    """Milliseconds to read every weight once, in the widest elements that PyTorch adds up quickly."""
    views = [weight.reshape(-1).view(torch.uint8)[: weight.nbytes // 4 * 4].view(torch.float32) for weight in weights]
    started = time.perf_counter()
    for view in views:
        torch.sum(view)
    return (time.perf_counter() - started) * 1e3


def _step_ms(engine: Engine, kv: KVPool, rows: int, context: int) -> float:
    """Milliseconds of one step; the median of a few where they are short."""
    per_row = _blocks_of(context)
    segments = [RowSegment(row, context, 1, range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(rows)]
    batch = RowBatch(segments, rows, _BLOCK_SIZE)
    ids = torch.arange(rows) % engine.decoder.config.vocab_size
    decoder = engine.decoder
    times: list[float] = []
    while len(times) < 5 and sum(times) < 0.3:
        started = time.perf_counter()
        logits = decoder.logits(decoder.forward(ids, batch, kv))
        decoder.kernels.sampler.greedy(logits, range(rows))
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3
