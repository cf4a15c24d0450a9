"""The output collector: each token, character and log-probability is handed out exactly once, however it is asked."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm42.cache import BlockPool
from llm42.engine.collect import OutputCollector, failure
from llm42.engine.engine import RequestGroup
from llm42.engine.request import FinishReason, Request, SequenceSpec
from llm42.engine.text import OutputText
from llm42.sampling.logprobs import TokenLogprobs
from llm42.sampling.params import SamplingParams

LETTERS = "abcdefgh"


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def new_stream(self, *, skip_special_tokens):
        assert skip_special_tokens
        return self

    def step(self, token_id):
        return LETTERS[token_id]

    def flush(self):
        return ""

    def token_text(self, token_id):
        return LETTERS[token_id]


def scored(token_id: int) -> TokenLogprobs:
    best = 0 if token_id else 1
    return TokenLogprobs(token_id, -2.0 - token_id, 3, ((best, -0.5), (7, -1.5)))


def make_group(num_sequences: int = 1, **fields) -> RequestGroup:
    params = SamplingParams(**{"max_tokens": 8, "logprobs": 2, "n": num_sequences, **fields})
    sequences = []
    for index in range(num_sequences):
        spec = SequenceSpec("request", index, (1, 2, 3), params, 40 + index, 8, frozenset())
        sequences.append(Request(spec, BlockPool(2, 2), OutputText(Letters(), params)))
    return RequestGroup("request", "bcd", tuple(sequences))


def commit(request: Request, tokens: list[int]) -> None:
    """Commit tokens as passes would."""
    for token in tokens:
        if request.ledger.is_prefilling:
            request.ledger.advance(range(3), [token])
        else:
            request.ledger.draft(token)
        request.accept(1, [scored(token)])


@given(st.lists(st.integers(0, 5), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_deltas_join_to_the_whole_wherever_they_are_taken(tokens, takes):
    group = make_group(stop="never")
    streamed, whole = OutputCollector(group, Letters()), OutputCollector(group, Letters())
    (request,) = group.sequences
    deltas = []
    for token, is_taken in zip(tokens, takes, strict=True):
        commit(request, [token])
        if is_taken:
            deltas += streamed.take().outputs
    deltas += streamed.take().outputs
    (expected,) = whole.take().outputs
    assert "".join(delta.text for delta in deltas) == expected.text == "".join(LETTERS[i] for i in tokens)
    assert list(chain.from_iterable(delta.token_ids for delta in deltas)) == expected.token_ids == tokens
    assert list(chain.from_iterable(delta.logprobs for delta in deltas)) == expected.logprobs
    assert deltas[-1].cumulative_logprob == expected.cumulative_logprob == sum(-2.0 - token for token in tokens)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_nothing_new_gives_no_output():
    group = make_group()
    collector = OutputCollector(group, Letters())
    assert collector.take().outputs == []
    commit(group.sequences[0], [0])
    assert len(collector.take().outputs) == 1
    assert collector.take().outputs == []
    assert not collector.take().finished


def test_the_chosen_token_comes_first_and_keeps_its_rank():
    group = make_group()
    commit(group.sequences[0], [4])
    (entry,) = OutputCollector(group, Letters()).take().outputs[0].logprobs
    assert [(key, value.logprob, value.rank, value.decoded_token) for key, value in entry.items()] == [
        (4, -6.0, 3, "e"),
        (0, -0.5, 1, "a"),
        (7, -1.5, 2, "h"),
    ]


def test_the_outputs_of_n_carry_their_index_and_seed_and_end_one_by_one():
    group = make_group(3)
    collector = OutputCollector(group, Letters())
    commit(group.sequences[2], [0] * 8)
    first = collector.take()
    assert [(o.index, o.seed, o.finish_reason) for o in first.outputs] == [(2, 42, "length")]
    assert not first.finished
    for sequence in group.sequences[:2]:
        commit(sequence, [1] * 8)
    last = collector.take()
    assert [(o.index, o.seed) for o in last.outputs] == [(0, 40), (1, 41)]
    assert last.finished


def test_prompt_logprobs_come_once_and_only_when_all_are_there():
    group = make_group(prompt_logprobs=2)
    collector = OutputCollector(group, Letters())
    (request,) = group.sequences
    request.prompt_logprobs.append(scored(2))
    assert collector.take().prompt_logprobs is None
    request.prompt_logprobs.append(scored(3))
    first, *others = collector.take().prompt_logprobs
    assert first is None
    assert [next(iter(entry)) for entry in others] == [2, 3]
    assert collector.take().prompt_logprobs is None


def test_metrics_are_of_all_sequences_together():
    group = make_group(2)
    for index, sequence in enumerate(group.sequences):
        sequence.stats.arrived = 10.0
        sequence.stats.scheduled = 11.0 + index
        sequence.stats.first_token = 13.0 + index
        sequence.stats.finished = 20.0 + index
        sequence.stats.num_windows = 3
        sequence.stats.num_rollbacks = index
    metrics = OutputCollector(group, Letters()).take().metrics
    assert (metrics.queue_time_s, metrics.time_to_first_token_s, metrics.total_time_s) == (1.0, 3.0, 11.0)
    assert (metrics.num_windows, metrics.num_rollbacks) == (6, 1)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_failed_sequence_is_a_failure_with_its_cause_and_a_cancelled_one_is_none(reason):
    group = make_group(2)
    assert failure(group) is None
    group.sequences[1].finish(reason, "out of luck" if reason is FinishReason.ERROR else None)
    expected = "request: out of luck" if reason is FinishReason.ERROR else None
    assert failure(group) == expected
    output = OutputCollector(group, Letters()).take()
    assert [completion.finish_reason for completion in output.outputs] == [reason.value]
    assert output.error == ("out of luck" if expected else None)
