"""The promise through the server: 64 requests at once get, bit for bit, what `LLM.generate` gives one engine alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from openai import AsyncOpenAI

from llm42 import SamplingParams
from served import run_server

# Iterators of clients that went away may be collected while another thread runs; httpx2 then complains of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*aiter_raw:pytest.PytestUnraisableExceptionWarning")

NUM_REQUESTS = 64


@dataclass(frozen=True)
class Ask:
    """One request and how it is sent."""

    is_chat: bool
    text: str
    params: SamplingParams
    stream: bool
    dropped: bool
    """The client goes away after the first chunk."""

    @property
    def body(self):
        params = self.params
        return {
            "model": "tiny",
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "n": params.n,
            "top_p": params.top_p,
            "stream": self.stream,
            **({"messages": self.messages} if self.is_chat else {"prompt": self.text}),
            **({"logprobs": True, "top_logprobs": params.logprobs} if self.is_chat else {"logprobs": params.logprobs}),
            "extra_body": {"deterministic": params.deterministic, "return_token_ids": True, "ignore_eos": True},
        }

    @property
    def messages(self):
        return [{"role": "user", "content": self.text}]

    def prompt(self, tokenizer):
        return {"prompt_token_ids": tokenizer.apply_chat_template(self.messages)} if self.is_chat else self.text


def mixed_asks(*, deterministic=None):
    """Requests of every kind; two in three deterministic, unless all or none are to be."""
    rng = random.Random(42)
    asks = []
    for index in range(NUM_REQUESTS):
        stream = index % 2 == 0
        params = SamplingParams(
            max_tokens=rng.randrange(6, 20),
            temperature=rng.choice((0.0, 0.8, 1.4)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(2**63),
            n=rng.choice((1, 1, 1, 2)),
            logprobs=rng.randrange(4),
            ignore_eos=True,
            deterministic=index % 3 != 0 if deterministic is None else deterministic,
        )
        text = " ".join(
            rng.choice(("a token", "one", "bridge", "number 7", "Köln")) for _ in range(rng.randrange(1, 9))
        )
        asks.append(Ask(index % 4 < 2, text, params, stream, dropped=stream and rng.random() < 0.25))
    return asks


def exact(numbers):
    """Log-probabilities of one position, best first, as bits."""
    return tuple(number.hex() for number in numbers)


def offline_bits(llm, asks):
    """Of each output: token ids, log-probabilities of tokens, those of the best ones, seed."""
    outputs = llm.generate([ask.prompt(llm.tokenizer) for ask in asks], [ask.params for ask in asks])
    result = []
    for ask, output in zip(asks, outputs, strict=True):
        choices = []
        for choice in output.outputs:
            chosen = exact(entry[id_].logprob for id_, entry in zip(choice.token_ids, choice.logprobs, strict=True))
            ranked = [sorted(entry.values(), key=lambda value: value.rank) for entry in choice.logprobs]
            if ask.is_chat:
                best = tuple(exact(value.logprob for value in values[: ask.params.logprobs]) for values in ranked)
            else:  # by text, where the better of two tokens with the same text stands for both
                best = tuple(
                    tuple({value.decoded_token: value.logprob.hex() for value in reversed(values)}.items())
                    for values in ranked
                )
            choices.append((tuple(choice.token_ids), chosen, best, choice.text, choice.seed))
        result.append(choices)
    return result


class Collected:
    """The parts of one choice, as they come."""

    def __init__(self):
        self.token_ids, self.chosen, self.best, self.text, self.seed = (), (), (), "", None

    def add(self, choice, text):
        self.token_ids += tuple(choice.token_ids)
        self.text += text or ""
        self.seed = choice.seed
        if choice.logprobs is None:
            return
        if hasattr(choice.logprobs, "content"):
            entries = choice.logprobs.content
            self.chosen += exact(entry.logprob for entry in entries)
            self.best += tuple(exact(top.logprob for top in entry.top_logprobs) for entry in entries)
        else:
            self.chosen += exact(choice.logprobs.token_logprobs)
            self.best += tuple(
                tuple((text, value.hex()) for text, value in top.items()) for top in choice.logprobs.top_logprobs
            )

    @property
    def bits(self):
        return self.token_ids, self.chosen, self.best, self.text, self.seed


async def send(client, ask):
    """The bits of each choice; None if the client went away."""
    choices = {}
    answer = await (client.chat.completions if ask.is_chat else client.completions).create(**ask.body)
    if not ask.stream:
        for choice in answer.choices:
            text = choice.message.content if ask.is_chat else choice.text
            choices.setdefault(choice.index, Collected()).add(choice, text)
    else:
        async for chunk in answer:
            if ask.dropped:
                await answer.close()
                return None
            (choice,) = chunk.choices
            if choice.finish_reason is None or choice.token_ids:
                choices.setdefault(choice.index, Collected()).add(choice, chunk_text(choice))
    return [choices[index].bits for index in range(ask.params.n)]


def chunk_text(choice):
    return choice.delta.content if hasattr(choice, "delta") else choice.text


def send_all(server, asks):
    async def gather():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(send(client, ask) for ask in asks))

    results = asyncio.run(gather())
    server.assert_clean()
    return results


@pytest.fixture(scope="module")
def asks():
    return mixed_asks()


@pytest.fixture(scope="module")
def expected(asks, offline):
    return offline_bits(offline, asks)


def assert_deterministic_ones_are_exact(asks, results, expected):
    compared = 0
    for ask, got, wanted in zip(asks, results, expected, strict=True):
        if ask.params.deterministic and got is not None:
            assert got == wanted, ask
            compared += sum(len(choice[0]) for choice in got)
    assert compared > 300, "hardly anything was compared"
    assert any(got is None for got in results), "nobody went away"


def test_64_mixed_requests_at_once_have_the_bits_of_generate(server, asks, expected):
    assert_deterministic_ones_are_exact(asks, send_all(server, asks), expected)


def test_without_the_flag_the_same_requests_have_other_bits(server, asks, expected):
    ordinary = send_all(server, mixed_asks(deterministic=False))
    differing = [
        got != wanted
        for ask, got, wanted in zip(asks, ordinary, expected, strict=True)
        if ask.params.deterministic and got is not None
    ]
    # How many follows from how fast they come: decode rows that ride along with prompts are canonical.
    assert any(differing)


def test_a_restarted_server_that_queues_and_preempts_has_the_same_bits(model, offline, asks, expected):
    memory = 168 * 384  # positions, and bytes of each
    with run_server(model, max_num_seqs=20, max_model_len=160, block_size=4, kv_cache_bytes=memory) as server:
        assert_deterministic_ones_are_exact(asks, send_all(server, asks), expected)
        assert server.llm.stats().totals.preemptions > 0
        assert server.llm.system_fingerprint == offline.system_fingerprint
        with server.client() as client:
            answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
    assert answer.system_fingerprint == offline.system_fingerprint


def test_a_prompt_from_the_prefix_cache_has_the_same_bits(server, offline):
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, logprobs=2, ignore_eos=True, deterministic=True)
    ask = Ask(is_chat=True, text="one bridge, two rivers " * 12, params=params, stream=False, dropped=False)
    with server.client() as client:
        before, after = (client.chat.completions.create(**ask.body) for _ in range(2))
    assert before.usage.llm42["cached_tokens"] < after.usage.llm42["cached_tokens"]
    (wanted,) = offline_bits(offline, [ask])
    for answer in (before, after):
        got = Collected()
        got.add(answer.choices[0], answer.choices[0].message.content)
        assert [got.bits] == wanted
