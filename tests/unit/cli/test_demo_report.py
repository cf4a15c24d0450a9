"""The demo's comparison must see every difference, and its report must say what was measured."""

from __future__ import annotations

import io
import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llm42.cli.demo_report import (
    Answer,
    Comparison,
    Phase,
    answer_of,
    difference_view,
    first_difference,
    most_visible,
    report_table,
    split_texts,
)


def answer(token_ids=(1, 2, 3), text="one two three", logprob=-0.5):
    return Answer(tuple(token_ids), text, tuple(((token_id, struct.pack("<d", logprob)),) for token_id in token_ids))


def phase(*answers, num_tokens=100, seconds=4.0, windows=0, rollbacks=0, recomputed=0):
    return Phase(tuple(answers), num_tokens, seconds, windows, rollbacks, recomputed)


def output(token_ids, logprobs, text="x"):
    completion = SimpleNamespace(token_ids=token_ids, text=text, logprobs=logprobs)
    return SimpleNamespace(outputs=[completion])


def rendered(renderable, **console_options):
    file = io.StringIO()
    Console(file=file, width=100, **console_options).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [3, 2], 0),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [], 0),
    ],
)
def test_first_difference_is_the_first_unequal_place_or_the_end_of_the_shorter(a, b, expected):
    assert first_difference(a, b) == expected
    assert first_difference(b, a) == expected


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_sequences_agree_exactly_up_to_their_first_difference(a, b):
    i = first_difference(a, b)
    if i is None:
        assert a == b
    else:
        assert a[:i] == b[:i]
        assert a[i : i + 1] != b[i : i + 1]


@given(st.text(), st.text())
def test_split_texts_loses_nothing(a, b):
    common, a_end, b_end = split_texts(a, b)
    assert (common + a_end, common + b_end) == (a, b)


def test_split_texts_cuts_between_words():
    assert split_texts("the house is red", "the house is rust") == ("the house is ", "red", "rust")


def test_split_texts_of_a_prefix_cuts_at_its_end():
    assert split_texts("the house", "the house is red") == ("the house", "", " is red")


def test_identical_answers_are_identical():
    same = Comparison(phase(answer(), answer((7,))), phase(answer(), answer((7,))))
    assert same.is_identical
    assert (same.num_changed, same.num_logprobs_changed, same.num_prompts) == (0, 0, 2)


def test_one_different_token_is_not_identical():
    changed = Comparison(phase(answer((1, 2)), answer((7,))), phase(answer((1, 9)), answer((7,))))
    assert not changed.is_identical
    assert changed.differences() == {0: 1}
    assert changed.num_logprobs_changed == 1


def test_one_bit_of_a_logprob_is_not_identical_though_the_text_is():
    other = math.nextafter(-0.5, 0.0)
    changed = Comparison(phase(answer(), answer()), phase(answer(), answer(logprob=other)))
    assert not changed.is_identical
    assert (changed.num_changed, changed.num_logprobs_changed) == (0, 1)


@pytest.mark.parametrize("nothing", [(), (Answer((), "", ()),), (Answer((1,), "x", ()),)])
def test_answers_without_tokens_or_logprobs_prove_nothing(nothing):
    assert not Comparison(phase(*nothing), phase(*nothing)).is_identical


def test_a_missing_answer_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        Comparison(phase(answer(), answer()), phase(answer())).differences()


def test_answer_holds_every_logprob_entry_whatever_their_order():
    entry = SimpleNamespace
    one = output([5], [{5: entry(logprob=-0.1), 6: entry(logprob=-2.0)}])
    other = output([5], [{6: entry(logprob=-2.0), 5: entry(logprob=-0.1)}])
    third = output([5], [{5: entry(logprob=-0.1), 6: entry(logprob=-2.5)}])
    assert answer_of(one) == answer_of(other)
    assert answer_of(one) != answer_of(third)
    assert answer_of(one).token_ids == (5,)


def test_answer_without_logprobs_has_none():
    assert answer_of(output([5, 6], None)).logprobs == ()


def test_the_pair_shown_differs_early_but_not_at_the_first_token():
    assert most_visible({3: 20, 5: 4, 8: 0}) == 5
    assert most_visible({8: 0}) == 8


def test_difference_view_shows_both_answers_and_where_they_part_without_colour():
    comparison = Comparison(phase(answer((1, 2), "It is red.")), phase(answer((1, 3), "It is blue.")))
    text = rendered(difference_view("What colour?", comparison, 0), no_color=True)
    assert "What colour?" in text
    assert "It is ▸red." in text
    assert "It is ▸blue." in text
    assert "number 2" in text
    assert "\x1b" not in text


def test_difference_view_marks_the_ends_red_and_green_on_a_terminal():
    comparison = Comparison(phase(answer((1, 2), "It is red.")), phase(answer((1, 3), "It is blue.")))
    text = rendered(difference_view("?", comparison, 0), force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[31mred.\x1b[0m" in text
    assert "\x1b[32mblue.\x1b[0m" in text


def test_text_of_the_model_is_never_read_as_markup():
    comparison = Comparison(phase(answer((1, 2), "[bold]x[/bold]")), phase(answer((1, 3), "[link=/]y")))
    text = rendered(difference_view("[red]p", comparison, 0))
    assert "[red]p" in text
    assert "[bold]x[/bold]" in text.replace("▸", "")


def test_report_states_the_numbers_of_both_phases():
    ordinary = Comparison(phase(answer((1, 2)), answer()), phase(answer((1, 3)), answer(), num_tokens=300, seconds=2.0))
    deterministic = Comparison(
        phase(answer(), answer(), num_tokens=100, seconds=5.0, windows=10, rollbacks=1, recomputed=3),
        phase(answer(), answer(), num_tokens=300, seconds=2.5, windows=30, rollbacks=2, recomputed=5),
    )
    table = report_table("title", ordinary, deterministic, 64)
    cells = {row[0]: row[1:] for row in zip(*(column.cells for column in table.columns), strict=True)}
    assert cells["prompts whose text changed"] == ("1 of 2", "0 of 2")
    assert cells["prompts whose log-probabilities changed"] == ("1 of 2", "0 of 2")
    assert cells["verified windows"] == ("0", "40")
    assert cells["rollbacks"] == ("0", "3")
    assert cells["recomputed tokens (of all output tokens)"] == ("0 (0.0%)", "8 (2.0%)")
    assert cells["output tokens/s, one at a time"] == ("25.0", "20.0")
    assert cells["output tokens/s, batch of 64"] == ("150.0", "120.0")
