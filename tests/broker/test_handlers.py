"""The common form of handlers, tasks of handlers that wait, and deadlines of requests without a task."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from broker.http.deadlines import EXPIRED_AT_ONCE, LATE_S, Deadlines
from broker.http.handlers import RequestCancelled, RequestTasks, answer_of
from broker.http.messages import Answer, Request
from plainsong.protocol.errors import Overloaded


def request():
    return Request({}, "", {})


class Waiting:
    """An ``async def`` handler that waits until it is released."""

    def __init__(self):
        self.release = trio.Event()
        self.ended = 0

    async def __call__(self, asked):
        try:
            await self.release.wait()
            return Answer(200)
        finally:
            self.ended += 1


async def test_a_task_answers_or_fails_exactly_once(nursery):
    async def fails(asked):
        raise Overloaded("full")

    waiting, outcomes = Waiting(), []
    tasks = RequestTasks(nursery)
    asked = request()
    tasks.adapt(waiting)(asked, outcomes.append)
    tasks.adapt(fails)(request(), outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [Overloaded]
    waiting.release.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [Overloaded, Answer]
    assert asked.on_cancel is None


async def test_a_cancelled_request_ends_its_task_and_the_canceller_is_notified(nursery):
    waiting, outcomes, asked = Waiting(), [], request()
    RequestTasks(nursery).run(waiting, asked, outcomes.append)
    asked.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [RequestCancelled]
    assert waiting.ended == 1


async def test_a_request_that_was_cancelled_before_it_had_a_task_does_not_wait(nursery):
    waiting, outcomes, asked = Waiting(), [], request()
    asked.cancel()
    RequestTasks(nursery).run(waiting, asked, outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [RequestCancelled]


async def test_a_stream_that_is_answered_as_its_request_is_cancelled_is_closed(nursery):
    closed, outcomes, asked = [], [], request()

    class Stream:
        def __aiter__(self):
            return self

        async def aclose(self):
            closed.append(True)

    async def answers(asked):
        asked.cancel()
        return Answer(200, Stream())

    RequestTasks(nursery).run(answers, asked, outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [RequestCancelled]
    assert closed == [True]


async def test_a_caller_that_is_cancelled_leaves_once_the_task_of_its_request_has_ended(nursery):
    waiting, asked = Waiting(), request()
    with trio.move_on_after(0.01) as scope:
        await answer_of(RequestTasks(nursery).adapt(waiting), asked)
    assert scope.cancelled_caught
    assert waiting.ended == 1


async def test_cancelling_a_request_ends_the_task_that_waits_for_another(nursery):
    waiting, tasks, outcomes, asked = Waiting(), RequestTasks(nursery), [], request()

    async def outer(asked):
        return await answer_of(tasks.adapt(waiting), asked)

    tasks.run(outer, asked, outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    asked.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert [type(each) for each in outcomes] == [RequestCancelled]
    assert waiting.ended == 1
    assert asked.on_cancel is None


class Due:
    def __init__(self, expired):
        self._expired = expired

    def expire(self):
        self._expired.append(trio.current_time())


@pytest.mark.parametrize("count", [1, EXPIRED_AT_ONCE + 1])
async def test_a_timer_that_is_not_dropped_expires_once_at_its_time(nursery, autojump_clock, count):
    deadlines, expired, dropped = Deadlines(5, Due.expire), [], []
    nursery.start_soon(deadlines.run)
    for _ in range(2):
        await trio.sleep(100)
        begun_s = trio.current_time()
        for _ in range(count):
            deadlines.add(Due(expired))
        done = Due(dropped)
        deadlines.add(done)
        deadlines.drop(done)
        deadlines.drop(done)
        await trio.sleep(20)
        assert len(expired) == count
        assert all(5 <= at_s - begun_s <= 5 + LATE_S for at_s in expired)
        assert dropped == []
        assert len(deadlines) == 0
        expired.clear()


async def test_a_timer_that_is_started_again_counts_from_then(nursery, autojump_clock):
    deadlines, expired = Deadlines(5, Due.expire), []
    nursery.start_soon(deadlines.run)
    begun_s, again, other = trio.current_time(), Due(expired), Due(expired)
    deadlines.add(again)
    await trio.sleep(1)
    deadlines.add(other)
    await trio.sleep(1)
    deadlines.add(again)
    await trio.sleep(20)
    assert [round(at_s - begun_s) for at_s in expired] == [6, 7]


async def test_a_timer_may_drop_another_one_due_at_the_same_time(nursery, autojump_clock):
    expired = []

    def expire(member):
        expired.append(member)
        deadlines.drop("another")

    deadlines = Deadlines(5, expire)
    nursery.start_soon(deadlines.run)
    for member in ("one", "another", "third"):
        deadlines.add(member)
    await trio.sleep(20)
    assert expired == ["one", "third"]


class LoopTurns(trio.abc.Instrument):
    """Counts the turns of the event loop, and the requests that time out in each."""

    def __init__(self) -> None:
        self.ended = [0]

    def before_io_wait(self, timeout: float) -> None:
        self.ended.append(0)

    def expire(self, member: int) -> None:
        self.ended[-1] += 1


async def test_a_thousand_timers_due_at_once_are_spread_over_turns_of_the_loop(autojump_clock):
    turns = LoopTurns()
    trio.lowlevel.add_instrument(turns)
    deadlines = Deadlines(3, turns.expire)
    for member in range(1000):
        deadlines.add(member)
    with trio.move_on_after(5):
        await deadlines.run()
    trio.lowlevel.remove_instrument(turns)
    assert sum(turns.ended) == 1000
    assert max(turns.ended) <= EXPIRED_AT_ONCE
