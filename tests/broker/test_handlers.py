"""The common form of handlers, the tasks of those that wait, and deadlines of requests without one."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from broker.api.messages.deadlines import ENDED_AT_ONCE, LATE_S, Deadlines
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


async def test_the_answer_of_a_task_is_given_once_and_so_is_its_error(nursery):
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


async def test_a_request_that_is_cancelled_ends_its_task_and_its_canceller_is_told(nursery):
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


async def test_whoever_cancels_a_request_ends_the_task_that_waits_for_another(nursery):
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


@pytest.mark.parametrize("count", [1, ENDED_AT_ONCE + 1])
async def test_what_is_not_dropped_expires_in_its_time_and_once(nursery, autojump_clock, count):
    deadlines, expired, dropped = Deadlines(5), [], []
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
