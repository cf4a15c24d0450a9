"""/llm42/events: what is told of a request's tokens while they happen adds up to what the request returns."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2

from llm42.server import events

NAME = "watched"


def watch(server, name, opened):
    """All events of a request; calls `opened` as soon as the stream is there."""
    found = []
    with httpx2.stream("GET", f"{server.url}/llm42/events/{name}", timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == ": watching":
                opened()
            elif line == "data: [DONE]":
                return found
            elif line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream ended without [DONE]")


def replay(found):
    """Each output's committed token ids, with the number of candidates that came true and that were rolled back."""
    outputs, num_confirmed, num_rolled_back = {}, 0, 0
    for event in found:
        output = outputs.setdefault(event["choice"], {"committed": [], "candidates": [], "finished": False})
        committed, candidates, rolled_back = (
            [token["id"] for token in event[kind]] for kind in ("committed", "candidates", "rolled_back")
        )
        assert not output["finished"], "an event after the last one"
        assert event["position"] == len(output["committed"])
        before = output["candidates"]
        if rolled_back:
            num_kept = len(before) - len(rolled_back)
            assert before[num_kept:] == rolled_back, "something else than the last candidates was dropped"
            assert before[:num_kept] == (committed + candidates)[:num_kept]
            num_rolled_back += len(rolled_back)
        else:
            num_kept = len(before)
            assert before == (committed + candidates)[:num_kept], "a candidate was neither committed nor rolled back"
        num_confirmed += min(num_kept, len(committed))
        output["committed"] += committed
        output["candidates"] = candidates
        output["finished"] = event["finished"]
    assert all(output["finished"] and not output["candidates"] for output in outputs.values())
    committed = [outputs[index]["committed"] for index in sorted(outputs)]
    return committed, num_confirmed, num_rolled_back


def ask(client, name=NAME, **fields):
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Write a story about a river."}],
        **{"max_tokens": 48, "n": 3, "seed": 3, "temperature": 1.0, "logprobs": True, **fields},
        extra_headers={"X-Request-Id": name},
        extra_body={"deterministic": True, "return_token_ids": True, "ignore_eos": True},
    )


def said(answer):
    return [(choice.token_ids, choice.logprobs) for choice in answer.choices]


def test_replaying_the_events_of_a_request_gives_its_tokens_and_watching_changes_nothing(server, client):
    unwatched = ask(client)
    with ThreadPoolExecutor(1) as pool:
        answers = []
        found = watch(server, NAME, lambda: answers.append(pool.submit(ask, client)))
        watched = answers[0].result()
    assert said(watched) == said(unwatched)
    committed, num_confirmed, num_rolled_back = replay(found)
    assert committed == [choice.token_ids for choice in watched.choices]
    assert num_confirmed > 0
    assert num_rolled_back > 0
    assert num_rolled_back == watched.usage.llm42["recomputed_tokens"]
    texts = [token["text"] for event in found for token in event["committed"] if event["choice"] == 0]
    assert texts == [entry.token for entry in watched.choices[0].logprobs.content]


def test_one_who_comes_late_is_told_what_happened_so_far(server, client):
    stream = ask(client, n=1, max_tokens=100, stream=True)
    chunks = [next(stream)]
    found = watch(server, NAME, lambda: None)
    chunks += stream
    ((token_ids,), _, _) = replay(found)
    assert token_ids == [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids]
    assert found[0]["position"] == 0


def test_the_events_of_a_request_whose_client_goes_away_end(server, client):
    stream = ask(client, n=1, max_tokens=1000, stream=True)
    next(stream)
    found = watch(server, NAME, stream.close)
    assert found[-1]["finished"]
    ((token_ids,), _, _) = replay(found)
    assert 0 < len(token_ids) < 1000


def test_a_request_that_never_comes_is_not_found(server, monkeypatch):
    monkeypatch.setattr(events, "_PATIENCE_S", 0.01)
    (told,) = watch(server, "nobody", lambda: None)
    assert told["error"]["code"] == "request_not_found"
