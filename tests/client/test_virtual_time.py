"""Senders in virtual time: a message that waits too long fails on time, whatever else is in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from plainsong import AsyncClient
from plainsong.calls import Answer, Failure, Send
from plainsong.errors import DeadlineExceeded, NotSent
from plainsong.protocol.codec import FramesOptions
from plainsong.protocol.ids import pack_id
from plainsong.protocol.page import Page, item
from tests.client.simulation import NO_DAEMON, said
from tests.client.topic_of_producers import Topic
from tests.codecs import encode_frames


class Line:
    """Connections to an in-memory daemon; a request may take time."""

    def __init__(self, answer: Callable[[Send], Answer | Failure], takes_s: Callable[[Send], float] = lambda _: 0.0):
        self._answer = answer
        self._takes_s = takes_s
        self.sent_s: list[float] = []

    async def carry(self, send: Send) -> Answer | Failure:
        self.sent_s.append(trio.current_time())
        takes_s = self._takes_s(send)
        if takes_s > send.timeout_s:
            await trio.sleep(send.timeout_s)
            return Failure("timeout", f"no answer within {send.timeout_s:g} s")
        await trio.sleep(takes_s)
        return self._answer(send)

    async def aclose(self) -> None:
        pass


def in_virtual_time(line: Line, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncClient("http://one") as client:
            client._channel.pool = line  # type: ignore[assignment]
            client._channel.random = lambda: 0.0
            client._channel.places._was_reached = True
            return await work(client)

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_an_undeliverable_message_is_retried_until_its_time_is_over_and_then_reported():
    line = Line(lambda _: NO_DAEMON)

    async def work(client: AsyncClient) -> None:
        began_s = trio.current_time()
        with pytest.raises(NotSent):
            async with client.publisher("t", delivery_timeout_s=120) as publisher:
                sent = await publisher.send(b"x")
        with pytest.raises(DeadlineExceeded, match="not delivered within 120 s") as caught:
            await sent
        assert caught.value.outcome == "not-applied"
        assert trio.current_time() - began_s == pytest.approx(120, abs=0.1)

    in_virtual_time(line, work)
    pauses = [round(later - earlier, 3) for earlier, later in zip(line.sent_s, line.sent_s[1:], strict=False)]
    assert pauses[:9] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]


def test_a_first_message_lingers_for_others():
    line = Line(lambda _: NO_DAEMON)

    async def work(client: AsyncClient) -> None:
        async with client.publisher("t", linger_ms=40, mode="best_effort", delivery_timeout_s=1) as publisher:
            began_s = trio.current_time()
            await publisher.send(b"x")
            await trio.sleep(0.03)
            await publisher.send(b"y")
            await trio.sleep(0.03)
            assert line.sent_s == [pytest.approx(began_s + 0.04)]

    in_virtual_time(line, work)


def test_messages_after_an_unanswered_request_of_a_producer_are_given_up_in_time():
    topic = Topic()
    first = iter([20.0])
    line = Line(topic.carry, lambda send: next(first, 0.0) if send.request.path.endswith("/publish") else 0.0)

    async def work(client: AsyncClient) -> None:
        async with client.producer("t", "p") as producer:
            stuck = await producer.send(b"0")
            await trio.sleep(1)
            began_s = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="not delivered within 3 s"):
                await producer.publish(b"1", deadline_s=3)
            assert trio.current_time() - began_s == pytest.approx(3)
            assert not stuck.done()
            assert (await stuck).sequence_id == 0

    in_virtual_time(line, work)
    assert topic.payloads == [b"0"]


def test_a_lightweight_transaction_ends_at_its_time_by_itself():
    topic = Topic()

    async def work(client: AsyncClient) -> None:
        async with client.producer("t", "p") as producer:
            tx = producer.begin("key", timeout_s=30)
            tx.write(b"x")
            await trio.sleep(29)
            assert tx._transaction.state == "open"
            await trio.sleep(2)
            assert tx._transaction.state == "aborted"

    in_virtual_time(Line(topic.carry), work)


def test_a_call_is_tried_until_its_deadline_and_no_longer():
    line = Line(lambda send: said([]) if trio.current_time() > 1e9 else NO_DAEMON)

    async def work(client: AsyncClient) -> None:
        began_s = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await client.topics()
        assert 55 < trio.current_time() - began_s <= 60

    in_virtual_time(line, work)


@pytest.mark.parametrize("takes_s", [0.0, 0.9, 20.0])
def test_a_reader_idles_only_at_the_end_of_its_topic_however_long_the_messages_before_it_take(takes_s: float):
    ids = [pack_id(1 << 40, number) for number in range(3)]
    polls = 0

    def page(_: Send) -> Answer:
        nonlocal polls
        polls += 1
        items = [item(ids[polls - 1], b"%d" % polls)] if polls <= 3 else []
        told = {"content-type": "application/vnd.plainsong.frames; version=2"}
        told["plainsong-end"] = "more" if polls < 3 else "end"
        if polls <= 3:
            told["plainsong-last-id"] = ids[polls - 1].hex()
        return Answer(200, told, encode_frames(Page(items, len(items)), FramesOptions(attributes=True)))

    # At the topic's end, a poll takes its whole wait.
    line = Line(page, lambda send: takes_s if polls < 3 else send.timeout_s - 0.01)

    async def work(client: AsyncClient) -> list[bytes]:
        began_s = trio.current_time()
        read = [
            message.payload
            async for message in client.read("t", start="oldest", follow=True, idle_timeout_s=1, page_messages=1)
        ]
        assert trio.current_time() - began_s < 3 * takes_s + 2.5
        return read

    assert in_virtual_time(line, work) == [b"1", b"2", b"3"]
