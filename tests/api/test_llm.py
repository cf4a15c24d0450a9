"""`LLM` as users of vLLM expect it: what goes in, what comes out under which name, and that the numbers agree."""

from __future__ import annotations

import io
import math
import sys
import threading
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import llm42
from harness import bits
from llm42 import LLM, CompletionOutput, EngineConfig, Logprob, RequestError, RequestOutput, SamplingParams
from llm42.sampling.noise import child_seed
from tiny_models import EOS_TOKEN_ID, IM_START, VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
EXACT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=3, deterministic=True)
PROMPT = {"prompt_token_ids": [261, 438, 81, 17]}


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    (output,) = outputs
    (completion,) = output.outputs
    return completion


def forced(token_id: int, **fields) -> SamplingParams:
    """Parameters under which (almost) every token is ``token_id``."""
    return SamplingParams(temperature=0.0, logit_bias={token_id: 100.0}, **fields)


# Names


def test_every_public_name_can_be_imported():
    assert {"LLM", "AsyncLLM", "SamplingParams", "EngineConfig", "RequestOutput", "CompletionOutput", "Logprob"} <= set(
        llm42.__all__
    )
    assert all(getattr(llm42, name).__module__.startswith("llm42.") for name in llm42.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = llm42.Llm


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (RequestOutput, "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics"),
        (CompletionOutput, "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"),
        (Logprob, "logprob rank decoded_token"),
        (
            llm42.RequestMetrics,
            "queue_time_s time_to_first_token_s total_time_s num_windows num_rollbacks num_recomputed_tokens",
        ),
        (
            EngineConfig,
            "mode kernels dtype window_size verify_batch_size max_num_seqs max_num_batched_tokens kv_cache_bytes",
        ),
    ],
)
def test_results_and_configuration_have_the_promised_names(kind, names):
    assert set(names.split()) <= {field.name for field in fields_of(kind)}


def test_the_model_can_be_asked_where_it_is_and_how_it_runs(llm, model):
    assert llm.model_path == Path(model)
    assert llm.config.canonical_rows == 64
    assert llm.max_model_len == 1200
    assert llm.tokenizer.vocab_size == VOCAB_SIZE
    assert llm.system_fingerprint.startswith("fp_")
    assert llm.contract["canonical_class"] == {"rows": [64], "logit_rows": [16]}


# Prompts and parameters


def test_text_and_token_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode("The capital of France")
    from_text, from_ids = llm.generate(["The capital of France", {"prompt_token_ids": ids}], GREEDY)
    assert (from_text.prompt, from_ids.prompt) == ("The capital of France", None)
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == ids
    assert only([from_text]).token_ids == only([from_ids]).token_ids


def test_a_single_prompt_is_a_list_of_one(llm):
    expected = only(llm.generate(["a river"], GREEDY)).token_ids
    assert only(llm.generate("a river", GREEDY)).token_ids == expected
    ids = {"prompt_token_ids": llm.tokenizer.encode("a river")}
    assert only(llm.generate(ids, [GREEDY])).token_ids == expected
    assert only(llm.generate(iter(["a river"]), GREEDY)).token_ids == expected


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


def test_without_parameters_the_defaults_hold(llm):
    completion = only(llm.generate(PROMPT))
    assert len(completion.token_ids) <= 16
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_outputs_come_in_the_order_of_the_prompts_whoever_ends_first(llm):
    lengths = [30, 1, 12, 5, 20]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    prompts = [f"Story number {index}" for index in range(5)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert len({output.request_id for output in outputs}) == 5
    assert all(output.finished for output in outputs)


def test_token_ids_may_be_numpy_integers_and_tuples(llm):
    numpy = pytest.importorskip("numpy")
    expected = only(llm.generate(PROMPT, GREEDY)).token_ids
    output = llm.generate({"prompt_token_ids": tuple(numpy.array(PROMPT["prompt_token_ids"]))}, GREEDY)
    assert only(output).token_ids == expected
    assert all(type(token_id) is int for token_id in output[0].prompt_token_ids)


def test_the_longest_request_that_fits_goes_through(make_llm):
    with make_llm(max_model_len=40, kv_cache_bytes=None) as llm:
        for max_tokens in (8, None):
            params = replace(GREEDY, max_tokens=max_tokens, deterministic=True)
            (output,) = llm.generate({"prompt_token_ids": list(range(3, 35))}, params)
            assert len(output.outputs[0].token_ids) == 8
            assert output.outputs[0].finish_reason == "length"


# Text and the reasons to end


def test_text_is_the_decoded_tokens(llm):
    completion = only(llm.generate("Once upon a time", replace(GREEDY, max_tokens=40)))
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_end_of_sequence_ends_an_output_and_is_not_in_its_text(llm, deterministic):
    params = forced(EOS_TOKEN_ID, min_tokens=3, max_tokens=20, deterministic=deterministic)
    completion = only(llm.generate(PROMPT, params))
    assert len(completion.token_ids) == 4
    assert completion.token_ids[-1] == EOS_TOKEN_ID
    assert EOS_TOKEN_ID not in completion.token_ids[:-1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])
    on = only(llm.generate(PROMPT, replace(params, ignore_eos=True, min_tokens=0)))
    assert (on.token_ids, on.finish_reason) == ([EOS_TOKEN_ID] * 20, "length")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_token_ends_an_output_and_is_shown_only_on_request(llm, keep):
    params = replace(GREEDY, max_tokens=12, include_stop_str_in_output=keep)
    free = only(llm.generate(PROMPT, params)).token_ids
    stop_id = free[7]
    end = free.index(stop_id) + 1
    completion = only(llm.generate(PROMPT, replace(params, stop_token_ids=[stop_id])))
    assert completion.token_ids == free[:end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)
    assert completion.text == llm.tokenizer.decode(free[:end] if keep else free[: end - 1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_an_output_before_it_or_after_it(llm, deterministic, keep):
    params = replace(GREEDY, max_tokens=40, deterministic=deterministic)
    text = only(llm.generate("Once upon", params)).text
    stop = text[20:23]
    at = text.index(stop)
    stopping = replace(params, stop=["never in the text", stop], include_stop_str_in_output=keep)
    completion = only(llm.generate("Once upon", stopping))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: at + (len(stop) if keep else 0)]
    assert len(completion.token_ids) < 40


def test_special_tokens_are_in_the_text_only_on_request(llm):
    params = forced(1, max_tokens=3, ignore_eos=True)
    assert only(llm.generate(PROMPT, params)).text == ""
    assert only(llm.generate(PROMPT, replace(params, skip_special_tokens=False))).text == IM_START * 3


# Log-probabilities


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_one_dict_per_token_with_the_chosen_and_the_best(llm, deterministic):
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=20, logprobs=4, ignore_eos=True)
    completion = only(llm.generate(PROMPT, replace(params, deterministic=deterministic)))
    assert len(completion.logprobs) == len(completion.token_ids) == 20
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        ranked = sorted(entry.values(), key=lambda value: value.rank)
        assert [value.rank for value in ranked[:4]] == [1, 2, 3, 4]
        assert len(entry) == (4 if entry[token_id].rank <= 4 else 5)
        assert [value.logprob for value in ranked] == sorted((v.logprob for v in ranked), reverse=True)
        assert all(isinstance(value, Logprob) and value.logprob <= 0.0 for value in ranked)
        assert all(value.decoded_token == llm.tokenizer.token_text(key) for key, value in entry.items())
    chosen = [entry[token_id] for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert any(value.rank > 4 for value in chosen)
    assert completion.cumulative_logprob == pytest.approx(math.fsum(value.logprob for value in chosen))


def test_zero_logprobs_are_the_chosen_tokens_only(llm):
    completion = only(llm.generate(PROMPT, replace(GREEDY, logprobs=0)))
    assert [list(entry) for entry in completion.logprobs] == [[token_id] for token_id in completion.token_ids]
    assert all(value.rank == 1 for entry in completion.logprobs for value in entry.values())


def test_prompt_logprobs_have_none_for_the_first_token_and_a_dict_for_each_other(llm):
    ids = [5 + 7 * index % 300 for index in range(70)]
    (output,) = llm.generate({"prompt_token_ids": ids}, replace(GREEDY, prompt_logprobs=2))
    first, *others = output.prompt_logprobs
    assert first is None
    assert [next(iter(entry)) for entry in others] == ids[1:]
    assert all({1, 2} <= {value.rank for value in entry.values()} for entry in others)
    (short,) = llm.generate({"prompt_token_ids": ids[:1]}, replace(GREEDY, prompt_logprobs=2))
    assert short.prompt_logprobs == [None]
    (without,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert without.prompt_logprobs is None


def rescored(llm: LLM, params: SamplingParams) -> tuple[list, list]:
    """The generated tokens' log-probabilities, as generation gave them and as re-scoring gives them."""
    prompt = PROMPT["prompt_token_ids"]
    completion = only(llm.generate([PROMPT, *[f"neighbour {i}" for i in range(5)]], params)[:1])
    whole = {"prompt_token_ids": prompt + completion.token_ids}
    (output,) = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=params.logprobs))
    assert len(completion.token_ids) == 24
    return completion.logprobs, output.prompt_logprobs[len(prompt) :]


def test_rescoring_a_deterministic_output_gives_the_very_same_numbers(jitter_llm):
    generated, scored = rescored(jitter_llm, EXACT)
    assert generated == scored


def test_rescoring_an_ordinary_output_would_not(jitter_llm):
    generated, scored = rescored(jitter_llm, replace(EXACT, deterministic=False))
    assert generated != scored


# n and seeds


def test_each_of_n_outputs_is_the_output_of_its_seed(jitter_llm):
    (output,) = jitter_llm.generate(PROMPT, replace(EXACT, n=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert [completion.seed for completion in output.outputs] == [child_seed(7, index) for index in range(4)]
    assert output.outputs[0].seed == 7
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    for index, completion in enumerate(output.outputs):
        (alone,) = jitter_llm.generate(PROMPT, replace(EXACT, seed=completion.seed))
        assert bits(alone) == bits(output, index)


def test_without_a_seed_the_drawn_one_is_reported_and_gives_the_output_again(jitter_llm):
    unseeded = replace(EXACT, seed=None)
    first, second = jitter_llm.generate([PROMPT, PROMPT], unseeded)
    assert first.outputs[0].seed != second.outputs[0].seed
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    (again,) = jitter_llm.generate(PROMPT, replace(EXACT, seed=first.outputs[0].seed))
    assert bits(again) == bits(first)


# Chat


def test_chat_is_the_template_and_generate(llm):
    messages = [{"role": "user", "content": "What is a dog?"}]
    ids = llm.tokenizer.apply_chat_template(messages)
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids
    assert "assistant" in llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert bits(output) == bits(llm.generate({"prompt_token_ids": ids}, GREEDY)[0])


def test_several_conversations_are_answered_in_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs = llm.chat(conversations, [replace(GREEDY, max_tokens=n) for n in (3, 2, 1)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 2, 1]
    assert [output.outputs[0].token_ids for output in outputs] == [
        only(llm.chat(conversation, replace(GREEDY, max_tokens=n))).token_ids
        for conversation, n in zip(conversations, (3, 2, 1), strict=True)
    ]


def test_fields_of_the_chat_template_reach_it(llm):
    messages = [{"role": "user", "content": "hi"}]
    (closed,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert closed.prompt_token_ids == llm.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    (own,) = llm.chat(messages, GREEDY, chat_template="{{ mood }}: {{ messages[0]['content'] }}", mood="calm")
    assert llm.tokenizer.decode(own.prompt_token_ids) == "calm: hi"


# Queue, metrics, progress, life and death


def test_more_prompts_than_the_queue_holds_go_through(make_llm):
    with make_llm(max_queue_len=3, max_num_seqs=2) as llm:
        params = replace(EXACT, n=2, max_tokens=6)
        outputs = llm.generate([f"prompt {index}" for index in range(9)], params)
        assert [len(output.outputs) for output in outputs] == [2] * 9
        assert all(len(completion.token_ids) == 6 for output in outputs for completion in output.outputs)


def test_metrics_count_windows_cached_tokens_and_time(llm):
    prompt = {"prompt_token_ids": [11 + 3 * index % 400 for index in range(50)]}
    cold, hot = (llm.generate(prompt, replace(EXACT, max_tokens=60))[0].metrics for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert hot.num_cached_tokens == 48
    assert min(cold.num_windows, hot.num_windows) >= 2
    for metrics in (cold, hot):
        assert 0.0 <= metrics.queue_time_s <= metrics.time_to_first_token_s < metrics.total_time_s < 60.0
        assert metrics.num_preemptions == 0
    ordinary = llm.generate(prompt, replace(EXACT, deterministic=False))[0].metrics
    assert (ordinary.num_windows, ordinary.num_rollbacks, ordinary.num_recomputed_tokens) == (0, 0, 0)


def test_rollbacks_are_counted_where_the_fast_path_differs(jitter_llm):
    metrics = [output.metrics for output in jitter_llm.generate([f"request {i}" for i in range(8)], EXACT)]
    assert sum(m.num_rollbacks for m in metrics) > 0
    assert sum(m.num_recomputed_tokens for m in metrics) >= sum(m.num_rollbacks for m in metrics)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only_and_can_be_switched_off(llm, monkeypatch, capfd):
    llm.generate(["a", "b", "c"], GREEDY)
    assert capfd.readouterr() == ("", "")
    for use_tqdm, is_shown in ((True, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=use_tqdm)
        assert ("3/3" in terminal.getvalue() and "tok/s" in terminal.getvalue()) is is_shown
        assert bool(terminal.getvalue()) is is_shown


def test_a_closed_engine_says_so(make_llm):
    with make_llm() as llm:
        assert only(llm.generate(PROMPT, GREEDY)).token_ids
    for use in (
        lambda: llm.generate(PROMPT),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.tokenizer,
    ):
        with pytest.raises(RequestError, match="engine is closed"):
            use()
    llm.close()


def test_two_threads_may_generate_at_once(jitter_llm):
    params = [replace(EXACT, seed=seed) for seed in range(3)]
    expected = [bits(jitter_llm.generate(PROMPT, each)[0]) for each in params]
    got: dict[int, list] = {}

    def work(name: int) -> None:
        got[name] = [bits(jitter_llm.generate([PROMPT, f"thread {name}"], each)[0]) for each in params]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: expected, 1: expected}


def test_every_pass_runs_with_the_thread_count_of_the_contract(llm, monkeypatch):
    """Another engine, or the user, may have set PyTorch's thread count since this engine was made."""
    seen = []
    runner = llm._engine.core.runner
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda work: (seen.append(torch.get_num_threads()), execute(work))[1])
    torch.set_num_threads(2)
    try:
        llm.generate(PROMPT, GREEDY)
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {llm.contract["num_threads"]} == {1}


# Modes


@pytest.mark.parametrize("kernels", ["portable", "jitter"])
def test_an_ordinary_request_alone_is_the_same_with_and_without_verification(make_llm, kernels):
    params = [GREEDY, replace(EXACT, deterministic=False), SamplingParams(seed=1, top_p=0.7, max_tokens=30)]
    with make_llm(mode="verify", kernels=kernels) as verify, make_llm(mode="off", kernels=kernels) as off:
        for each in params:
            assert bits(verify.generate(PROMPT, each)[0]) == bits(off.generate(PROMPT, each)[0])


def test_mode_off_refuses_deterministic_requests_and_says_what_to_do(make_llm):
    with make_llm(mode="off") as llm:
        with pytest.raises(ValueError, match=r"deterministic=True is refused: .*mode='off'.*mode='auto'"):
            llm.generate(PROMPT, EXACT)
        assert only(llm.generate(PROMPT, GREEDY)).token_ids
