"""Turns without the actor's task: mail is decided at once, and a commit answers when the store reports its outcome."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from actors_in_process import NAME, actors
from trio.testing import wait_all_tasks_blocked

from actors.mailbox import RunQueue
from actors.settings import CommitConfig
from plainsong.protocol.errors import OutcomeUnknown, ShuttingDown, StorageFailed, TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest, Receipt
from plainsong.protocol.topic.asks import Create, Look, Publish, Remove
from storage.base import NothingWritten, StoreError
from storage.memory import MemoryStore
from tests.patience import PATIENCE_S


class BackgroundStore(MemoryStore):
    """Keeps begun commits until the test decides their outcomes."""

    def __init__(self):
        super().__init__()
        self.begun = []
        #: Callbacks of all commits so far, to run while they sync.
        self.besides = []
        self._claims = []
        #: True if commits are kept; until then, they are written at once.
        self.keeps = False

    async def claim(self, name):
        self._claims.append(await super().claim(name))
        return self._claims[-1]

    def begin(self, commit, completed, *, claim, while_syncing=None):
        if not self.keeps:
            super().begin(commit, completed, claim=claim, while_syncing=while_syncing)
            return
        self.begun.append((commit, completed))
        self.besides.append(while_syncing)

    def release_all(self):
        """Do nothing: ``finish`` completes everything that is kept."""

    async def finish(self):
        """Make the oldest commit durable."""
        commit, settled = self.begun.pop(0)
        await self.write(commit, claim=self._claims[-1])
        settled(None)

    def fail(self, error):
        """Let the oldest commit fail."""
        self.begun.pop(0)[1](error)


def soon(turns):
    """Return a function that schedules due turns as a server is woken."""
    token = trio.lowlevel.current_trio_token()
    return lambda: token.run_sync_soon(turns.run_due)


@asynccontextmanager
async def background():
    """Run actors whose turns the test runs; yield also a function that delivers a publish."""
    store = BackgroundStore()
    async with actors(store=store) as around:
        await around.create()
        store.keeps = True
        turns = around.directory.environment.run_queue
        turns.attach(lambda: None, soon(turns))
        answers = []

        def bring(payload, **more):
            request = PublishRequest([payload], **more)
            around.directory.put(NAME, Publish(request, len(payload)), answers.append)

        try:
            yield around, store, turns, bring, answers
        finally:
            while store.begun:
                await store.finish()


async def payloads(around):
    return [payload for _, payload in (await around.page()).messages()]


async def test_publishes_submitted_together_share_a_commit_and_are_answered_once_it_is_durable():
    async with background() as (around, store, turns, bring, answers):
        for number in range(3):
            bring(b"%d" % number)
        turns.run()
        assert len(store.begun) == 1
        assert answers == []
        await store.finish()
        assert [type(answer) for answer in answers] == [Receipt] * 3
        assert await payloads(around) == [b"0", b"1", b"2"]


async def test_requests_during_a_commit_join_the_next_which_begins_before_the_answers_are_sent():
    async with background() as (around, store, turns, bring, answers):
        bring(b"first")
        turns.run()
        begun = []
        around.directory.put(NAME, Publish(PublishRequest([b"second"]), 6), lambda _: None)
        bring(b"third")
        answers_at = []
        turns.attach(lambda: answers_at.append(len(answers)), soon(turns))
        turns.run()
        assert len(store.begun) == 1
        await store.finish()
        begun.append(len(store.begun))
        assert begun == [1]
        assert answers_at == [0, 0]
        assert len(answers) == 1
        await store.finish()
        assert len(answers) == 2
        assert await payloads(around) == [b"first", b"second", b"third"]


async def test_a_query_is_answered_outside_a_step_only_while_the_topic_is_idle():
    async with background() as (around, store, turns, bring, answers):

        def look():
            return around.directory.look_now(NAME, Look(FIRST_BOUND))

        before = look()
        assert before == await around.look()
        bring(b"x")
        assert look() is None, "there is mail"
        turns.run()
        assert look() is None, "a commit is under way"
        store.fail(StoreError("the disk is gone"))
        assert look() is None, "the topic is about to be loaded again"
        await wait_all_tasks_blocked()
        assert isinstance(answers[0], OutcomeUnknown)
        assert await around.look() == before
        assert look() == before
        assert around.directory.look_now(NAME._replace(topic="other"), Look(FIRST_BOUND)) is None


async def test_a_refusal_is_answered_without_a_commit():
    async with background() as (around, store, turns, bring, answers):
        del bring
        other = NAME._replace(topic="missing")
        with trio.fail_after(PATIENCE_S):
            around.directory.put(other, Publish(PublishRequest([b"x"]), 1), answers.append)
            turns.run()
            while not answers:
                await wait_all_tasks_blocked()
        assert isinstance(answers[0], TopicNotFound)
        assert store.begun == []


@pytest.mark.parametrize(
    ("failure", "told"),
    [(StoreError("the disk is gone"), OutcomeUnknown), (NothingWritten("not begun"), StorageFailed)],
)
async def test_when_a_commit_fails_all_its_requests_get_an_error_and_the_topic_is_reloaded(failure, told):
    async with background() as (around, store, turns, bring, answers):
        bring(b"lost")
        bring(b"too")
        turns.run()
        bring(b"waits")
        store.fail(failure)
        assert [type(answer) for answer in answers] == [told] * 2
        await wait_all_tasks_blocked()
        while store.begun:
            await store.finish()
        assert isinstance(answers[-1], Receipt)
        assert await payloads(around) == [b"waits"]


async def test_a_task_that_asks_during_such_a_commit_is_answered_after_it():
    async with background() as (around, store, turns, bring, answers), trio.open_nursery() as nursery:
        bring(b"first")
        turns.run()
        found = []

        async def publish():
            found.append(await around.publish("second"))

        nursery.start_soon(publish)
        await wait_all_tasks_blocked()
        assert found == []
        await store.finish()
        await wait_all_tasks_blocked()
        while store.begun:
            await store.finish()
        await wait_all_tasks_blocked()
        assert len(found) == len(answers) == 1
        assert found[0].first_id > answers[0].last_id


async def test_a_topic_that_closes_waits_for_such_a_commit_and_answers_it():
    async with background() as (around, store, turns, bring, answers):
        bring(b"last")
        turns.run()
        around.directory.close()
        await wait_all_tasks_blocked()
        assert around.directory.closing == 1
        with pytest.raises(ShuttingDown):
            bring(b"too late")
        await store.finish()
        await around.directory.drained()
        assert isinstance(answers[0], Receipt)


async def test_cancelling_the_daemon_leaves_no_commit_unanswered():
    async with background() as (around, store, turns, bring, answers):
        bring(b"last")
        turns.run()
        around.directory._nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            await store.finish()
            await wait_all_tasks_blocked()
        assert isinstance(answers[0], Receipt)


async def test_a_deadline_moved_forward_in_such_a_step_is_met(autojump_clock):
    async with background() as (around, store, turns, bring, answers):
        bring(b"x", producer="p", sequence_ids=[1])
        turns.run()
        await store.finish()
        assert isinstance(answers[0], Receipt)
        core = around.directory.entry(NAME).actor.core
        assert core.next_deadline_s() is not None
        # The task writes the producers' snapshot without any further request.
        with trio.fail_after(1000):
            while core.next_deadline_s() is not None:
                await trio.sleep(1)
                while store.begun:
                    await store.finish()


# --- a store that writes on the event loop ------------------------------------------------------------


class InlineStore(BackgroundStore):
    """Writes a turn's commits at its end, unless the test leaves them to a thread."""

    writes_inline = True
    is_idle = True

    def __init__(self):
        super().__init__()
        self.keeps = True
        self.gathers = False
        self.groups = []
        #: Called while the disk works on a group, after the actors' callbacks; it may raise the group's error.
        self.while_the_disk_works = None

    def gather_writes(self):
        self.gathers = True

    def write_gathered(self):
        self.gathers = False
        if not (self.writes_inline and self.begun):
            return
        group, self.begun = self.begun, []
        self.groups.append(len(group))
        failed = None
        if self.while_the_disk_works is not None:
            for beside in self.besides[-len(group) :]:
                beside()
            try:
                self.while_the_disk_works()
            except StoreError as error:
                failed = error
        if failed is None:
            for commit, _ in group:
                self.apply(commit)
        for _, settled in group:
            settled(failed)


@asynccontextmanager
async def inline(topics=1, **more):
    """Like ``background``, with a store that writes inline, and turns attached to it."""
    store = InlineStore()
    turns = RunQueue(store)
    names = [NAME, *(NAME._replace(topic=f"other-{number}") for number in range(1, topics))]
    async with actors(store=store, run_queue=turns, **more) as around:
        answers = []

        def bring(payload, topic=0):
            """Receive a request as a server does."""
            turns.begin()
            request = PublishRequest([payload])
            around.directory.put(names[topic], Publish(request, len(payload)), answers.append)

        for name in names:
            await around.directory.ask(name, Create(TopicProperties()))
        await wait_all_tasks_blocked()
        store.groups.clear()
        woken = []
        turns.attach(lambda: None, lambda: woken.append(True))
        yield around, store, turns, bring, answers, woken
        store.writes_inline = False
        turns.detach()
        while store.begun:
            await store.finish()


async def test_commits_begun_by_actors_in_one_turn_are_one_write_answered_when_the_turn_ends():
    async with inline(topics=3) as (around, store, turns, bring, answers, woken):
        for topic in (0, 1, 2, 1):
            bring(b"x", topic)
        turns.run_due()
        assert store.groups == [3]
        assert [type(answer) for answer in answers] == [Receipt] * 4
        assert woken == []
        assert await payloads(around) == [b"x"]


async def test_requests_that_waited_for_loading_topics_are_one_write_without_the_tasks_of_the_actors():
    async with inline(topics=1) as (around, store, turns, _, answers, woken):
        names = [NAME._replace(topic=f"new-{number}") for number in range(3)]
        turns.begin()
        for name in names:
            around.directory.put(name, Create(TopicProperties()), answers.append)
        turns.run_due()
        with trio.fail_after(PATIENCE_S):
            while len(woken) < 3:
                await wait_all_tasks_blocked()
        assert answers == []
        turns.run_due()
        assert store.groups == [3]
        assert len(answers) == 3


async def test_requests_of_tasks_to_several_actors_in_one_turn_of_the_event_loop_are_one_write_without_a_server():
    async with inline(topics=3) as (around, store, turns, _, __, ___), trio.open_nursery() as nursery:
        turns.detach()
        names = [NAME, *(NAME._replace(topic=f"other-{number}") for number in (1, 2))]
        for name in names:
            nursery.start_soon(around.directory.ask, name, Publish(PublishRequest([b"x"]), 1))
        await wait_all_tasks_blocked()
        assert store.groups == [3]


async def test_a_topic_loaded_as_the_server_ends_serves_its_waiters():
    async with inline(topics=1) as (around, _, turns, _, answers, woken):
        around.directory.put(NAME._replace(topic="new"), Create(TopicProperties()), answers.append)
        turns.run_due()
        with trio.fail_after(PATIENCE_S):
            while not woken:
                await wait_all_tasks_blocked()
            turns.detach()
            while not answers:
                await wait_all_tasks_blocked()


async def test_requests_that_do_not_fit_into_a_commit_join_the_next_in_the_same_turn():
    async with inline(commits=CommitConfig(max_requests=2)) as (around, store, turns, bring, answers, _):
        for number in range(5):
            bring(b"%d" % number)
        turns.run_due()
        assert store.groups == [1, 1, 1]
        assert len(answers) == 5
        assert await payloads(around) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_commit_written_by_the_event_loop_begins_after_the_answers_of_the_previous_one():
    async with inline() as (around, store, turns, bring, answers, woken):
        store.writes_inline = False
        bring(b"first")
        turns.run_due()
        bring(b"second")
        taken_in = []
        turns.attach(lambda: taken_in.append(True), lambda: woken.append(True))
        store.writes_inline = True
        await store.finish()
        assert len(answers) == 1
        assert taken_in == store.begun == store.groups == []
        assert woken == [True]
        turns.run_due()
        assert len(answers) == 2
        assert await payloads(around) == [b"first", b"second"]


async def test_a_commit_written_by_a_thread_begins_before_the_answers_of_the_previous_one():
    async with inline() as (_, store, turns, bring, answers, woken):
        store.writes_inline = False
        bring(b"first")
        turns.run_due()
        bring(b"second")
        answered_at = []
        turns.attach(lambda: answered_at.append(len(answers)), lambda: woken.append(True))
        await store.finish()
        assert answered_at == [0]
        assert (len(answers), len(store.begun), woken) == (1, 1, [])


async def test_gathered_commits_are_written_although_an_actor_of_the_same_turn_fails():
    class Bad:
        def turn_now(self):
            raise ZeroDivisionError

    async with inline() as (around, store, turns, bring, answers, _):
        turns.soon(Bad())
        bring(b"x")  # due last, so its turn is first
        with pytest.raises(ZeroDivisionError):
            turns.run_due()
        assert len(answers) == 1
        assert not store.gathers
        assert await payloads(around) == [b"x"]


async def test_callbacks_due_when_the_server_ends_run_and_so_do_later_ones():
    async with inline() as (around, store, turns, bring, answers, _):
        bring(b"due")
        turns.detach()
        assert len(answers) == 1
        store.writes_inline = False
        turns.attach(lambda: None, soon(turns))
        bring(b"first")
        turns.run_due()
        bring(b"second")
        turns.detach()
        store.writes_inline = True
        await store.finish()
        while store.begun:
            store.writes_inline = False
            await store.finish()
        await wait_all_tasks_blocked()
        assert len(answers) == 3
        assert await payloads(around) == [b"due", b"first", b"second"]


# --- while the disk works ------------------------------------------------------------------------------


async def test_during_a_sync_the_actor_continues_and_no_answer_is_sent():
    async with inline() as (around, store, turns, bring, answers, _):
        bring(b"first")
        turns.run_due()
        until = around.core().state.until
        seen = []
        store.while_the_disk_works = lambda: seen.append((len(answers), around.core().state.until > until))
        bring(b"second")
        turns.run_due()
        assert seen == [(1, True)]
        assert len(answers) == 2
        assert await payloads(around) == [b"first", b"second"]


async def test_an_answer_is_prepared_before_the_sync_and_sent_after_it():
    async with inline() as (around, store, turns, _, __, ___):
        store.while_the_disk_works = lambda: told.append("the disk works")
        told = []
        ask = Publish(PublishRequest([b"x"]), 1)
        around.directory.put(NAME, ask, lambda found: told.append(("settled", found)), told.append)
        turns.run_due()
        prepared, between, (settled, given) = told
        assert isinstance(prepared, Receipt)
        assert (between, settled) == ("the disk works", "settled")
        assert given is prepared


async def test_when_the_sync_fails_nothing_of_the_commit_is_read_and_the_topic_is_reloaded():
    async with inline() as (around, store, turns, bring, answers, _):
        bring(b"kept")
        turns.run_due()

        def fail():
            raise StoreError("the disk is broken")

        store.while_the_disk_works = fail
        bring(b"lost")
        turns.run_due()
        assert isinstance(answers[1], OutcomeUnknown)
        assert around.directory.peek(NAME) is None  # nothing can be read until it is loaded again
        store.while_the_disk_works = None
        turns.attach(lambda: None, soon(turns))
        assert await payloads(around) == [b"kept"]
        bring(b"next")
        turns.run_due()
        assert await payloads(around) == [b"kept", b"next"]


async def test_when_the_sync_fails_a_waiting_poll_gets_nothing_of_the_commit():
    async with inline() as (around, store, turns, bring, _, __):
        bring(b"kept")
        turns.run_due()
        looked = []
        look = Look(around.core().state.until, deadline_s=trio.current_time() + 60)
        around.directory.put(NAME, look, looked.append)
        turns.run_due()
        await wait_all_tasks_blocked()
        assert looked == []

        def fail():
            raise StoreError("the disk is broken")

        store.while_the_disk_works = fail
        removed = []
        around.directory.put(NAME, Remove(), removed.append)
        turns.run_due()
        assert isinstance(removed[0], OutcomeUnknown)
        assert isinstance(looked[0], StorageFailed)
        store.while_the_disk_works = None
        turns.attach(lambda: None, soon(turns))
        assert await payloads(around) == [b"kept"]


async def test_an_error_during_the_sync_crashes_the_actor_once_the_outcome_of_the_commit_is_known(monkeypatch):
    async with inline() as (around, store, turns, bring, answers, _):
        monkeypatch.setattr(around.core(), "settled", lambda step, now: 1 / 0)
        store.while_the_disk_works = lambda: None
        bring(b"x")
        turns.run_due()
        assert isinstance(answers[0], OutcomeUnknown)
        monkeypatch.undo()
        turns.attach(lambda: None, soon(turns))
        assert await payloads(around) == [b"x"]
