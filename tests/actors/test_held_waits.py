"""Waiting for the outcome of a write pointer: every decision wakes it, no wait is unnecessary, and it is bounded."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from actors.pointers import REMEMBERED_WAKES, PointerIndex
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.names import TopicName
from tests.patience import PATIENCE_S


async def started(nursery, pointers, pointer, since=None):
    """Start a wait; once it waits, return the event of its end."""
    done = trio.Event()

    async def wait():
        await pointers.wait(pointer, since)
        done.set()

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    return done


async def test_a_wait_ends_with_its_pointer_and_no_other():
    pointers = PointerIndex()
    async with trio.open_nursery() as nursery:
        done = await started(nursery, pointers, 7)
        pointers.wake(8)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        assert pointers.waiters == 1
        pointers.wake(7)
        await done.wait()
    assert pointers.waiters == 0


async def test_what_became_of_a_pointer_since_the_mark_is_not_missed():
    pointers = PointerIndex()
    pointers.wake(7)
    mark = pointers.mark
    async with trio.open_nursery() as nursery:
        assert not (await started(nursery, pointers, 7, mark)).is_set()
        pointers.wake(7)
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7, mark)


async def test_a_mark_older_than_what_is_remembered_never_waits():
    pointers = PointerIndex()
    mark = pointers.mark
    for other in range(100, 101 + REMEMBERED_WAKES):
        pointers.wake(other)
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7, mark)


async def test_a_decision_lets_everybody_go_on():
    pointers = PointerIndex()
    pointers.begin(TopicName("ns", "t"), [7])
    async with trio.open_nursery() as nursery:
        done = [await started(nursery, pointers, 7) for _ in range(3)]
        pointers.decided([7])
        for one in done:
            await one.wait()


async def test_whoever_leaves_waits_no_more():
    pointers = PointerIndex()
    async with trio.open_nursery() as nursery:
        await started(nursery, pointers, 7)
        await started(nursery, pointers, 7)
        assert pointers.waiters == 2
        nursery.cancel_scope.cancel()
    assert pointers.waiters == 0


async def test_waits_are_bounded():
    pointers = PointerIndex(max_waiting=1)
    async with trio.open_nursery() as nursery:
        await started(nursery, pointers, 7)
        with pytest.raises(Overloaded, match="1 polls already wait"):
            await pointers.wait(8)
        nursery.cancel_scope.cancel()


async def test_a_daemon_that_leaves_lets_everybody_go_on_now_and_later():
    pointers = PointerIndex()
    async with trio.open_nursery() as nursery:
        done = await started(nursery, pointers, 7)
        pointers.close()
        await done.wait()
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7)
