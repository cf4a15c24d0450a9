"""OpenVINO GenAI's `ContinuousBatchingPipeline` over an exported model (--ir).

It computes in bf16 with a bf16 KV cache where the CPU has bf16 instructions. Elsewhere it has neither, and computes in
f32 with an f16 KV cache, so that the cache has 16 bits everywhere; its own default is 8.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from recording import Session

_KV_CACHE_GIB = 4
_MAX_BATCHED_TOKENS = 2048


def main() -> None:
    """Measure it with the options of the command line."""
    session = Session("openvino", lambda parser: parser.add_argument("--ir", required=True, help="exported model"))
    options = session.options
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _KV_CACHE_GIB
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
    scheduler.enable_prefix_caching = False
    precision, kv_precision = ("bf16", "bf16") if has_bf16() else ("f32", "f16")
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": kv_precision,
        "INFERENCE_NUM_THREADS": options.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.ir, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        configs = []
        for length in lengths:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            configs.append(config)
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(tensors, configs)]

    session.measure(generate, openvino_genai.get_version(), precision=precision, kv_cache=kv_precision)


def has_bf16() -> bool:
    """Whether the CPU multiplies bf16 numbers (Linux; False where that is not known)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16"})


if __name__ == "__main__":
    main()
