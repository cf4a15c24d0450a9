"""What goes wrong inside a pass: the requests concerned fail with the cause, all others and the engine go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness import bits
from llm42 import LLM, RequestError, SamplingParams, kernels
from llm42.kernels import PortableKernels

PROMPTS = [{"prompt_token_ids": [261, 438, 81, 17 + index]} for index in range(4)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2, ignore_eos=True, deterministic=True)
ORDINARY = replace(PARAMS, deterministic=False)
POISONED = 300
"""A token id whose embedding is NaN in the poisoned model."""


def break_pass(monkeypatch, llm: LLM, number: int, error: BaseException) -> None:
    """Let the runner's pass of that number (from 1) raise."""
    runner = llm._engine.core.runner
    execute, count = runner.execute, 0

    def broken(work):
        nonlocal count
        count += 1
        if count == number:
            raise error
        return execute(work)

    monkeypatch.setattr(runner, "execute", broken)


# A pass that raises


@pytest.mark.parametrize("params", [PARAMS, ORDINARY], ids=["deterministic", "ordinary"])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_pass_that_raises_fails_its_requests_with_the_cause_and_no_other(
    assert_clean, make_llm, monkeypatch, params, number
):
    with make_llm(max_num_seqs=2) as llm:
        expected = [bits(output) for output in llm.generate(PROMPTS, params)]
        with monkeypatch.context() as patch:
            break_pass(patch, llm, number, RuntimeError("out of luck"))
            with pytest.raises(RequestError, match="the pass failed with RuntimeError: out of luck") as caught:
                llm.generate(PROMPTS, params)
        assert_clean(llm)
        outputs = caught.value.outputs
        assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in PROMPTS]
        failed = [output.outputs[0].finish_reason == "error" for output in outputs]
        assert failed == [True, True, False, False]
        for output, has_failed, whole in zip(outputs, failed, expected, strict=True):
            assert output.finished
            if has_failed:
                assert "out of luck" in output.error
                assert output.request_id in str(caught.value)
                ids = output.outputs[0].token_ids
                assert len(ids) < 12
                assert tuple(ids) == whole.token_ids[: len(ids)]
            else:
                assert (output.error, bits(output)) == (None, whole)
        assert [bits(output) for output in llm.generate(PROMPTS, params)] == expected


def test_an_operation_of_a_kernel_that_raises_is_a_failed_pass(jitter_llm, monkeypatch):
    expected = bits(jitter_llm.generate(PROMPTS[0], PARAMS)[0])
    with monkeypatch.context() as patch:
        patch.setattr(jitter_llm._engine.decoder.kernels, "silu_mul", lambda _: 1 // 0)
        with pytest.raises(RequestError, match="ZeroDivisionError"):
            jitter_llm.generate(PROMPTS, PARAMS)
    assert bits(jitter_llm.generate(PROMPTS[0], PARAMS)[0]) == expected


def test_one_failed_output_of_n_fails_the_request_and_keeps_the_others(assert_clean, make_llm, monkeypatch):
    with make_llm(max_num_seqs=1) as llm:
        expected = llm.generate(PROMPTS[0], replace(PARAMS, n=2))[0]
        with monkeypatch.context() as patch:
            break_pass(patch, llm, 2, RuntimeError("out of luck"))
            with pytest.raises(RequestError, match="out of luck") as caught:
                llm.generate(PROMPTS[0], replace(PARAMS, n=2))
        (output,) = caught.value.outputs
        assert [completion.finish_reason for completion in output.outputs] == ["error", "length"]
        assert bits(output, 1) == bits(expected, 1)
        assert_clean(llm)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupted_call_leaves_nothing_behind(assert_clean, llm, monkeypatch, interruption):
    expected = bits(llm.generate(PROMPTS[0], PARAMS)[0])
    with monkeypatch.context() as patch:
        break_pass(patch, llm, 5, interruption)
        with pytest.raises(type(interruption)):
            llm.generate(PROMPTS * 30, PARAMS)
    assert_clean(llm)
    assert bits(llm.generate(PROMPTS[0], PARAMS)[0]) == expected


# Logits that are not numbers


@pytest.fixture(scope="module")
def poisoned(assert_clean, untied_model, fields):
    """A model in which one token's embedding is NaN: only rows of that token are harmed, by nature."""
    with LLM(untied_model, **fields) as llm:
        llm._engine.decoder._embedding.weight[POISONED] = torch.nan
        yield llm
        assert_clean(llm)


@pytest.mark.parametrize("params", [PARAMS, ORDINARY, replace(PARAMS, logprobs=None), replace(PARAMS, temperature=0.0)])
def test_logits_that_are_no_numbers_fail_their_request_only(poisoned, params):
    bad = {"prompt_token_ids": [5, 6, POISONED]}
    expected = [bits(output) for output in poisoned.generate(PROMPTS, params)]
    with pytest.raises(RequestError, match="logits are not finite") as caught:
        poisoned.generate([*PROMPTS[:2], bad, *PROMPTS[2:]], params)
    outputs = caught.value.outputs
    assert [output.error is not None for output in outputs] == [False, False, True, False, False]
    assert outputs[2].outputs[0].token_ids == []
    assert [bits(output) for output in outputs if output.error is None] == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_that_stop_being_numbers_keep_what_was_committed_before(poisoned, deterministic):
    """The poisoned token is generated, as the fourth, and is the input of the next row."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, deterministic=deterministic)
    free = poisoned.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    stop_id = free[3]
    weight = poisoned._engine.decoder._embedding.weight
    saved = weight[stop_id].clone()
    weight[stop_id] = torch.nan
    try:
        with pytest.raises(RequestError, match="logits are not finite") as caught:
            poisoned.generate(PROMPTS[:1], params)
    finally:
        weight[stop_id] = saved
    output = caught.value.outputs[0].outputs[0]
    assert output.token_ids == free[: free.index(stop_id) + 1]
    assert output.finish_reason == "error"


def test_prompt_logprobs_of_logits_that_are_no_numbers_fail_their_request_only(poisoned):
    bad = {"prompt_token_ids": [5, 6, POISONED, 7, 8]}
    params = replace(PARAMS, prompt_logprobs=1)
    expected = [bits(output) for output in poisoned.generate(PROMPTS, params)]
    with pytest.raises(RequestError) as caught:
        poisoned.generate([bad, *PROMPTS], params)
    assert [output.error is not None for output in caught.value.outputs] == [True, False, False, False, False]
    assert [bits(output) for output in caught.value.outputs[1:]] == expected


# Kernels that break their promises


class RowIndexLinear(PortableKernels):
    """A row's linear depends on where in the pass it is."""

    def linear(self, x, linear):
        y = super().linear(x, linear)
        return y * (1 + torch.arange(len(y)) % 2 / 64)[:, None].to(y.dtype)


class LastRowLinear(PortableKernels):
    """Only the last row is special, as with some vector loops' remainders."""

    def linear(self, x, linear):
        y = super().linear(x, linear)
        y[-1] *= 1 + 2.0**-6
        return y


class TensorScaleLinear(PortableKernels):
    """Dynamic quantization with one scale for the whole tensor: a neighbour's huge value coarsens everybody."""

    def linear(self, x, linear):
        scale = x.abs().amax().clamp_min(1e-6) / 127
        return super().linear((x / scale).round() * scale, linear)


class UnrepeatableLinear(PortableKernels):
    """Sums in another order in each call, as atomics do."""

    def linear(self, x, linear):
        return super().linear(x, linear) * (1 + 2.0**-6 * torch.rand(1).item())


class CrowdedAttention(PortableKernels):
    """Attention that splits its work by how many tiles there are."""

    def paged_attention(self, plan, q, kv, scale, window):
        return super().paged_attention(plan, q, kv, scale, window) * (1 + plan.num_tiles / 256)


class LongestAttention(PortableKernels):
    """Attention whose reduction depends on the longest context of the pass."""

    def paged_attention(self, plan, q, kv, scale, window):
        longest = int(plan.positions.amax())
        return super().paged_attention(plan, q, kv, scale, window) * (1 + longest / 1024)


class LeakyAttention(PortableKernels):
    """A little of the neighbours' values leaks into every row."""

    def paged_attention(self, plan, q, kv, scale, window):
        out = super().paged_attention(plan, q, kv, scale, window)
        return out + out.float().mean(0).to(out.dtype) / 16


class ChunkedAttention(PortableKernels):
    """Attention that treats keys of this pass otherwise than keys of earlier passes, as prefill kernels do."""

    def paged_attention(self, plan, q, kv, scale, window):
        out = super().paged_attention(plan, q, kv, scale, window)
        rows_above = torch.cat((torch.zeros(1), (plan.positions.diff() == 1).float())).unsqueeze(1)
        return (out.float() * (1 + rows_above / 64)).to(out.dtype)


class PageAttention(PortableKernels):
    """Attention that depends on where in memory a row's keys are."""

    def paged_attention(self, plan, q, kv, scale, window):
        out = super().paged_attention(plan, q, kv, scale, window)
        return (out.float() * (1 + plan.slots.unsqueeze(1) / 4096)).to(out.dtype)


class PaddedNorm(PortableKernels):
    """A norm with one epsilon for the pass, from all rows."""

    def add_rms_norm(self, x, residual, weight, eps):
        return super().add_rms_norm(x, residual, weight, eps * float(x.float().square().mean()))


@pytest.fixture
def make_with(make_llm, monkeypatch):
    """A function of a kernel class to an engine that runs it."""

    def make(backend, **fields):
        monkeypatch.setitem(kernels.BACKENDS, "broken", backend)
        monkeypatch.setattr("llm42.config.KERNELS", ("broken",))
        return make_llm(kernels="broken", **fields)

    return make


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            RowIndexLinear,
            "depends on its index or its neighbours at every row count of .64.; choose other canonical_rows",
        ),
        (LastRowLinear, "depends on its index or its neighbours"),
        (TensorScaleLinear, "depends on its index or its neighbours' values"),
        (UnrepeatableLinear, ""),
        (CrowdedAttention, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
        (LongestAttention, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
        (LeakyAttention, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
        (ChunkedAttention, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
        (PageAttention, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
        (PaddedNorm, "a canonical pass of 64 rows gives other bits than one of 64 with the probe in"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_that_break_their_promises_serve_ordinary_requests_only(
    assert_clean, make_with, backend, reason, dtype
):
    with make_with(backend, dtype=dtype) as llm:
        message = f"deterministic=True is refused: the start-up self-test failed: .*{reason}"
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPTS, PARAMS)
        outputs = llm.generate(PROMPTS, ORDINARY)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 4
        assert_clean(llm)


def test_kernels_that_keep_their_promises_pass_the_self_test(make_with):
    with make_with(PortableKernels) as llm:
        assert llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].token_ids


def test_kernels_that_are_refused_do_change_answers(make_with):
    """The partner of the refusals: served all the same, a deterministic request changes with the batch."""
    with make_with(CrowdedAttention) as llm:
        llm._engine.refusal = None
        alone = [bits(llm.generate(prompt, PARAMS)[0]) for prompt in PROMPTS]
        batch = [bits(output) for output in llm.generate([*PROMPTS, *PROMPTS], PARAMS)[:4]]
        assert alone != batch
