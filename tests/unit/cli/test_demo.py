"""The demo's own decisions: how long it may be, and what it refuses."""

from __future__ import annotations

import pytest

from llm42.cli.demo import Speed, fitting_max_tokens


def test_a_fast_machine_gets_the_longest_output():
    assert fitting_max_tokens(Speed(0.001, 0.005), 16, 100.0) == 64


def test_a_slow_machine_gets_the_shortest_useful_output():
    assert fitting_max_tokens(Speed(1.0, 5.0), 16, 100.0) == 24


def test_the_chosen_length_is_the_longest_that_fits():
    speed = Speed(0.045, 0.3)
    chosen = fitting_max_tokens(speed, 16, 100.0)
    assert 24 < chosen < 64
    assert speed.estimate_s(16, chosen) <= 100.0 < speed.estimate_s(16, chosen + 8)


@pytest.mark.parametrize("field", ["step_alone_s", "step_batch_s"])
def test_the_estimate_grows_with_every_cost(field):
    base = {"step_alone_s": 0.05, "step_batch_s": 0.3}
    slower = Speed(**{**base, field: base[field] * 2})
    assert slower.estimate_s(16, 32) > Speed(**base).estimate_s(16, 32)
    assert Speed(**base).estimate_s(16, 64) > Speed(**base).estimate_s(16, 32)
    assert Speed(**base).estimate_s(8, 32) < Speed(**base).estimate_s(16, 32)
