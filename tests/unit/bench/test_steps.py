"""Steps are timed for what was asked, beside the time to read all weights: also of those that only oneDNN can read."""

from __future__ import annotations

import pytest
import torch

from llm42.bench.report import steps_table
from llm42.bench.steps import measure_steps
from llm42.kernels import NativeKernels


def test_every_configuration_is_timed_in_every_round(engine):
    told: list[str] = []
    report = measure_steps(engine, [(1, 8), (3, 5)], 2, told.append)
    assert [(step["rows"], step["context"]) for step in report["steps"]] == [(1, 8), (3, 5)]
    assert all(len(step["ms"]) == 2 and min(step["ms"]) > 0 for step in report["steps"])
    assert len(report["stream_ms"]) == 2
    assert told == ["warming up", "round 1 of 2", "round 2 of 2"]
    assert [*steps_table(report).columns[0].cells] == ["1", "3"]


@pytest.mark.parametrize("linears", ["own", "onednn"])
def test_all_weights_are_read_whatever_form_they_are_in(engine, monkeypatch, linears):
    kernels = NativeKernels(linears=linears)
    weights = [torch.ones(48, 64), torch.ones(128, 64)]
    prepared = [kernels.prepare_linear(weight) for weight in weights]
    monkeypatch.setattr(type(engine.decoder), "all_linears", prepared)
    report = measure_steps(engine, [(1, 8)], 1, lambda _: None)
    assert report["weight_bytes"] == sum(weight.nbytes for weight in weights)


def test_a_context_that_the_engine_does_not_take_is_refused_with_a_remedy(engine):
    longest = engine.max_model_len
    with pytest.raises(ValueError, match=rf"context {longest} needs max_model_len {longest + 1}, and it is {longest}"):
        measure_steps(engine, [(1, longest)], 1, lambda _: None)
