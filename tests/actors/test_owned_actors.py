"""Actors of several instances on one store: topics change owners, and no client gets an outdated answer."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME
from owners_in_process import instances, say
from trio.testing import wait_all_tasks_blocked

from actors import ownership, topic
from actors.ownership import ClaimPauses
from actors.topic import FEW_ROWS
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, ShuttingDown, StorageFailed
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.keys import HIGH_WATER, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Description, Look


async def caught(call, *args, **kwargs):
    try:
        return await call(*args, **kwargs)
    except PlainsongError as error:
        return error


async def test_a_topic_owned_elsewhere_is_not_opened():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        with pytest.raises(NoOwner) as caught_error:
            await harnesses["b"].publish("m")
        assert (caught_error.value.outcome, caught_error.value.retry_after_s) == ("not-applied", 1)
        assert len(harnesses["b"].directory) == 0
        assert harnesses["b"].store._shared.epochs[NAME] == 1


async def test_a_query_is_not_answered_outside_a_step_when_the_topic_may_have_moved():
    async with instances("a") as harnesses:
        a = harnesses["a"]
        await a.create()
        await a.publish("m")
        assert (await a.page()).count == 1
        assert a.directory.look_now(NAME, Look(FIRST_BOUND)) is None


async def test_a_topic_that_changes_hands_is_served_by_its_next_owner_with_every_acknowledged_message():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        await harnesses["a"].publish("one", "two")
        say(harnesses, "b")
        await harnesses["b"].publish("three")
        assert await harnesses["b"].read() == [b"one", b"two", b"three"]
        with pytest.raises(NoOwner):
            await harnesses["a"].publish("four")
        assert harnesses["a"].directory.environment.ownership.lost == []


async def test_requests_accepted_before_a_handover_are_served_and_later_ones_refused(nursery):
    async with instances("a", "b") as harnesses:
        a = harnesses["a"]
        await a.create()
        a.store.reachable = trio.Event()
        answers = []

        async def publish(payload):
            answers.append((payload, await caught(a.publish, payload)))

        nursery.start_soon(publish, "taken")
        await wait_all_tasks_blocked()
        nursery.start_soon(publish, "in the mailbox")
        await wait_all_tasks_blocked()
        say(harnesses, "b")
        await publish("late")
        a.store.reachable.set()
        await wait_all_tasks_blocked()
        found = dict(answers)
        assert isinstance(found["late"], NoOwner)
        assert not isinstance(found["taken"], PlainsongError)
        assert not isinstance(found["in the mailbox"], PlainsongError)
        assert await harnesses["b"].read() == [b"taken", b"in the mailbox"]


async def test_a_parked_poll_is_answered_empty_when_its_topic_changes_hands(nursery):
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        end = await harnesses["a"].end()
        answers = []

        async def wait():
            answers.append(await harnesses["a"].look(end, wait_s=60))

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        say(harnesses, "b")
        await wait_all_tasks_blocked()
        assert [span.until for span in answers] == [end]
        assert len(harnesses["a"].directory) == 0


async def test_a_parked_poll_of_a_topic_that_was_taken_gets_an_error_instead_of_a_stale_end(nursery):
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        end = await harnesses["a"].end()
        answers = []

        async def wait():
            answers.append(await caught(harnesses["a"].look, end, wait_s=60))

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        harnesses["b"].directory.environment.ownership.set("b")
        await harnesses["b"].publish("newer")
        harnesses["a"].directory.environment.ownership.set("b")
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [NoOwner]


async def test_a_parked_poll_at_its_deadline_gets_an_error_when_the_topic_was_taken(autojump_clock):
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        end = await harnesses["a"].end()
        async with trio.open_nursery() as nursery:
            answers = []

            async def wait():
                answers.append(await caught(harnesses["a"].look, end, wait_s=5))

            nursery.start_soon(wait)
            await trio.sleep(1)
            harnesses["b"].directory.environment.ownership.set("b")
            await harnesses["b"].publish("newer")
        assert [type(answer) for answer in answers] == [NoOwner]
        assert harnesses["a"].directory.environment.ownership.lost == [NAME]


async def test_an_owner_that_was_replaced_answers_no_read_and_acknowledges_no_write():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        await harnesses["a"].publish("one")
        harnesses["b"].directory.environment.ownership.set("b")
        await harnesses["b"].publish("two")
        assert isinstance(await caught(harnesses["a"].look), NoOwner)
        assert harnesses["a"].directory.environment.ownership.lost == [NAME]
        assert len(harnesses["a"].directory) == 0
        assert await harnesses["b"].read() == [b"one", b"two"]


async def test_a_write_that_meets_another_owner_reports_its_outcome():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        harnesses["b"].directory.environment.ownership.set("b")
        await harnesses["b"].publish("two")
        error = await caught(harnesses["a"].publish, "lost")
        assert isinstance(error, NoOwner | OutcomeUnknown)
        assert await harnesses["b"].read() == [b"two"]


async def test_a_refusal_based_on_a_stale_state_is_not_sent():
    async with instances("a", "b") as harnesses:
        assert isinstance(await caught(harnesses["a"].publish, "no topic"), PlainsongError)
        harnesses["b"].directory.environment.ownership.set("b")
        await harnesses["b"].create()
        assert isinstance(await caught(harnesses["a"].publish, "one"), NoOwner)


async def test_a_failed_check_is_a_failed_read_and_the_topic_is_reloaded():
    async with instances("a") as harnesses:
        a = harnesses["a"]
        await a.create()
        check = a.store.check

        async def failing(claim):
            a.store.check = check
            raise StorageFailed("no gateway answers")

        a.store.check = failing
        error = await caught(a.look)
        assert type(error) is StorageFailed
        assert error.outcome == "not-applied"
        assert await a.read() == []
        assert a.watch.loads[NAME] == 2


async def test_one_ownership_check_serves_the_whole_batch(nursery):
    async with instances("a") as harnesses:
        a = harnesses["a"]
        await a.create()
        await a.look()
        a.store.reachable = trio.Event()
        checks = []
        check = a.store.check

        async def counting(claim):
            checks.append(claim)
            await check(claim)

        a.store.check = counting
        nursery.start_soon(a.look)
        await wait_all_tasks_blocked()
        for _ in range(20):
            nursery.start_soon(a.look)
        await wait_all_tasks_blocked()
        a.store.reachable.set()
        await wait_all_tasks_blocked()
        assert len(checks) == 2  # one check for the first look, and one for the looks that waited for it


async def test_queries_that_park_or_that_a_commit_answers_are_not_checked(nursery):
    async with instances("a") as harnesses:
        a = harnesses["a"]
        await a.create()
        end = await a.end()
        checks = []
        check = a.store.check

        async def counting(claim):
            checks.append(claim)
            await check(claim)

        a.store.check = counting
        nursery.start_soon(a.ask, Look(end, deadline_s=trio.current_time() + 60))
        await wait_all_tasks_blocked()
        await a.publish("m")
        await wait_all_tasks_blocked()
        assert checks == []


async def test_two_instances_that_both_claim_a_topic_do_not_take_it_from_each_other_at_request_rate(
    autojump_clock,
):
    async with instances("a", "b") as harnesses:
        for name, harness in harnesses.items():
            harness.directory.environment.ownership.set(name)
        await harnesses["a"].create()
        deadline_s = trio.current_time() + 100
        acknowledged = []
        while trio.current_time() < deadline_s:
            for name, harness in harnesses.items():
                payload = f"{name}{len(acknowledged)}"
                if not isinstance(await caught(harness.publish, payload), PlainsongError):
                    acknowledged.append(payload.encode())
            await trio.sleep(0.05)
        claims = harnesses["a"].store._shared.epochs[NAME]
        assert 10 < claims < 60
        assert len(acknowledged) > 1_600
        last = max(harnesses.values(), key=lambda harness: len(harness.directory))
        assert await last.read() == acknowledged


async def test_a_pause_ends_when_the_view_changes():
    pauses = ClaimPauses()
    assert [pauses.begin(NAME, 0.0) for _ in range(9)][-3:] == [6.4, 10.0, 10.0]
    assert pauses.holds(NAME, 9.0)
    pauses.end()
    assert not pauses.holds(NAME, 0.0)
    assert pauses.begin(NAME, 30.0) == 10.0
    assert pauses.begin(NAME, 100.0) == ownership.PAUSES_S[0]


async def test_the_number_of_remembered_pauses_is_bounded(monkeypatch):
    monkeypatch.setattr(ownership, "MAX_TOPICS", 3)
    pauses = ClaimPauses()
    for number in range(5):
        pauses.begin(TopicName("ns", f"t{number}"), 0.0)
    assert len(pauses) == 3
    assert not pauses.holds(TopicName("ns", "t0"), 0.0)


@pytest.mark.parametrize(("messages", "marked"), [(FEW_ROWS, False), (FEW_ROWS + 1, True)])
async def test_a_handover_writes_a_mark_if_that_shortens_the_next_load(messages, marked):
    async with instances("a", "b") as harnesses:
        a, b = harnesses["a"], harnesses["b"]
        await a.create()
        await a.publish(*map(str, range(messages)))
        before = await a.store.get(Table.METADATA, system_key(HIGH_WATER, NAME, 1))
        say(harnesses, "b")
        await wait_all_tasks_blocked()
        after = await a.store.get(Table.METADATA, system_key(HIGH_WATER, NAME, 1))
        assert (after != before) is marked
        assert len(await b.read()) == messages


async def test_a_topic_waiting_to_be_opened_is_not_claimed_once_another_instance_owns_it(nursery, monkeypatch):
    monkeypatch.setattr(topic, "FEW_ROWS", 0)
    async with instances("a", "b") as harnesses:
        a = harnesses["a"]
        await a.create()
        await a.publish("one")
        a.store.reachable = trio.Event()
        say(harnesses, "b")  # the mark cannot be written yet, and the next opening waits for it
        say(harnesses, "a")
        answers = []

        async def publish():
            answers.append(await caught(a.publish, "m"))

        nursery.start_soon(publish)
        await wait_all_tasks_blocked()
        say(harnesses, "b")
        a.store.reachable.set()
        await wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [NoOwner]
        assert a.store._shared.epochs[NAME] == 1


async def test_a_topic_queued_to_be_opened_is_not_claimed_once_another_instance_owns_it(nursery):
    first, second = TopicName("ns", "first"), TopicName("ns", "second")
    async with instances("a", "b", openings=trio.CapacityLimiter(1)) as harnesses:
        a = harnesses["a"]
        a.store.reachable = trio.Event()
        answers = []

        async def create(name):
            answers.append((name, await caught(a.create, name)))

        nursery.start_soon(create, first)
        await wait_all_tasks_blocked()
        nursery.start_soon(create, second)
        await wait_all_tasks_blocked()
        say(harnesses, "b", second)
        a.store.reachable.set()
        await wait_all_tasks_blocked()
        assert {name: type(answer) for name, answer in answers} == {first: Description, second: NoOwner}
        assert second not in a.store._shared.epochs


async def test_a_thousand_topics_are_released_with_a_bounded_number_of_concurrent_writes(nursery, monkeypatch):
    monkeypatch.setattr(topic, "FEW_ROWS", 0)
    async with instances("a", "b", max_open=2_000) as harnesses:
        a = harnesses["a"]
        for number in range(300):
            name = TopicName("ns", f"t{number}")
            await a.create(name)
            await a.publish("m", name=name)
        under_way, most = 0, 0
        write = a.store.write

        async def counting(commit, *, claim, expect=()):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await write(commit, claim=claim, expect=expect)
            under_way -= 1

        a.store.write = counting
        a.store.reachable = trio.Event()
        say(harnesses, "b")
        await wait_all_tasks_blocked()
        assert len(a.directory) == 0
        a.store.reachable.set()
        await a.directory.drained()
        assert 0 < most <= 64


async def test_the_janitor_cleans_only_owned_topics():
    async with instances("a", "b") as harnesses:
        a = harnesses["a"]
        await a.create(ttl_s=1)
        await a.publish("m")
        say(harnesses, "b")
        await a.directory.drained()
        for harness in harnesses.values():
            harness.clock.ms += 3_600_000
        assert await a.janitor.clean_all() == 0
        assert await harnesses["b"].janitor.clean_all() == 1


async def test_a_stopping_daemon_reports_its_stop_and_no_handover():
    async with instances("a") as harnesses:
        await harnesses["a"].create()
        harnesses["a"].directory.close()
        with pytest.raises(ShuttingDown):
            await harnesses["a"].publish("m")
