"""When a window is ready, and when a group is launched (protocol.md, "Grouping, timing, and the neighbours")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.protocol import GroupingPolicy, WindowState

POLICIES = st.builds(GroupingPolicy, window_size=st.integers(2, 64), group_size=st.integers(1, 16))
MANY_ROWS = 10**6


def state(num_candidates, *, is_finished=False, steps_drafting=0, steps_ready=0):
    return WindowState(num_candidates, is_finished, steps_drafting, steps_ready)


@st.composite
def states(draw, policy):
    num_candidates = draw(st.integers(0, policy.max_candidates))
    return state(
        num_candidates,
        is_finished=num_candidates > 0 and draw(st.booleans()),
        steps_drafting=draw(st.integers(0, 3 * policy.window_size)),
        steps_ready=draw(st.integers(0, policy.window_size)),
    )


@given(POLICIES, st.data())
def test_a_request_can_draft_or_is_ready(policy, data):
    """Whoever may not draft on is worth verifying: nobody is stuck."""
    drawn = data.draw(states(policy))
    assert policy.can_draft(drawn) or policy.is_ready(drawn)


@given(POLICIES, st.data())
def test_never_more_than_2w_candidates(policy, data):
    drawn = data.draw(states(policy))
    assert policy.max_candidates == 2 * policy.window_size
    if policy.can_draft(drawn):
        assert drawn.num_candidates + 1 <= policy.max_candidates


@given(POLICIES)
def test_drafting_may_run_on_past_a_full_window(policy):
    assert policy.can_draft(state(policy.window_size))
    assert not policy.can_draft(state(2 * policy.window_size))


def test_drafting_stops_after_a_candidate_that_ends_the_output():
    assert not GroupingPolicy(8, 1).can_draft(state(1, is_finished=True))


@pytest.mark.parametrize("window_size", [2, 3, 8, 32])
def test_ready_with_a_candidate_for_all_rows_but_the_last(window_size):
    """W rows are the last committed token and W - 1 candidates."""
    policy = GroupingPolicy(window_size, 4)
    assert policy.is_ready(state(window_size - 1))
    assert policy.is_ready(state(window_size))
    assert window_size == 2 or not policy.is_ready(state(window_size - 2))


def test_ready_when_a_candidate_finished():
    assert GroupingPolicy(8, 4).is_ready(state(1, is_finished=True))
    assert not GroupingPolicy(8, 4).is_ready(state(1))


def test_ready_after_the_drafting_deadline_however_few_the_candidates():
    policy = GroupingPolicy(8, 4)
    assert not policy.is_ready(state(1, steps_drafting=policy.max_steps_drafting - 1))
    assert policy.is_ready(state(1, steps_drafting=policy.max_steps_drafting))


@given(POLICIES, st.integers(0, 1000))
def test_without_a_candidate_nobody_is_ready(policy, steps):
    assert not policy.is_ready(state(0, steps_drafting=steps))


def test_nothing_is_launched_while_nobody_is_ready():
    policy = GroupingPolicy(8, 1)
    assert not policy.should_launch([], 1)
    assert not policy.should_launch([state(3), state(0)], 1)


def test_launched_when_a_group_is_ready():
    policy = GroupingPolicy(8, 2)
    drafting = [state(3)] * 5
    assert not policy.should_launch([state(7), *drafting], MANY_ROWS)
    assert policy.should_launch([state(7), state(7), *drafting], MANY_ROWS)


def test_launched_when_all_there_are_is_ready_though_they_are_fewer_than_a_group():
    policy = GroupingPolicy(8, 4)
    assert policy.should_launch([state(7)], MANY_ROWS)
    assert policy.should_launch([state(7), state(9)], MANY_ROWS)
    assert not policy.should_launch([state(7), state(6)], MANY_ROWS)


def test_launched_when_the_ready_windows_fill_a_pass():
    policy = GroupingPolicy(8, 4)
    waiting = [state(1)] * 4
    assert policy.should_launch([state(7), state(15), *waiting], max_rows=16)
    assert not policy.should_launch([state(7), state(15), *waiting], max_rows=17)


def test_launched_when_the_oldest_ready_request_has_waited_its_deadline():
    policy = GroupingPolicy(32, 4)
    others = [state(3)] * 8
    early, late = policy.max_steps_ready - 1, policy.max_steps_ready
    assert not policy.should_launch([state(31, steps_ready=early), *others], MANY_ROWS)
    assert policy.should_launch([state(31, steps_ready=late), *others], MANY_ROWS)


@given(POLICIES, st.data())
def test_a_ready_request_is_launched_at_its_deadline_whoever_else_there_is(policy, data):
    others = data.draw(st.lists(states(policy), max_size=6))
    assert policy.should_launch([*others, state(policy.window_size, steps_ready=policy.max_steps_ready)], MANY_ROWS)
    assert 1 <= policy.max_steps_ready <= policy.window_size


@given(POLICIES, st.data())
def test_the_order_of_requests_does_not_matter(policy, data):
    drawn = data.draw(st.lists(states(policy), max_size=6))
    rows = data.draw(st.integers(1, 200))
    shuffled = data.draw(st.permutations(drawn))
    assert policy.should_launch(drawn, rows) == policy.should_launch(shuffled, rows)
