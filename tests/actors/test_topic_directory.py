"""The directory: one owner per topic, opened once, evicted when idle; and every call is answered in an outage."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar

import pytest
import trio
from actors_in_process import NAME, actors
from trio.testing import wait_all_tasks_blocked

from plainsong.protocol.errors import Overloaded, PlainsongError, Recovering, ShuttingDown, StorageFailed, TopicNotFound
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Describe
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore


def names(count):
    return [TopicName("ns", f"t{number}") for number in range(count)]


class OwnerStore(FaultyStore):
    """Checks that no owner claims a topic while another owner's write to it is in progress."""

    def __init__(self):
        super().__init__(MemoryStore())
        self.claims = Counter()
        self.writing = Counter()

    async def claim(self, name):
        assert not self.writing[name], "two owners"
        self.claims[name] += 1
        return await super().claim(name)

    async def write(self, commit, *, claim, expect=()):
        self.writing[claim.name] += 1
        try:
            await super().write(commit, claim=claim, expect=expect)
        finally:
            self.writing[claim.name] -= 1


async def told(out, call, *args, **kwargs):
    """Append the answer or the error."""
    try:
        out.append(await call(*args, **kwargs))
    except PlainsongError as error:
        out.append(error)


async def test_a_hundred_first_callers_cause_one_load(nursery):
    async with actors(OwnerStore()) as harness:
        await harness.create()
        store = harness.store
    async with actors(store) as harness:
        claims, scans = store.claims[NAME], store.calls["scan"]
        store.stall("claim")
        answers = []
        for number in range(100):
            nursery.start_soon(
                told, answers, harness.ask if number % 2 else harness.publish, Describe() if number % 2 else "m"
            )
        await store.stalled("claim")
        await wait_all_tasks_blocked()
        assert not answers
        store.release("claim")
        await wait_all_tasks_blocked()
        assert len(answers) == 100
        assert not [answer for answer in answers if isinstance(answer, PlainsongError)]
        assert (store.claims[NAME] - claims, harness.watch.loads[NAME]) == (1, 1)
        assert store.calls["scan"] - scans == 3


async def test_a_topic_keeps_no_reference_to_the_request_that_opened_it():
    request = ContextVar("request", default="none")

    class Looking(OwnerStore):
        async def claim(self, name):
            seen.append(request.get())
            return await super().claim(name)

    seen = []
    async with actors(Looking()) as harness:
        request.set("the first")
        await harness.create()
        assert seen == ["none"]


async def test_an_idle_topic_is_closed_and_reopened_on_its_next_use(autojump_clock):
    async with actors(idle_s=60, sweeping=True) as harness:
        await harness.create()
        await harness.publish("m")
        await trio.sleep(50)
        assert len(harness.directory) == 1
        await trio.sleep(30)
        assert len(harness.directory) == 0
        assert await harness.read() == [b"m"]
        assert harness.watch.loads[NAME] == 2


async def test_a_topic_with_waiting_callers_is_not_idle(nursery, autojump_clock):
    async with actors(idle_s=10, sweeping=True) as harness:
        await harness.create()
        answers = []
        nursery.start_soon(told, answers, harness.look, await harness.end(), 100)
        await trio.sleep(90)
        assert len(harness.directory) == 1
        assert not answers
        await trio.sleep(60)
        assert len(harness.directory) == 0
        assert len(answers) == 1


async def test_a_topic_in_use_is_not_closed(autojump_clock):
    async with actors(idle_s=10, sweeping=True) as harness:
        await harness.create()
        for _ in range(20):
            await trio.sleep(5)
            await harness.publish("m")
        assert harness.watch.loads[NAME] == 1


async def test_inspecting_a_topic_does_not_open_it():
    async with actors() as harness:
        assert harness.directory.peek(NAME) is None
        assert harness.directory.cache(NAME) is None
        assert len(harness.directory) == 0


async def test_absent_topics_are_closed_quickly(autojump_clock):
    async with actors(idle_s=600, sweeping=True) as harness:
        await harness.create()
        for name in names(50):
            with pytest.raises(TopicNotFound):
                await harness.read(name=name)
        assert len(harness.directory) == 51
        await trio.sleep(7)
        assert [entry.name for entry in harness.directory] == [NAME]


async def test_a_closing_topic_has_ended_before_its_successor_begins(nursery, autojump_clock):
    async with actors(OwnerStore(), max_open=1) as harness:
        store = harness.store
        await harness.create()
        await harness.publish("a")
        claims = store.claims[NAME]
        store.stall("write")
        answers = []
        with pytest.raises(TopicNotFound):  # evicts the first topic, whose last write stalls
            await harness.read(name=TopicName("ns", "other"))
        await store.stalled("write")
        for _ in range(10):
            nursery.start_soon(told, answers, harness.publish, "b")
        await wait_all_tasks_blocked()
        assert store.claims[NAME] == claims
        assert not answers
        store.release("write")
        await wait_all_tasks_blocked()
        assert store.claims[NAME] == claims + 1
        assert len({answer.first_id for answer in answers}) == 10
        assert await harness.read() == [b"a"] + [b"b"] * 10


async def test_topics_that_are_opened_and_closed_all_the_time_have_one_actor_each(autojump_clock):
    async with actors(OwnerStore(), max_open=2) as harness:
        every = names(5)
        published = Counter()

        async def use(name):
            for number in range(20):
                try:
                    await harness.publish(f"{number}", name=name)
                    published[name] += 1
                except Overloaded:
                    await trio.sleep(0.01)

        for name in every:
            await harness.create(name)
        async with trio.open_nursery() as users:
            for name in every * 2:
                users.start_soon(use, name)
        for name in every:
            assert len(await harness.read(name=name, cached=False)) == published[name]
        assert max(harness.watch.loads.values()) > 2
        assert len(harness.directory) <= 2


async def test_at_most_the_allowed_number_of_topics_is_open_and_the_least_recently_used_is_closed():
    async with actors(max_open=3) as harness:
        first, second, third, fourth = names(4)
        for name in (first, second, third):
            await harness.create(name)
        await harness.read(name=first)
        await harness.create(fourth)
        assert {entry.name for entry in harness.directory} == {first, third, fourth}


async def test_a_new_topic_is_refused_when_no_open_topic_is_idle(nursery, autojump_clock):
    async with actors(max_open=3) as harness:
        for name in names(3):
            await harness.create(name)
            nursery.start_soon(told, [], harness.look, await harness.end(name), 60, name)
        await wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="3 open topics"):
            await harness.create(TopicName("ns", "other"))
        await trio.sleep(61)
        await harness.create(TopicName("ns", "other"))


@pytest.mark.parametrize("op", ["claim", "get", "scan"])
async def test_callers_get_an_error_while_the_store_keeps_failing(op, autojump_clock):
    async with actors() as harness:
        await harness.create()
        await harness.publish("m")
        store = harness.store
    async with actors(store) as harness:
        for _ in range(20):
            store.fail_next(op)
        begun_s = trio.current_time()
        with pytest.raises(StorageFailed) as first:
            await harness.read()
        with pytest.raises(Recovering) as second:
            await harness.read()
        assert {first.value.outcome, second.value.outcome} == {"not-applied"}
        assert trio.current_time() - begun_s < 1
        heard = []
        for _ in range(150):
            await trio.sleep(1)
            await told(heard, harness.read)
        assert heard.index([b"m"]) < 120, "healed, it is loaded again"
        assert {type(each) for each in heard[: heard.index([b"m"])]} == {Recovering}
        assert heard[heard.index([b"m"]) :] == [[b"m"]] * (150 - heard.index([b"m"]))
        assert harness.watch.count["falls"] == 20


async def test_one_store_failure_while_a_topic_is_opened_is_not_noticed():
    async with actors() as harness:
        await harness.create()
        await harness.publish("m")
        store = harness.store
    async with actors(store) as harness:
        store.fail_next("scan")
        assert await harness.read() == [b"m"]
        assert harness.watch.count["falls"] == 1


async def test_one_topic_that_cannot_be_loaded_does_not_affect_another(monkeypatch):
    other = TopicName("ns", "other")
    async with actors() as harness:
        await harness.create()
        await harness.create(other)
        store = harness.store
    async with actors(store) as harness:
        inner = store.get

        async def get(table, key):
            value = await inner(table, key)
            return b"\xff garbled" if key == b"ns:t:" else value

        monkeypatch.setattr(store, "get", get)
        with pytest.raises(StorageFailed):
            await harness.read()
        assert await harness.read(name=other) == []


async def test_a_topic_that_cannot_be_loaded_does_not_delay_the_exit(autojump_clock):
    async with actors() as harness:
        for _ in range(1_000):
            harness.store.fail_next("claim")
        with pytest.raises(StorageFailed):
            await harness.read()
        harness.directory.close()
        with trio.fail_after(10):
            await harness.directory.drained()


async def test_pending_requests_are_served_when_the_daemon_stops(nursery):
    async with actors() as harness:
        await harness.create()
        answers = []
        harness.store.stall("write")
        for _ in range(10):
            nursery.start_soon(told, answers, harness.publish, "m")
        await harness.store.stalled("write")
        await wait_all_tasks_blocked()
        harness.directory.close()
        with pytest.raises(ShuttingDown):
            await harness.publish("too late")
        harness.store.release("write")
        await harness.directory.drained()
        await wait_all_tasks_blocked()
        assert len(answers) == 10
        assert not [answer for answer in answers if isinstance(answer, PlainsongError)]
        assert len(harness.directory) == 0
        assert harness.rows() == 10


async def test_an_unopened_topic_is_refused_when_the_daemon_stops():
    async with actors() as harness:
        harness.directory.close()
        with pytest.raises(ShuttingDown):
            await harness.read()
        await harness.directory.drained()
        assert len(harness.directory) == 0


async def test_draining_also_waits_for_a_topic_opened_while_its_predecessor_closes(nursery):
    async with actors(max_open=1) as harness:
        await harness.create()
        await harness.publish("a")
        harness.store.stall("write")
        with pytest.raises(TopicNotFound):
            await harness.read(name=TopicName("ns", "other"))
        answers = []
        nursery.start_soon(told, answers, harness.publish, "b")
        await wait_all_tasks_blocked()
        harness.directory.close()
        harness.store.release("write")
        await harness.directory.drained()
        await wait_all_tasks_blocked()
        assert len(answers) == 1
        assert not isinstance(answers[0], PlainsongError)


async def test_a_topic_whose_last_write_failed_is_reopened_on_its_next_use():
    async with actors(OwnerStore(), max_open=1) as harness:
        await harness.create()
        await harness.publish("a")
        harness.store.fail_next("write")
        with pytest.raises(TopicNotFound):  # evicts the first topic
            await harness.read(name=TopicName("ns", "other"))
        await harness.publish("b")
        assert await harness.read() == await harness.read(cached=False) == [b"a", b"b"]
