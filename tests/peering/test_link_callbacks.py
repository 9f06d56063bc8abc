"""Calls of a link whose handlers are callbacks: answered without a task, now or later, and cancelled with their callers."""

from __future__ import annotations

import pytest
import trio
from linked import linked_callbacks
from trio.testing import wait_all_tasks_blocked

from broker.link.flow import LinkBroken, Reply
from broker.link.wire import GATHERED_BYTES, INLINE_BYTES, LinkBounds
from plainsong.protocol.errors import Internal, NoOwner


class Kept:
    """Keeps calls, to be answered later."""

    def __init__(self) -> None:
        self.replies = {}
        self.cancelled = []
        self.tasks = set()

    def __call__(self, call, reply) -> None:
        self.tasks.add(trio.lowlevel.current_task())
        self.replies[call.value] = reply
        call.on_cancel = lambda: self.cancelled.append(call.value)


async def test_calls_are_answered_in_the_order_of_their_replies_without_tasks_of_their_own():
    kept, answered = Kept(), []

    async def one(link, number):
        answered.append((await link.call("x", number)).value)

    async with linked_callbacks(kept) as pair, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(one, pair.link, number)
        for number in (2, 0, 1):
            await wait_all_tasks_blocked()
            before = trio.lowlevel.current_statistics().tasks_living
            kept.replies[number](Reply(number))
            assert trio.lowlevel.current_statistics().tasks_living == before
    assert answered == [2, 0, 1]
    assert len(kept.tasks) == 1, "the one that reads the link"


@pytest.mark.parametrize("size", [0, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
async def test_a_reply_of_any_length_is_sent(size):
    async with linked_callbacks(lambda call, reply: reply(Reply(call.value, bytes(size)))) as pair:
        assert (await pair.link.call("x", None)).body == bytes(size)


async def test_replies_to_a_peer_that_does_not_read_wait_until_it_does():
    """They count as calls in progress until they are sent, which bounds the bytes that are queued."""
    calls = 4 * GATHERED_BYTES // INLINE_BYTES
    kept = Kept()
    async with linked_callbacks(kept, LinkBounds(requests=calls)) as pair, trio.open_nursery() as nursery:
        bodies = []

        async def one(number):
            bodies.append((await pair.link.call("x", number)).body)

        for number in range(calls):
            nursery.start_soon(one, number)
        await wait_all_tasks_blocked()
        for reply in kept.replies.values():
            reply(Reply(None, bytes(INLINE_BYTES)))
        waiting = sum(reply.is_wanted for reply in kept.replies.values())
        assert waiting >= calls - GATHERED_BYTES // INLINE_BYTES - 1
    assert bodies == [bytes(INLINE_BYTES)] * calls


async def test_an_error_that_a_callback_raises_or_replies_fails_the_call():
    def handler(call, reply):
        if call.value == "later":
            reply(NoOwner("moved"))
        else:
            raise NoOwner("moved") if call.value == "now" else ZeroDivisionError

    async with linked_callbacks(handler) as pair:
        for value, error in (("now", NoOwner), ("later", NoOwner), ("bug", Internal)):
            with pytest.raises(error):
                await pair.link.call("x", value)
        assert pair.link.under_way == 0


async def test_a_caller_that_leaves_cancels_its_call_and_a_later_reply_is_dropped():
    kept, ran = Kept(), []

    async def work():
        ran.append(True)
        return Reply()

    async with linked_callbacks(kept) as pair:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.link.call, "x", 1)
                await wait_all_tasks_blocked()
                scope.cancel()
        await wait_all_tasks_blocked()
        assert kept.cancelled == [1]
        assert not kept.replies[1].is_wanted
        kept.replies[1](Reply(1))
        kept.replies[1].run(work)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.link.call, "x", 2)
            await wait_all_tasks_blocked()
            kept.replies[2](Reply(2))
    assert not ran
    assert kept.cancelled == [1]


async def test_the_end_of_a_link_cancels_its_calls_and_drops_their_replies():
    kept = Kept()
    async with linked_callbacks(kept) as pair:

        async def one():
            with pytest.raises(LinkBroken):
                await pair.link.call("x", 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await wait_all_tasks_blocked()
            pair.link.cut()
        await pair.served_ended.wait()
        assert kept.cancelled == [1]
        kept.replies[1](Reply(1))
        assert not kept.replies[1].is_wanted
