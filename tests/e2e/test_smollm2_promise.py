"""The promise on a real model: SmolLM2 in bf16, with the defaults that users get, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import Call, Oracle, Schedule, bits, run
from llm42 import SamplingParams
from llm42.config import EngineConfig
from llm42.engine.engine import Engine
from real_data import gsm8k

pytestmark = pytest.mark.xdist_group("smollm2 promise")  # the oracle is asked once for each kind of kernels

TOKENS = 12
"""Short outputs: the oracle needs a whole canonical pass for each token."""


def real_engine(smollm2, **fields) -> Engine:
    return Engine(EngineConfig(model=str(smollm2), max_model_len=2048, kv_cache_bytes=256 << 20, **fields))


def workload(engine: Engine) -> list[Call]:
    """Greedy and sampled, short and 1,000 tokens long, with log-probabilities of everything."""
    texts = [problem["prompt"] for problem in gsm8k()[:4]]
    prompts = [engine.tokenizer.encode(text) for text in texts]
    long = engine.tokenizer.encode("\n\n".join(problem["prompt"] for problem in gsm8k()))[:1000]
    assert len(long) == 1000
    base = SamplingParams(max_tokens=TOKENS, logprobs=5, deterministic=True, ignore_eos=True)
    variants = [
        (prompts[0], {"temperature": 0.0}),
        (prompts[1], {"temperature": 0.9, "seed": 11}),
        (prompts[2][:1], {"temperature": 1.0, "top_p": 0.9, "seed": 2**64 - 1, "prompt_logprobs": 5}),
        (prompts[3], {"temperature": 0.0, "repetition_penalty": 1.2, "prompt_logprobs": 5, "ignore_eos": False}),
        (long, {"temperature": 0.7, "top_k": 40, "seed": 3}),
    ]
    return [Call(tuple(prompt), replace(base, **fields)) for prompt, fields in variants]


class Reference:
    def __init__(self, smollm2, kernels: str) -> None:
        self.smollm2, self.kernels = smollm2, kernels
        engine = self.engine(mode="invariant")
        self.calls = workload(engine)
        oracle = Oracle(engine)
        self.expected = [bits(oracle.generate(call)) for call in self.calls]

    def engine(self, **fields) -> Engine:
        return real_engine(self.smollm2, kernels=self.kernels, **fields)

    def check(self, ran) -> None:
        for output, expected in zip(ran.outputs, self.expected, strict=True):
            assert bits(output) == expected
            assert len(expected.token_ids) == len(expected.logprobs) > 0
        assert sum(len(expected.prompt_logprobs) for expected in self.expected) > 0


@pytest.fixture(scope="module", params=["native", "jitter"])
def reference(request, smollm2):
    return Reference(smollm2, request.param)


@pytest.mark.parametrize("mode", ["auto", "verify"])
def test_a_busy_batch_changes_nothing(reference, mode):
    engine = reference.engine(mode=mode)
    ran = run(engine, reference.calls, Schedule(neighbours=12, order="shuffled", seed=1))
    reference.check(ran)
    assert engine.core.num_violations == 0
    assert ran.total("num_windows") > 0 or mode == "auto"


def test_lies_preemption_cancellation_and_a_hot_cache_change_nothing(reference):
    engine = reference.engine(mode="verify", window_size=8, verify_batch_size=4)
    schedule = Schedule(adversary_rate=0.1, preempt_rate=0.05, neighbours=6, cancel_rate=0.1)
    ran = run(engine, reference.calls, schedule)
    reference.check(ran)
    assert ran.total("num_rollbacks") > 0
    hot = run(engine, reference.calls, Schedule(order="reversed"))
    reference.check(hot)
    assert hot.total("num_cached_tokens") > 900


def test_negative_control_ordinary_requests_change_with_the_batch(reference):
    """Where the fast path is visibly shape-dependent, the same requests without verification differ."""
    if reference.kernels != "jitter":
        pytest.skip("whether ordinary requests differ under real kernels is a fact of the machine")
    calls = [replace(call, params=replace(call.params, deterministic=False)) for call in reference.calls]
    engine = reference.engine()
    alone = [run(engine, [call]).outputs[0].outputs[0].token_ids for call in calls]
    batch = [output.outputs[0].token_ids for output in run(engine, calls).outputs]
    assert alone != batch
    with pytest.raises(AssertionError):
        reference.check(run(engine, calls))
