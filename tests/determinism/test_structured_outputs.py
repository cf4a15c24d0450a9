"""Structured outputs keep the promise: the form follows the ledger through drafts, windows, rollbacks and preemption.

The oracle asks a matcher made anew for every token; the engine keeps one for each output. Whatever ends by itself is
checked against its form by other means than a grammar.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from harness import Call, Reference, Schedule, assert_equals_oracle, mixed_workload, run
from llm42 import SamplingParams, StructuredOutputs
from llm42.sampling.grammar import Grammar
from tiny_models import VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 4},
        "is": {"enum": ["cat", "dog"]},
        "on": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["id", "name", "is", "on"],
}
REGEX = r"[A-Z][a-z]{3,9}( [a-z]{2,5}){2}\."
CHOICES = ["yes", "no", "maybe so", 'the "third" one\n']
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [{"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def is_instance(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["id", "name", "is", "on"]
        and type(value["id"]) is int
        and 0 <= value["id"] <= 99
        and len(value["name"]) <= 4
        and value["is"] in ("cat", "dog")
        and 1 <= len(value["on"]) <= 2
        and all(type(item) is bool for item in value["on"])
    )


def is_call(text: str) -> bool:
    return is_instance(re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)[1])


FORMS = [
    (StructuredOutputs(json=SCHEMA), is_instance),
    (StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), is_instance),
    (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    (StructuredOutputs(regex=REGEX), lambda text: re.fullmatch(REGEX, text)),
    (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
    (
        StructuredOutputs(grammar='root ::= "(" root ")" | "x" [0-9]+ "y"'),
        lambda text: re.fullmatch(r"(\(*)x\d+y(\)*)", text),
    ),
    (StructuredOutputs(structural_tag=CALL), is_call),
]


def workload() -> list[Call]:
    """Two requests of every form, one greedy and one with everything that changes logits, and requests without one."""
    rng = random.Random(4)
    calls = mixed_workload(VOCAB_SIZE)[:4]
    for form, _ in FORMS:
        for fields in (
            {"temperature": 0.0},
            {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {9: 3.0}},
        ):
            prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 17, 64))))
            common = {"max_tokens": 48, "seed": rng.randrange(2**64), "logprobs": 2, "deterministic": True}
            calls.append(Call(prompt, SamplingParams(**common, **fields, structured_outputs=form)))
    return calls


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("forms"), "llama", "jitter", "bfloat16", calls=workload())


def test_what_ends_by_itself_has_its_form(ref):
    checks = dict(FORMS)
    ended = [
        (call.params.structured_outputs, expected.text)
        for call, expected in zip(ref.calls, ref.expected, strict=True)
        if call.params.structured_outputs is not None and expected.finish_reason == "stop"
    ]
    assert {form.kind for form, _ in ended} >= {"json", "regex", "choice", "grammar"}
    for form, text in ended:
        assert checks[form](text), f"{form.kind}: {text!r}"


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_candidates_that_break_the_form_change_nothing(ref, rate):
    ran = run(ref.engine(), ref.calls, Schedule(adversary_rate=rate, neighbours=3))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_windows") > 0
    assert ran.total("num_rollbacks") > 0


@pytest.mark.parametrize("mode", ["verify", "auto", "invariant"])
def test_every_mode_gives_the_same_form(ref, mode):
    schedule = Schedule(order="shuffled", steps_between_arrivals=2, neighbours=3)
    assert_equals_oracle(ref, run(ref.engine(mode=mode), ref.calls, schedule))


def test_preemption_in_mid_form_changes_nothing(ref):
    ran = run(ref.engine(), ref.calls, Schedule(preempt_rate=0.2, adversary_rate=0.1))
    assert_equals_oracle(ref, ran)
    assert ran.total("num_preemptions") > 10


def test_a_matcher_that_is_never_rewound_is_found_out(ref, monkeypatch):
    """The negative control: the same run, with a matcher that only ever goes on."""

    def follow_only(self, tokens):
        for token_id in tokens[len(self._accepted) :]:
            if not self._matcher.accept_token(token_id):
                return False
            self._accepted.append(token_id)
        return True

    monkeypatch.setattr(Grammar, "_follow", follow_only)
    with pytest.raises(AssertionError, match="request"):
        assert_equals_oracle(ref, run(ref.engine(), ref.calls, Schedule(adversary_rate=0.2)))


def test_ordinary_requests_have_their_form_too(ref):
    calls = [
        Call(call.prompt_token_ids, SamplingParams(max_tokens=70, seed=7, structured_outputs=form))
        for call, (form, _) in zip(ref.calls, FORMS, strict=False)
    ]
    for (form, check), output in zip(FORMS, run(ref.engine(), calls).outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length")
        assert completion.finish_reason == "length" or check(completion.text), f"{form.kind}: {completion.text!r}"
