"""The topic actor: group commits, long polls, and the answers after a failed write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from actors_in_process import NAME, actors, after_receipt
from trio.testing import wait_all_tasks_blocked

from actors.settings import CommitConfig
from plainsong.protocol.errors import (
    GenerationChanged,
    OutcomeUnknown,
    Overloaded,
    PlainsongError,
    ShuttingDown,
    StorageFailed,
    TopicNotFound,
)
from plainsong.protocol.topic.asks import Describe, ListReaders, Remove, Span, Stats
from plainsong.protocol.topic.state import TopicLimits
from storage.base import NothingWritten
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore


class Answers(list):
    """The answers to this nursery's callers, in order."""

    def __init__(self, nursery):
        self._nursery = nursery

    def ask(self, call, *args, **kwargs):
        scope = trio.CancelScope()

        async def run():
            with scope:
                try:
                    self.append(await call(*args, **kwargs))
                except PlainsongError as error:
                    self.append(error)

        self._nursery.start_soon(run)
        return scope


@pytest.fixture
def answers(nursery):
    return Answers(nursery)


# --- commits --------------------------------------------------------------------------------------


async def test_publishes_that_arrive_during_a_commit_share_the_next_one(answers):
    async with actors() as harness:
        await harness.create()
        writes = harness.store.calls["write"]
        harness.store.stall("write")
        for number in range(100):
            answers.ask(harness.publish, f"{number}")
            if number == 0:
                await harness.store.stalled("write")
        await wait_all_tasks_blocked()
        assert not answers
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert harness.store.calls["write"] - writes == 2
        assert len({answer.first_id for answer in answers}) == 100
        assert sorted(await harness.read()) == sorted(b"%d" % number for number in range(100))


async def test_the_requests_of_a_commit_are_bounded(answers):
    async with actors(commits=CommitConfig(max_requests=10)) as harness:
        await harness.create()
        writes = harness.store.calls["write"]
        harness.store.stall("write")
        answers.ask(harness.publish, "first")
        await harness.store.stalled("write")
        for number in range(100):
            answers.ask(harness.publish, f"{number}")
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert harness.store.calls["write"] - writes == 11


async def test_nothing_is_answered_or_readable_before_it_is_durable(answers):
    async with actors() as harness:
        await harness.create()
        before = await harness.end()
        harness.store.stall("write")
        answers.ask(harness.publish, "m")
        answers.ask(harness.look)
        await harness.store.stalled("write")
        await wait_all_tasks_blocked()
        readable, early = harness.core().state.until, [answer for answer in answers if not isinstance(answer, Span)]
        harness.store.release("write")  # before the asserts: while the store stalls, a failed test could not end
        await wait_all_tasks_blocked()
        assert readable == before
        assert not early
        assert len(answers) == 2


async def test_a_caller_who_leaves_during_a_commit_has_still_published(answers):
    async with actors() as harness:
        await harness.create()
        harness.store.stall("write")
        scope = answers.ask(harness.publish, "m")
        await harness.store.stalled("write")
        scope.cancel()
        await wait_all_tasks_blocked()
        harness.store.release("write")
        assert await harness.read() == [b"m"]
        assert not answers


async def test_messages_of_consecutive_publishes_keep_their_order(answers):
    async with actors() as harness:
        await harness.create()
        for number in range(20):
            await harness.publish(f"{number}a", f"{number}b")
        assert await harness.read(cached=False) == [b"%d%c" % (n, c) for n in range(20) for c in b"ab"]


# --- long polls -----------------------------------------------------------------------------------


async def test_a_parked_poll_is_woken_by_a_message(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        answers.ask(harness.look, await harness.end(), wait_s=60)
        await wait_all_tasks_blocked()
        assert (len(harness.core().parking), len(answers)) == (1, 0)
        receipt = await harness.publish("m")
        await wait_all_tasks_blocked()
        (span,) = answers
        assert span.since <= receipt.first_id < span.until
        assert trio.current_time() < 1_000_000
        assert len(harness.core().parking) == 0


async def test_a_parked_poll_is_answered_empty_at_its_deadline(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        end = await harness.end()
        begun_s = trio.current_time()
        span = await harness.look(end, wait_s=60)
        assert trio.current_time() - begun_s == pytest.approx(60)
        assert span.start >= span.until


async def test_deadlines_are_met_in_any_order(nursery, autojump_clock):
    async with actors() as harness:
        await harness.create()
        end, begun_s, told = await harness.end(), trio.current_time(), []

        async def wait(wait_s):
            await harness.look(end, wait_s=wait_s)
            told.append((wait_s, trio.current_time() - begun_s))

        for wait_s in (30, 10, 20):
            nursery.start_soon(wait, wait_s)
        await trio.sleep(31)
        assert [wait_s for wait_s, _ in told] == [10, 20, 30]
        assert all(took_s == pytest.approx(wait_s) for wait_s, took_s in told)


async def test_a_poll_with_messages_to_deliver_does_not_wait(autojump_clock):
    async with actors() as harness:
        await harness.create()
        await harness.publish("m")
        begun_s = trio.current_time()
        await harness.look(wait_s=60)
        assert trio.current_time() == begun_s


async def test_a_thousand_parked_polls_are_woken_by_one_message(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        end = await harness.end()
        for _ in range(1_000):
            answers.ask(harness.look, end, wait_s=60)
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 1_000
        receipt = await harness.publish("m")
        await wait_all_tasks_blocked()
        assert len(answers) == 1_000
        assert all(span.until > receipt.last_id for span in answers)


async def test_parked_polls_over_the_bound_are_refused(answers, autojump_clock):
    async with actors(limits=TopicLimits(max_parked_polls=3)) as harness:
        await harness.create()
        end = await harness.end()
        for _ in range(3):
            answers.ask(harness.look, end, wait_s=60)
        await wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="3 polls"):
            await harness.look(end, wait_s=60)
        assert (await harness.look(end)).until == end, "a poll that does not wait needs no room"


async def test_parked_polls_are_answered_empty_when_the_daemon_stops(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        end = await harness.end()
        begun_s = trio.current_time()
        for _ in range(5):
            answers.ask(harness.look, end, wait_s=60)
        await wait_all_tasks_blocked()
        harness.directory.close()
        await harness.directory.drained()
        await wait_all_tasks_blocked()
        assert trio.current_time() == begun_s
        assert [span.start >= span.until for span in answers] == [True] * 5
        with pytest.raises(ShuttingDown):
            await harness.look(end)


async def test_parked_polls_get_an_error_when_the_topic_is_deleted(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        answers.ask(harness.look, await harness.end(), wait_s=60)
        await wait_all_tasks_blocked()
        await harness.ask(Remove())
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [TopicNotFound]


async def test_an_abandoned_poll_is_unparked_at_once(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        scope = answers.ask(harness.look, await harness.end(), wait_s=60)
        await wait_all_tasks_blocked()
        scope.cancel()
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 0
        assert harness.entry().actor.is_idle


async def test_a_poll_that_opened_the_topic_and_is_abandoned_is_unparked_at_once(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        end, store = await harness.end(), harness.store
    async with actors(store) as harness:
        scope = answers.ask(harness.look, end, wait_s=60)
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 1
        scope.cancel()
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 0


async def test_a_poll_abandoned_during_a_commit_is_not_parked(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        far = b"\x7f" * 20
        harness.store.stall("write")
        answers.ask(harness.publish, "first")
        await harness.store.stalled("write")
        in_mailbox = answers.ask(harness.look, far, wait_s=60)
        await wait_all_tasks_blocked()
        in_mailbox.cancel()
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 0
        harness.store.stall("write")
        answers.ask(harness.publish, "second")
        in_the_commit = answers.ask(harness.look, far, wait_s=60)
        await wait_all_tasks_blocked()
        in_the_commit.cancel()
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 0


async def test_a_poll_received_with_a_publish_and_abandoned_during_its_commit_is_not_parked(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        harness.store.stall("write")
        answers.ask(harness.publish, "first")
        await harness.store.stalled("write")
        answers.ask(harness.publish, "second")
        scope = answers.ask(harness.look, b"\x7f" * 20, wait_s=60)
        await wait_all_tasks_blocked()
        harness.store.release("write")
        harness.store.stall("write")
        await harness.store.stalled("write")
        scope.cancel()
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert len(harness.core().parking) == 0
        assert harness.entry().actor.is_idle


# --- long polls while a commit waits for the object store --------------------------------------------


def late_store():
    """A store whose commits may take much longer than a sync: ``write`` stands for the object store's answer."""
    store = FaultyStore(MemoryStore())
    store.traits = replace(store.traits, answers_late=True)
    return store


class Waits:
    """Long polls at the end of a topic: the seconds until each was answered, and whether it had a message."""

    def __init__(self, harness, nursery, end):
        self.found = {}
        self._harness, self._nursery, self._end = harness, nursery, end
        self._begun_s = trio.current_time()

    def begin(self, name, wait_s):
        self._nursery.start_soon(self._wait, name, wait_s)

    async def _wait(self, name, wait_s):
        try:
            span = await self._harness.look(self._end, wait_s=wait_s)
            outcome = span.start < span.until
        except PlainsongError as error:
            outcome = type(error)
        self.found[name] = (round(trio.current_time() - self._begun_s), outcome)


async def test_polls_end_in_time_although_a_commit_of_their_topic_waits_for_the_object_store(
    answers, nursery, autojump_clock
):
    async with actors(late_store()) as harness:
        await harness.create()
        waits = Waits(harness, nursery, await harness.end())
        waits.begin("before the commit", 10)
        await wait_all_tasks_blocked()
        harness.store.stall("write")
        answers.ask(harness.publish, "m")
        waits.begin("with it", 20)
        await harness.store.stalled("write")
        waits.begin("during it", 5)
        waits.begin("at once", 0)
        waits.begin("until it counts", 60)
        await trio.sleep(40)
        assert not answers
        assert waits.found == {
            "at once": (0, False),
            "during it": (5, False),
            "before the commit": (10, False),
            "with it": (20, False),
        }
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert waits.found["until it counts"] == (40, True)


async def test_a_poll_that_ends_during_an_uncommitted_deletion_does_not_reveal_it(answers, nursery, autojump_clock):
    async with actors(late_store()) as harness:
        await harness.create()
        waits = Waits(harness, nursery, await harness.end())
        waits.begin("shorter", 10)
        waits.begin("longer", 60)
        await wait_all_tasks_blocked()
        harness.store.stall("write")
        answers.ask(harness.ask, Remove())
        await trio.sleep(20)
        assert waits.found == {"shorter": (10, False)}
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert waits.found["longer"] == (20, TopicNotFound)


async def test_polls_that_wait_during_a_commit_that_fails_get_an_error(answers, nursery, autojump_clock):
    async with actors(late_store()) as harness:
        await harness.create()
        waits = Waits(harness, nursery, await harness.end())
        harness.store.stall("write")
        answers.ask(harness.publish, "m")
        waits.begin("with it", 60)
        await harness.store.stalled("write")
        waits.begin("during it", 60)
        await wait_all_tasks_blocked()
        harness.store.crash()
        await wait_all_tasks_blocked()
        assert waits.found == {"with it": (0, StorageFailed), "during it": (0, StorageFailed)}
        assert [type(answer) for answer in answers] == [OutcomeUnknown]


async def test_after_a_late_commit_the_next_one_includes_what_the_answered_callers_send_next(answers, autojump_clock):
    async with actors(late_store()) as harness:
        await harness.create()
        before = harness.store.calls["write"]
        harness.store.stall("write")
        answers.ask(harness.publish, "a")
        await harness.store.stalled("write")
        answers.ask(harness.publish, "b")
        await trio.sleep(8)
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert (len(answers), harness.store.calls["write"] - before) == (1, 1)
        answers.ask(harness.publish, "a again")
        await wait_all_tasks_blocked()
        assert (len(answers), harness.store.calls["write"] - before) == (3, 2)


async def test_after_a_late_commit_the_next_one_waits_at_most_a_quarter_as_long(answers, autojump_clock):
    async with actors(late_store()) as harness:
        await harness.create()
        harness.store.stall("write")
        answers.ask(harness.publish, "a")
        await harness.store.stalled("write")
        answers.ask(harness.publish, "b")
        await trio.sleep(8)
        harness.store.release("write")
        await trio.sleep(1.9)
        assert len(answers) == 1
        await trio.sleep(0.2)
        assert len(answers) == 2
        begun_s = trio.current_time()
        await harness.publish("after a pause")
        assert trio.current_time() == begun_s


async def test_polls_over_the_bound_that_arrive_during_a_commit_are_refused_at_its_end(
    answers, nursery, autojump_clock
):
    async with actors(late_store(), limits=TopicLimits(max_parked_polls=1)) as harness:
        await harness.create()
        waits = Waits(harness, nursery, b"\x7f" * 20)
        harness.store.stall("write")
        answers.ask(harness.publish, "m")
        await harness.store.stalled("write")
        for name in ("first", "second"):
            waits.begin(name, 60)
        await trio.sleep(10)
        assert not waits.found
        harness.store.release("write")
        await trio.sleep(10)
        assert [outcome for _, outcome in waits.found.values()] == [Overloaded]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("applied", "left"), [(False, []), (True, [b"a", b"b"]), (1, [b"a"])])
async def test_callers_of_a_failed_write_get_an_unknown_outcome(answers, applied, left):
    async with actors() as harness:
        await harness.create()
        kept = [(await harness.publish(f"{number}")).first_id for number in range(3)]
        harness.store.stall("write")
        answers.ask(harness.publish, "before")
        await harness.store.stalled("write")
        harness.store.fail_next("write", applied=applied)
        answers.ask(harness.publish, "a")
        await wait_all_tasks_blocked()
        answers.ask(harness.publish, "b")
        answers.ask(harness.publish, "refused", generation=9)
        for ask in (Describe(), ListReaders(), Stats()):
            answers.ask(harness.ask, ask)
        answers.ask(harness.look)
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        kinds = [type(answer) for answer in answers if isinstance(answer, PlainsongError)]
        assert sorted(kinds, key=str) == sorted(
            [OutcomeUnknown] * 2 + [GenerationChanged] + [StorageFailed] * 4, key=str
        )
        assert {answer.outcome for answer in answers if type(answer) is StorageFailed} == {"not-applied"}
        assert {answer.outcome for answer in answers if type(answer) is OutcomeUnknown} == {"unknown"}
        there = [b"0", b"1", b"2", b"before", *left]
        assert await harness.read() == there
        assert await harness.read(cached=False) == there
        assert (harness.watch.count["falls"], harness.watch.loads[NAME]) == (1, 2)
        receipt = await harness.publish("after")
        assert receipt.first_id > max(kept)
        assert await harness.read() == [*there, b"after"]


async def test_callers_of_a_write_that_never_began_get_an_error_that_says_nothing_happened(answers, monkeypatch):
    async with actors() as harness:
        await harness.create()
        write = harness.store.write

        async def refuse(commit, *, claim, expect=()):
            monkeypatch.setattr(harness.store, "write", write)
            await trio.lowlevel.checkpoint()
            raise NothingWritten("the store had failed before")

        monkeypatch.setattr(harness.store, "write", refuse)
        with pytest.raises(StorageFailed) as told:
            await harness.publish("m")
        assert told.value.outcome == "not-applied"
        assert await harness.read() == []
        await harness.publish("m")
        assert await harness.read() == [b"m"]


async def test_parked_polls_get_an_error_when_the_actor_crashes(answers, autojump_clock):
    async with actors() as harness:
        await harness.create()
        answers.ask(harness.look, await harness.end(), wait_s=60)
        await wait_all_tasks_blocked()
        harness.store.fail_next("write")
        with pytest.raises(OutcomeUnknown):
            await harness.publish("m")
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [StorageFailed]


async def test_requests_that_waited_for_a_failed_write_are_served_after_the_reload(answers):
    async with actors() as harness:
        await harness.create()
        harness.store.fail_next("write")
        harness.store.stall("write")
        answers.ask(harness.publish, "lost")
        await harness.store.stalled("write")
        for number in range(10):
            answers.ask(harness.publish, f"{number}")
        await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers if isinstance(answer, PlainsongError)] == [OutcomeUnknown]
        assert sorted(await harness.read()) == [b"%d" % number for number in range(10)]


async def test_a_power_cut_during_a_write_loses_no_acknowledged_message(answers):
    async with actors() as harness:
        await harness.create()
        await harness.publish("kept")
        harness.store.stall("write")
        answers.ask(harness.publish, "a", "b", "c")
        await harness.store.stalled("write")
        harness.store.crash(keep_rows=2)
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [OutcomeUnknown]
        assert await harness.read() == [b"kept", b"a", b"b"]


async def test_ids_keep_increasing_after_a_crash_although_the_clock_went_back():
    async with actors() as harness:
        await harness.create()
        before = await harness.publish("a")
        harness.clock.ms -= 3_600_000
        harness.store.fail_next("write", applied=True)
        with pytest.raises(OutcomeUnknown):
            await harness.publish("b")
        after = await harness.publish("c")
        assert before.first_id < after.first_id
        assert await harness.read(after_receipt(before)) == [b"b", b"c"]
        assert await harness.read() == [b"a", b"b", b"c"]


async def test_a_failing_write_at_the_end_does_not_delay_the_exit(autojump_clock):
    async with actors() as harness:
        await harness.create()
        await harness.publish("m")
        for _ in range(1_000):
            harness.store.fail_next("write")
        harness.directory.close()
        with trio.fail_after(60):
            await harness.directory.drained()
        assert harness.store.calls["write"] < 10


async def test_closing_a_topic_leaves_a_mark_that_shortens_the_next_load(monkeypatch):
    async with actors() as harness:
        await harness.create()
        for number in range(50):
            await harness.publish(f"{number}")
        store = harness.store
    async with actors(store) as harness:
        assert len(await harness.read()) == 50
        assert harness.core().state.rows_since_mark == 0
        assert harness.core().state.usage.messages == 50
