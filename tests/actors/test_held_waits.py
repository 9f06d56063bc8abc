"""Waits for the outcome of a write pointer: a decision ends them, none is unnecessary, and their number is limited."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from actors.pointers import REMEMBERED_WAKES, PointerIndex
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.names import TopicName
from tests.patience import PATIENCE_S


async def started(nursery, pointers, pointer, since=None):
    """Start a wait; once it blocks, return an event that is set when it ends."""
    done = trio.Event()

    async def wait():
        await pointers.wait(pointer, since)
        done.set()

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    return done


async def test_a_wait_ends_when_its_own_pointer_is_decided():
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


async def test_a_decision_since_the_mark_is_not_missed():
    pointers = PointerIndex()
    pointers.wake(7)
    mark = pointers.mark
    async with trio.open_nursery() as nursery:
        assert not (await started(nursery, pointers, 7, mark)).is_set()
        pointers.wake(7)
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7, mark)


async def test_a_mark_older_than_the_history_returns_at_once():
    pointers = PointerIndex()
    mark = pointers.mark
    for other in range(100, 101 + REMEMBERED_WAKES):
        pointers.wake(other)
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7, mark)


async def test_a_decision_wakes_every_waiter():
    pointers = PointerIndex()
    pointers.begin(TopicName("ns", "t"), [7])
    async with trio.open_nursery() as nursery:
        done = [await started(nursery, pointers, 7) for _ in range(3)]
        pointers.decided([7])
        for one in done:
            await one.wait()


async def test_a_caller_that_leaves_ends_its_wait():
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
        with pytest.raises(Overloaded, match="too many polls wait for transactions to be decided: 1"):
            await pointers.wait(8)
        nursery.cancel_scope.cancel()


async def test_a_stopping_daemon_releases_current_and_later_waits():
    pointers = PointerIndex()
    async with trio.open_nursery() as nursery:
        done = await started(nursery, pointers, 7)
        pointers.close()
        await done.wait()
    with trio.fail_after(PATIENCE_S):
        await pointers.wait(7)
