"""Streams of events: keep-alive comments, errors, and clients that hang up or do not read."""

from __future__ import annotations

import asyncio

import pytest

from llm42.server.errors import APIError
from llm42.server.responses import JSON, ClientGoneError, EventStream, answer, event

COMMENT = b": keep-alive\n\n"


class Client:
    """A client of an ASGI application; it may hang up, and may not read."""

    def __init__(self):
        self.sent = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)

    async def take(self, events, keep_alive_s=60.0):
        await EventStream(events, keep_alive_s)({}, self.receive, self.send)


def test_a_silent_stream_sends_comments_between_whole_events():
    async def main():
        client = Client()

        async def events():
            yield event(1)
            while client.body.count(COMMENT) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            yield event(2)

        await client.take(events(), keep_alive_s=0.001)
        assert client.body.replace(COMMENT, b"") == event(1) + event(2)
        assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(main())


def test_an_error_is_the_last_event_of_a_stream_that_has_begun_and_else_raised():
    async def main():
        async def events(*, begins):
            if begins:
                yield event(1)
            raise APIError(504, "late", code="request_timeout")

        client = Client()
        await client.take(events(begins=True))
        assert client.body == event(1) + event(APIError(504, "late", code="request_timeout").body) + b"data: [DONE]\n\n"
        client = Client()
        with pytest.raises(APIError, match="late"):
            await client.take(events(begins=False))
        assert client.sent == []

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_the_work_of_a_client_that_hangs_up_is_cancelled_even_if_it_does_not_read(reads):
    async def main():
        client, ended = Client(), []
        tasks = asyncio.all_tasks()

        async def events():
            try:
                while True:
                    yield event(1)
                    await asyncio.sleep(0)
            finally:
                ended.append(True)

        taking = asyncio.create_task(client.take(events(), keep_alive_s=0.001))
        await asyncio.sleep(0.01)
        if not reads:
            client.reads.clear()
            await asyncio.sleep(0.01)
        client.gone.set()
        await taking
        await asyncio.sleep(0)
        assert ended == [True]
        assert asyncio.all_tasks() == tasks

    asyncio.run(main())


def test_a_whole_answer_is_cancelled_with_its_client_and_given_otherwise():
    async def main():
        client, ended = Client(), []

        class Request:
            receive = staticmethod(client.receive)

        async def work(*, is_long):
            try:
                if is_long:
                    await asyncio.Event().wait()
                return 42
            finally:
                ended.append(is_long)

        assert await answer(Request, work(is_long=False)) == 42
        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        with pytest.raises(ClientGoneError):
            await answer(Request, work(is_long=True))
        assert ended == [False, True]

    asyncio.run(main())


def test_json_bodies_hold_any_text_and_no_nan():
    assert JSON({"a": "\ud800é"}).body == b'{"a":"\\ud800\\u00e9"}'
    with pytest.raises(ValueError, match="JSON"):
        JSON({"a": float("nan")})
