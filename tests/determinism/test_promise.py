"""The promise, on tiny models: every schedule gives the oracle's bits, and without verification it would not.

Tokens, chosen and top-5 log-probabilities, prompt log-probabilities, text and finish reasons are compared exactly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness import Reference, Schedule, assert_equals_oracle, bits, run

KERNELS = ["native", "jitter"]
"""What users run, and the adversary."""
VERIFIED = [(kernels, dtype) for kernels in (*KERNELS, "portable") for dtype in ("bfloat16", "float32")]


@pytest.mark.parametrize(("kernels", "dtype"), VERIFIED)
def test_the_oracle_has_something_to_say(reference, kernels, dtype):
    expected = reference("llama", kernels, dtype).expected
    assert {e.finish_reason for e in expected} == {"stop", "length"}
    assert any(isinstance(e.stop_reason, str) for e in expected)
    assert any(isinstance(e.stop_reason, int) for e in expected)
    assert any(e.finish_reason == "stop" and e.stop_reason is None for e in expected), "no EOS among the outputs"
    assert sum(len(e.prompt_logprobs) > 1 for e in expected) >= 3
    assert sum(len(e.token_ids) for e in expected) > 200


@pytest.mark.parametrize(("kernels", "dtype"), VERIFIED)
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_batch_size_changes_nothing(reference, kernels, dtype, max_num_seqs):
    ref = reference("llama", kernels, dtype)
    ran = run(ref.engine(max_num_seqs=max_num_seqs), ref.calls, Schedule(neighbours=40 if max_num_seqs == 64 else 0))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_windows") > 0
    assert ran.total("num_rollbacks") > 0 or kernels != "jitter"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("window_size", "verify_batch_size"), [(2, 1), (2, 16), (3, 2), (8, 4), (17, 1), (64, 8)])
def test_window_and_group_sizes_change_nothing(reference, kernels, window_size, verify_batch_size):
    ref = reference("llama", kernels)
    engine = ref.engine(window_size=window_size, verify_batch_size=verify_batch_size)
    assert_equals_oracle(ref, run(engine, ref.calls))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 17])
def test_chunk_sizes_change_nothing(reference, kernels, max_num_batched_tokens):
    ref = reference("llama", kernels)
    engine = ref.engine(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16)
    # One row at a time, 1,000 tokens take too long for what they would show.
    calls = ref.calls[:10] if max_num_batched_tokens == 1 else ref.calls
    assert_equals_oracle(ref, run(engine, calls))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("order", "steps_between_arrivals"), [("reversed", 0), ("shuffled", 0), ("shuffled", 3)])
def test_arrival_order_and_neighbours_change_nothing(reference, kernels, order, steps_between_arrivals):
    ref = reference("llama", kernels)
    schedule = Schedule(seed=5, order=order, steps_between_arrivals=steps_between_arrivals, neighbours=24)
    assert_equals_oracle(ref, run(ref.engine(), ref.calls, schedule))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.2, 1.0])
def test_a_lying_fast_path_changes_nothing_but_rollbacks(reference, rate):
    ref = reference("llama", "native")
    ran = run(ref.engine(), ref.calls, Schedule(adversary_rate=rate))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_windows") > 0
    if rate > 0.0:
        assert ran.total("num_rollbacks") > 0
        assert ran.total("num_recomputed_tokens") > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_preemption_in_mid_window_changes_nothing(reference, kernels):
    ref = reference("llama", kernels)
    ran = run(ref.engine(), ref.calls, Schedule(preempt_rate=0.3, neighbours=8, adversary_rate=0.1))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_preemptions") > 10


@pytest.mark.parametrize("kernels", KERNELS)
def test_preemption_for_want_of_memory_changes_nothing(reference, kernels):
    ref = reference("llama", kernels)
    engine = ref.engine(kv_cache_bytes=431_000, max_model_len=1100, block_size=2)
    ran = run(engine, ref.calls, Schedule(neighbours=30, order="shuffled", seed=3))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_preemptions") > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_canonical_kv_equals_the_oracles(reference, kernels):
    """What the prefix cache holds after the most hostile run is, bit for bit, the KV of the lone canonical run."""
    ref = reference("llama", kernels)
    engine = ref.engine(block_size=4, kv_cache_bytes=32 << 20)
    run(engine, ref.calls, Schedule(adversary_rate=0.3, preempt_rate=0.1, neighbours=8))
    num_compared = 0
    for call, expected, canonical in zip(ref.calls, ref.expected, ref.canonical_kv, strict=True):
        tokens = [*call.prompt_token_ids, *expected.token_ids]
        blocks, _ = engine.core.cache.match(tokens[:-1])
        for index, block in enumerate(blocks):
            found = engine.core.runner._kv.read(torch.arange(block * 4, block * 4 + 4))
            assert torch.equal(found, canonical[:, :, index * 4 : index * 4 + 4])
        assert len(blocks) >= (len(tokens) - 1) // 4 - 1
        num_compared += len(blocks)
    assert num_compared > 500


@pytest.mark.parametrize("kernels", KERNELS)
def test_cancelled_neighbours_change_nothing(reference, kernels):
    ref = reference("llama", kernels)
    ran = run(ref.engine(), ref.calls, Schedule(neighbours=30, cancel_rate=0.5, order="shuffled"))
    assert_equals_oracle(ref, ran)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_hot_prefix_cache_changes_nothing(reference, kernels):
    ref = reference("llama", kernels)
    engine = ref.engine(block_size=4)
    cold = run(engine, ref.calls)
    hot = run(engine, ref.calls, Schedule(order="reversed"))
    assert_equals_oracle(ref, cold)
    assert_equals_oracle(ref, hot)
    assert hot.total("num_cached_tokens") > 500
    without = run(ref.engine(enable_prefix_caching=False), ref.calls)
    assert_equals_oracle(ref, without)
    assert without.total("num_cached_tokens") == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_invariant_mode_gives_the_same_bits(reference, kernels):
    ref = reference("llama", kernels)
    ran = run(ref.engine(mode="invariant"), ref.calls, Schedule(neighbours=10, preempt_rate=0.05))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_windows") == 0


@pytest.mark.parametrize("share", [0, 2])
def test_the_share_of_deterministic_requests_changes_nothing(reference, share):
    """Every other request (or all but one) is made ordinary; the deterministic ones must not notice."""
    ref = reference("llama", "jitter")
    stays = (lambda index: index % share == 0) if share else (lambda index: index == 8)
    calls = [
        call if stays(index) else replace(call, params=replace(call.params, deterministic=False))
        for index, call in enumerate(ref.calls)
    ]
    assert_equals_oracle(ref, run(ref.engine(), calls), only=stays)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_every_model_family_keeps_the_promise(reference, kernels, family):
    ref = reference(family, kernels)
    schedule = Schedule(neighbours=12, preempt_rate=0.05, adversary_rate=0.05, order="shuffled")
    ran = run(ref.engine(window_size=8), ref.calls, schedule)
    assert_equals_oracle(ref, ran)
    assert ran.total("num_rollbacks") > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_threads_keep_the_promise(tmp_path, kernels):
    """Threads are part of the contract: another count, perhaps other bits, but the same ones in every schedule."""
    ref = Reference(tmp_path, "llama", kernels, "bfloat16", num_threads=2)
    assert_equals_oracle(ref, run(ref.engine(), ref.calls, Schedule(neighbours=6, adversary_rate=0.1)))


@pytest.mark.parametrize("kernels", KERNELS)
def test_fp16_keeps_the_promise(reference, kernels):
    ref = reference("llama", kernels, "float16")
    assert_equals_oracle(ref, run(ref.engine(), ref.calls, Schedule(neighbours=6)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_negative_control_without_verification_the_same_comparison_fails(reference, dtype):
    """The partner of everything above: the same requests, not deterministic, do change with the batch."""
    ref = reference("llama", "jitter", dtype)
    calls = [replace(call, params=replace(call.params, deterministic=False)) for call in ref.calls]
    alone = [bits(run(ref.engine(), [call]).outputs[0]) for call in calls[:8]]
    batch = [bits(output) for output in run(ref.engine(), calls).outputs[:8]]
    changed = sum(a.token_ids != b.token_ids for a, b in zip(alone, batch, strict=True))
    assert changed > 0
    with pytest.raises(AssertionError, match="request"):
        assert_equals_oracle(ref, run(ref.engine(), calls))
