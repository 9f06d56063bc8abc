"""Streams and conversations on a link: in order, with backpressure, and without starving one another."""

from __future__ import annotations

import pytest
import trio
from linked import Caught, echo, linked
from trio.testing import wait_all_tasks_blocked

from broker.link.flow import LinkBroken, Reply
from broker.link.wire import FrameKind, LinkBounds
from plainsong.protocol.errors import Internal, RequestTooLarge, TopicNotFound

SMALL = LinkBounds(window_bytes=10_000)


class Pieces:
    """A body of ``count`` pieces that records its progress and whether it was closed."""

    def __init__(self, count: int, size: int, fault: Exception | None = None) -> None:
        self.made = 0
        self.closed = trio.Event()
        self._count, self._size, self._fault = count, size, fault

    def __aiter__(self):
        return self

    async def __anext__(self) -> bytes:
        if self.made == self._count:
            if self._fault is not None:
                raise self._fault
            raise StopAsyncIteration
        self.made += 1
        return bytes([self.made % 256]) * self._size

    async def aclose(self) -> None:
        self.closed.set()


def giving(body: Pieces):
    async def dispatch(call) -> Reply:
        return Reply("head", body) if call.kind == "stream" else await echo(call)

    return dispatch


async def collected(body) -> list[bytes]:
    found = [piece async for piece in body]
    await body.aclose()
    return found


async def test_a_streamed_body_arrives_piece_by_piece():
    body = Pieces(50, 1000)
    async with linked(giving(body), SMALL) as pair:
        reply = await pair.link.call("stream", None)
        assert reply.value == "head"
        assert await collected(reply.body) == [bytes([n % 256]) * 1000 for n in range(1, 51)]
        assert pair.link.under_way == 0
    assert body.closed.is_set()


async def test_a_slow_reader_of_one_answer_neither_delays_the_others_nor_fills_memory():
    body = Pieces(1_000_000, 1000)
    async with linked(giving(body), SMALL) as pair:
        reply = await pair.link.call("stream", None)
        await wait_all_tasks_blocked()
        assert body.made <= 12
        for number in range(20):
            assert (await pair.link.call("echo", number, b"x")).value == number
        for _ in range(5):
            await anext(aiter(reply.body))
        await wait_all_tasks_blocked()
        assert body.made <= 20
        await reply.body.aclose()
        await body.closed.wait()


async def test_closing_an_answer_ends_it_at_its_sender():
    body = Pieces(1_000_000, 1000)
    async with linked(giving(body), SMALL) as pair:
        reply = await pair.link.call("stream", None)
        await reply.body.aclose()
        await body.closed.wait()
        assert pair.link.under_way == 0
        assert (await pair.link.call("echo", 1)).value == 1


@pytest.mark.parametrize(("fault", "told"), [(TopicNotFound("gone"), TopicNotFound), (RuntimeError("bug"), Internal)])
async def test_a_truncated_answer_reports_it_after_its_data(fault, told):
    body = Pieces(3, 10, fault)
    async with linked(giving(body)) as pair:
        reply = await pair.link.call("stream", None)
        pieces = aiter(reply.body)
        assert [len(await anext(pieces)) for _ in range(3)] == [10, 10, 10]
        with pytest.raises(told):
            await anext(pieces)
        assert body.closed.is_set()
        assert pair.link.under_way == 0


async def test_a_link_that_breaks_breaks_the_answers_on_it():
    body = Pieces(1_000_000, 1000)
    async with linked(giving(body), SMALL) as pair:
        reply = await pair.link.call("stream", None)
        await pair.theirs.aclose()
        with pytest.raises(LinkBroken):
            await collected(reply.body)
        await body.closed.wait()


# --- conversations ---------------------------------------------------------------------------------


async def talk(call) -> Reply:
    """Echo messages until the end."""
    if call.value == "refuse":
        raise TopicNotFound("no such topic")
    while (message := await call.channel.receive()) is not None:
        await call.channel.send(message)
    return Reply()


async def test_a_conversation_carries_whole_messages_both_ways():
    sizes = [0, 1, 9_999, 500_000, 3, 2_000_000, 0]
    async with linked(talk, SMALL) as pair, await pair.link.converse("talk", None) as channel:
        got = []

        async def send() -> None:
            for size in sizes:
                await channel.send(bytes(size))
            channel.finish()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while (message := await channel.receive()) is not None:
                got.append(len(message))
        assert got == sizes
    assert pair.link.under_way == 0


async def test_a_refused_conversation_never_begins():
    async with linked(talk) as pair:
        with pytest.raises(TopicNotFound):
            await pair.link.converse("talk", "refuse")
        assert pair.link.under_way == 0


async def test_a_sender_without_a_reader_waits_and_holds_up_no_other():
    async def deaf(call) -> Reply:
        if call.channel is None:
            return await echo(call)
        call.channel.accept()
        return await trio.sleep_forever()

    async with linked(deaf, SMALL) as pair, await pair.link.converse("talk", None) as channel:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await channel.send(bytes(1000))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await wait_all_tasks_blocked()
            assert sent <= 12
            assert (await pair.link.call("echo", 5)).value == 5
            nursery.cancel_scope.cancel()


async def test_a_sender_waits_for_a_caller_that_does_not_read():
    sent = 0

    async def chatty(call) -> Reply:
        nonlocal sent
        while True:
            await call.channel.send(bytes(1000))
            sent += 1

    async with linked(chatty, SMALL) as pair, await pair.link.converse("talk", None):
        await wait_all_tasks_blocked()
        assert sent <= 12


async def test_many_large_messages_at_once_stay_within_bounds():
    """A message may exceed the window only while the receiver has no other message to process first."""

    async def deaf(call) -> Reply:
        call.channel.accept()
        await trio.sleep_forever()

    async with linked(deaf, SMALL) as pair, await pair.link.converse("talk", None) as channel:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await channel.send(bytes(1_000_000))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await wait_all_tasks_blocked()
            assert sent <= 2
            nursery.cancel_scope.cancel()


async def test_a_message_over_the_bound_is_refused():
    few = LinkBounds(message_bytes=200_000)
    outcome = Caught()

    async def listens(call) -> Reply:
        await outcome.run(call.channel.receive())
        return Reply()

    async with linked(listens, few) as pair, await pair.link.converse("talk", None) as channel:
        await channel.send(bytes(300_000))
        await wait_all_tasks_blocked()
        assert isinstance(outcome.error, RequestTooLarge)


async def test_leaving_a_conversation_cancels_it_at_the_other_end():
    cancelled = trio.Event()

    async def waits(call) -> Reply:
        try:
            while await call.channel.receive() is not None:
                pass
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with linked(waits) as pair:
        async with await pair.link.converse("talk", None) as channel:
            await channel.send(b"hello")
        await cancelled.wait()
        assert pair.link.under_way == 0


async def test_an_error_in_a_conversation_follows_the_messages_before_it():
    async def fails(call) -> Reply:
        await call.channel.send(b"first")
        raise TopicNotFound("gone")

    async with linked(fails) as pair, await pair.link.converse("talk", None) as channel:
        assert await channel.receive() == b"first"
        with pytest.raises(TopicNotFound):
            await channel.receive()
        with pytest.raises(TopicNotFound):
            await channel.send(b"x")


async def test_a_conversation_gets_an_error_when_its_link_breaks():
    async with linked(talk) as pair, await pair.link.converse("talk", None) as channel:
        await pair.theirs.aclose()
        with pytest.raises(LinkBroken):
            await channel.receive()
        with pytest.raises(LinkBroken):
            await channel.send(b"x")


def leaving_at(link, kind: FrameKind, scope: trio.CancelScope) -> None:
    """Cancel a caller just before a frame of this kind reaches it, so that it sees both at once."""
    taken = link.on_frame

    def on_frame(frame) -> None:
        if frame[0] == kind:
            scope.cancel()
        taken(frame)

    link.on_frame = on_frame


async def test_a_caller_that_leaves_as_its_stream_begins_ends_it_at_its_sender():
    body = Pieces(100, 4_000)
    async with linked(giving(body), SMALL) as pair:
        with trio.CancelScope() as scope:
            leaving_at(pair.link, FrameKind.HEAD, scope)
            await pair.link.call("stream", None)
        await wait_all_tasks_blocked()
        assert scope.cancelled_caught
        assert body.made < 100
        assert body.closed.is_set()


async def test_a_caller_that_leaves_as_its_conversation_begins_ends_it_at_the_other_end():
    cancelled = trio.Event()

    async def dispatch(call) -> Reply:
        try:
            await call.channel.receive()
        except trio.Cancelled:
            cancelled.set()
            raise
        return Reply()

    async with linked(dispatch) as pair:
        with trio.CancelScope() as scope:
            leaving_at(pair.link, FrameKind.OPENED, scope)
            await pair.link.converse("talk", None)
        await wait_all_tasks_blocked()
        assert scope.cancelled_caught
        assert cancelled.is_set()
