"""`AsyncLLM`: streams of committed deltas that join to the offline output, and end when nobody listens."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing, contextmanager
from dataclasses import replace

import pytest

from harness import bits, mixed_workload
from llm42 import AsyncLLM, QueueFullError, RequestError, RequestOutput, RequestTimeoutError, SamplingParams
from tiny_models import VOCAB_SIZE

PROMPT = {"prompt_token_ids": [261, 438, 81, 17]}
EXACT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=2, deterministic=True)
LONG = replace(EXACT, max_tokens=1000, logprobs=None)


@pytest.fixture(scope="module")
def make_async(model, fields):
    """A function of engine fields to a context that holds a new `AsyncLLM` of the tiny Llama."""

    @contextmanager
    def make(**own):
        llm = AsyncLLM(model, **{**fields, **own})
        try:
            yield llm
        finally:
            llm.close()

    return make


@pytest.fixture(scope="module")
def jittery_async(make_async):
    with make_async(kernels="jitter") as llm:
        yield llm


@pytest.fixture
def async_llm(jittery_async):
    """The shared engine; afterwards it must be idle, with all its blocks."""
    yield jittery_async
    wait_until_clean(jittery_async)


def is_clean(llm: AsyncLLM) -> bool:
    core = llm._engine.core
    return not core.has_work and core.pool.num_free == core.pool.num_usable and not llm._streams


def wait_until_clean(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 10.0
    while not is_clean(llm):
        assert time.monotonic() < deadline, "the engine still works for a request that nobody reads"
        time.sleep(0.005)
    llm._engine.core.pool.check()


def joined(deltas: list[RequestOutput]) -> RequestOutput:
    """The deltas of a stream as one output; each thing may come once only."""
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    last = deltas[-1]
    completions = {}
    prompt_logprobs = None
    for delta in deltas:
        assert (delta.request_id, delta.prompt_token_ids) == (last.request_id, last.prompt_token_ids)
        if delta.prompt_logprobs is not None:
            assert prompt_logprobs is None, "the prompt's log-probabilities came twice"
            prompt_logprobs = delta.prompt_logprobs
        for new in delta.outputs:
            old = completions.get(new.index)
            if old is not None:
                assert old.finish_reason is None, "something came after the end"
                new = replace(  # noqa: PLW2901
                    new,
                    text=old.text + new.text,
                    token_ids=old.token_ids + new.token_ids,
                    logprobs=None if new.logprobs is None else old.logprobs + new.logprobs,
                )
            completions[new.index] = new
    return replace(last, outputs=[completions[i] for i in sorted(completions)], prompt_logprobs=prompt_logprobs)


async def collect(llm: AsyncLLM, prompt, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def collect_rest(stream) -> list[RequestOutput]:
    return [output async for output in stream]


async def first_item(llm: AsyncLLM, params: SamplingParams = LONG):
    """A stream that has begun, and its first item with tokens."""
    stream = llm.generate(PROMPT, params)
    async for item in stream:
        if item.outputs and item.outputs[0].token_ids:
            return stream, item
    raise AssertionError("the stream ended without a token")


# What a stream says


@pytest.mark.parametrize("deterministic", [False, True])
def test_deltas_join_to_the_offline_output(async_llm, make_llm, deterministic):
    params = replace(EXACT, max_tokens=60, prompt_logprobs=1, deterministic=deterministic)
    deltas = asyncio.run(collect(async_llm, PROMPT, params))
    with make_llm(kernels="jitter") as llm:
        (expected,) = llm.generate(PROMPT, params)
    assert len(deltas) >= 2
    assert bits(joined(deltas)) == bits(expected)
    assert deltas[-1].outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


def test_deltas_of_a_text_with_a_stop_string_never_show_its_beginning(async_llm):
    """Of an ordinary request, since its tokens come one by one, and the stop string has several."""
    params = replace(EXACT, max_tokens=40, deterministic=False)
    free = joined(asyncio.run(collect(async_llm, PROMPT, params))).outputs[0].text
    stop = free[20:28]
    deltas = asyncio.run(collect(async_llm, PROMPT, replace(params, stop=stop)))
    assert len(deltas) > 5
    completion = joined(deltas).outputs[0]
    assert completion.text == free[: free.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_n_outputs_stream_side_by_side(async_llm):
    together = joined(asyncio.run(collect(async_llm, PROMPT, replace(EXACT, n=3))))
    assert [completion.index for completion in together.outputs] == [0, 1, 2]
    for index, completion in enumerate(together.outputs):
        alone = joined(asyncio.run(collect(async_llm, PROMPT, replace(EXACT, seed=completion.seed))))
        assert bits(alone) == bits(together, index)


def test_both_front_ends_give_the_same_bits_amid_forty_mixed_requests(async_llm, make_llm):
    calls = [
        replace(call, params=replace(call.params, max_tokens=min(24, call.params.max_tokens)))
        for call in mixed_workload(VOCAB_SIZE)
    ]
    ordinary = [replace(call, params=replace(call.params, deterministic=False)) for call in calls[:16]]
    prompts = [{"prompt_token_ids": list(call.prompt_token_ids)} for call in calls]

    async def serve() -> list[RequestOutput]:
        neighbours = [
            asyncio.create_task(collect(async_llm, {"prompt_token_ids": call.prompt_token_ids}, call.params))
            for call in ordinary
        ]
        requests = [collect(async_llm, *pair) for pair in zip(prompts, [c.params for c in calls], strict=True)]
        streams = await asyncio.gather(*requests)
        await asyncio.gather(*neighbours)
        return [joined(deltas) for deltas in streams]

    served = asyncio.run(serve())
    with make_llm(kernels="jitter") as llm:
        offline = llm.generate(prompts, [call.params for call in calls])
    assert [bits(output) for output in served] == [bits(output) for output in offline]
    assert sum(output.metrics.num_rollbacks for output in served) > 0


def test_nothing_is_shown_that_is_taken_back_later(make_async):
    """Small windows in large groups: while a group fills, drafts run on past what is verified next."""
    params = [replace(EXACT, seed=seed) for seed in range(8)]

    async def serve(llm: AsyncLLM) -> list[list[RequestOutput]]:
        return await asyncio.gather(*[collect(llm, PROMPT, each) for each in params])

    with make_async(kernels="jitter", window_size=4, verify_batch_size=16) as llm:
        streams = asyncio.run(serve(llm))
        alone = [joined(asyncio.run(collect(llm, PROMPT, each))).outputs[0].token_ids for each in params]
    assert sum(deltas[-1].metrics.num_rollbacks for deltas in streams) > 0
    for deltas, expected in zip(streams, alone, strict=True):
        seen: list[int] = []
        for delta in deltas:
            for completion in delta.outputs:
                seen += completion.token_ids
                assert seen == expected[: len(seen)]
        assert seen == expected


def test_a_hundred_concurrent_requests_are_served(make_async):
    async def serve(llm: AsyncLLM) -> list[list[RequestOutput]]:
        params = [SamplingParams(max_tokens=3 + i % 5, seed=i, deterministic=i % 2 == 0) for i in range(100)]
        return await asyncio.gather(*[collect(llm, f"prompt {i}", each) for i, each in enumerate(params)])

    with make_async(max_num_seqs=16) as llm:
        streams = asyncio.run(serve(llm))
        assert len(streams) == 100
        assert all(joined(deltas).outputs[0].token_ids for deltas in streams)
        wait_until_clean(llm)


def test_the_whole_output_is_one_item_with_the_bits_of_the_deltas(async_llm):
    params = replace(EXACT, n=2, prompt_logprobs=1)

    async def both():
        whole = [output async for output in async_llm.generate(PROMPT, params, whole=True)]
        return whole, await collect(async_llm, PROMPT, params)

    (whole,), deltas = asyncio.run(both())
    assert len(deltas) >= 2
    for index in range(2):
        assert bits(whole, index) == bits(joined(deltas), index)


def test_a_request_that_takes_too_long_is_an_error_and_cancelled(async_llm):
    async def run() -> None:
        with pytest.raises(RequestTimeoutError, match=r"did not finish within 0\.05 s"):
            async for _ in async_llm.generate(PROMPT, LONG, timeout_s=0.05):
                pass
        await asyncio.to_thread(wait_until_clean, async_llm)

    asyncio.run(run())


# Watching


@pytest.mark.parametrize("is_early", [True, False])
def test_events_replay_to_the_committed_tokens_and_show_rollbacks(make_async, is_early):
    params = replace(EXACT, max_tokens=200, logprobs=None)

    async def watch(llm: AsyncLLM):
        return [event async for event in llm.watch("watched")]

    async def run(llm: AsyncLLM):
        if is_early:
            watching = asyncio.create_task(watch(llm))
            await asyncio.sleep(0.05)
        stream = llm.generate(PROMPT, params, "watched")
        first = await anext(stream)
        if not is_early:
            watching = asyncio.create_task(watch(llm))
        return [first, *[item async for item in stream]], await watching

    with make_async(kernels="jitter", window_size=8) as llm:
        deltas, events = asyncio.run(run(llm))
        wait_until_clean(llm)
        assert not llm._watchers
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    committed, candidates, num_rolled_back = [], [], 0
    for event in events:
        assert event.position == len(committed)
        kept = candidates[: len(candidates) - len(event.rolled_back)]
        assert candidates[len(kept) :] == list(event.rolled_back)
        committed += event.committed
        candidates = list(event.candidates)
        assert [*event.committed, *event.candidates][: len(kept)] == kept
        num_rolled_back += len(event.rolled_back)
    assert committed == joined(deltas).outputs[0].token_ids
    assert num_rolled_back == deltas[-1].metrics.num_recomputed_tokens > 0


# Callers who leave


def test_breaking_out_of_a_stream_cancels_the_request(async_llm):
    async def leave() -> None:
        async with aclosing(async_llm.generate(PROMPT, LONG)) as stream:
            async for item in stream:
                if item.outputs:
                    break
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.to_thread(wait_until_clean, async_llm)

    asyncio.run(leave())


def test_a_plain_break_without_closing_the_stream_cancels_too(async_llm):
    async def leave() -> None:
        async for item in async_llm.generate(PROMPT, LONG):
            if item.outputs:
                break
        await asyncio.to_thread(wait_until_clean, async_llm)

    asyncio.run(leave())


def test_cancelling_the_task_cancels_the_request(async_llm):
    async def cancel() -> None:
        stream, _ = await first_item(async_llm)
        task = asyncio.create_task(collect_rest(stream))
        await asyncio.sleep(0)
        assert not is_clean(async_llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until_clean, async_llm)

    asyncio.run(cancel())


def test_a_cancelled_neighbour_changes_nothing(async_llm):
    async def serve() -> RequestOutput:
        stream, _ = await first_item(async_llm)
        task = asyncio.create_task(collect(async_llm, PROMPT, EXACT))
        await asyncio.sleep(0.02)
        await stream.aclose()
        return joined(await task)

    alone = joined(asyncio.run(collect(async_llm, PROMPT, EXACT)))
    assert bits(asyncio.run(serve())) == bits(alone)


def test_a_slow_reader_gets_everything_and_stops_nobody(async_llm):
    async def serve() -> tuple[list[RequestOutput], bool]:
        slow: list[RequestOutput] = []
        has_begun, others_done = asyncio.Event(), asyncio.Event()

        async def read_slowly() -> None:
            async for item in async_llm.generate(PROMPT, EXACT):
                slow.append(item)
                has_begun.set()
                await others_done.wait()

        task = asyncio.create_task(read_slowly())
        await has_begun.wait()
        await asyncio.gather(*[collect(async_llm, f"other {i}", EXACT) for i in range(5)])
        was_waiting = not task.done()
        others_done.set()
        await task
        return slow, was_waiting

    slow, was_waiting = asyncio.run(asyncio.wait_for(serve(), 30.0))
    assert was_waiting
    assert bits(joined(slow)) == bits(joined(asyncio.run(collect(async_llm, PROMPT, EXACT))))


def test_a_closed_event_loop_ends_its_requests_and_not_the_engine(async_llm):
    loop = asyncio.new_event_loop()
    stream, _ = loop.run_until_complete(first_item(async_llm))
    assert not is_clean(async_llm)
    loop.close()
    wait_until_clean(async_llm)
    del stream
    assert joined(asyncio.run(collect(async_llm, PROMPT, EXACT))).outputs[0].token_ids


# Limits, errors and the end


def test_a_full_queue_is_an_error_of_the_request_that_did_not_fit(make_async):
    async def serve(llm: AsyncLLM) -> list:
        requests = [collect(llm, PROMPT, replace(EXACT, seed=seed)) for seed in range(12)]
        return await asyncio.gather(*requests, return_exceptions=True)

    with make_async(max_queue_len=4, max_num_seqs=1) as llm:
        results = asyncio.run(serve(llm))
        refused = [result for result in results if isinstance(result, BaseException)]
        assert 0 < len(refused) < 12
        assert all(isinstance(error, QueueFullError) and "max_queue_len is 4" in str(error) for error in refused)
        assert all(len(joined(r).outputs[0].token_ids) == 24 for r in results if isinstance(r, list))
        wait_until_clean(llm)


def test_bad_input_is_an_error_of_its_own_request_only(async_llm):
    async def serve() -> list:
        bad = [("", EXACT), (PROMPT, replace(EXACT, max_tokens=5000)), ({"prompt_token_ids": [-1]}, EXACT)]
        requests = [collect(async_llm, *pair) for pair in [*bad, (PROMPT, EXACT)]]
        return await asyncio.gather(*requests, return_exceptions=True)

    *errors, good = asyncio.run(serve())
    assert [type(error) for error in errors] == [ValueError] * 3
    assert len(joined(good).outputs[0].token_ids) == 24


def test_a_failed_pass_ends_its_streams_with_the_cause_and_the_engine_goes_on(async_llm, monkeypatch):
    before = joined(asyncio.run(collect(async_llm, PROMPT, EXACT)))
    with monkeypatch.context() as patch:
        patch.setattr(async_llm._engine.core.runner, "execute", fail)
        with pytest.raises(RequestError, match="RuntimeError: out of luck"):
            asyncio.run(collect(async_llm, PROMPT, EXACT))
    assert bits(joined(asyncio.run(collect(async_llm, PROMPT, EXACT)))) == bits(before)


def fail(*_) -> None:
    raise RuntimeError("out of luck")


def test_an_engine_thread_that_dies_leaves_nobody_waiting(make_async, monkeypatch):
    async def serve(llm: AsyncLLM) -> list:
        stream, _ = await first_item(llm)
        monkeypatch.setattr(llm._engine.core.scheduler, "plan", fail)
        requests = [collect(llm, PROMPT, LONG) for _ in range(3)]
        return await asyncio.gather(collect_rest(stream), *requests, return_exceptions=True)

    with make_async() as llm:
        results = asyncio.run(asyncio.wait_for(serve(llm), 10.0))
        assert all(isinstance(error, RequestError) and "out of luck" in str(error) for error in results)
        with pytest.raises(RequestError, match="the engine failed with RuntimeError: out of luck"):
            asyncio.run(collect(llm, PROMPT, EXACT))


def test_closing_ends_running_and_waiting_requests_and_later_ones_are_refused(make_async):
    async def serve(llm: AsyncLLM) -> list:
        before = asyncio.all_tasks()
        stream, _ = await first_item(llm)
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG)) for _ in range(4)]
        await asyncio.sleep(0.05)
        await llm.aclose()
        results = await asyncio.gather(*tasks, collect_rest(stream), return_exceptions=True)
        results += await asyncio.gather(collect(llm, PROMPT, EXACT), return_exceptions=True)
        assert asyncio.all_tasks() == before
        return results

    with make_async(max_num_seqs=2) as llm:
        *ended, refused = asyncio.run(asyncio.wait_for(serve(llm), 10.0))
        assert all(isinstance(e, RequestError) and "closed while the request ran" in str(e) for e in ended)
        assert isinstance(refused, RequestError)
        assert "engine is closed" in str(refused)
        assert is_clean(llm)
        asyncio.run(llm.aclose())


def test_a_closed_engine_leaves_no_thread(make_async):
    before = set(threading.enumerate())
    with make_async() as llm:
        assert any(thread.name == "llm42-engine" for thread in set(threading.enumerate()) - before)
        asyncio.run(collect(llm, PROMPT, EXACT))
        asyncio.run(llm.aclose())
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
