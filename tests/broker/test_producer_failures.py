"""The failure matrix of producers, row by row: the answers when something dies, fails, waits or is restored."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from broker_in_process import START_MS, TOPICS
from trio.testing import wait_all_tasks_blocked
from whole_course import Killed, life

from actors.janitor import Janitor
from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table
from plainsong.protocol.keys import HIGH_WATER, PRODUCER
from storage.memory import MemoryStore
from tests.patience import PATIENCE_S
from tests.storage.faulty import FaultyStore

PUBLISH, PRODUCERS = f"{TOPICS}/t/publish", f"{TOPICS}/t/producers"


@pytest.fixture
def store():
    return FaultyStore(MemoryStore())


@asynccontextmanager
async def life_of(store, ttl_s=None, **settings):
    """Run a daemon with a topic ``t``, and end it as SIGKILL does."""
    async with life(store, **settings) as daemon:
        properties = {} if ttl_s is None else {"ttl": ttl_s}
        await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", json=properties)
        yield daemon
        raise Killed


async def opened(daemon, name="p", **more):
    return (await daemon.call("PUT", f"{PRODUCERS}/{name}", json={}, **more)).json()


async def send(daemon, ids, *, producer="p", status=200, code=None, session=None, path=PUBLISH, **more):
    """Publish one message for each id, in this session if one is given."""
    if session is not None:
        more |= {"producerEpoch": session["epoch"], "generation": session["generation"]}
    body = {"messages": [f"{producer}{each}" for each in ids], "producer": producer, "sequenceIds": list(ids), **more}
    return (await daemon.call("POST", path, json=body, status=status, code=code)).json()


async def payloads(daemon, **body):
    return [message["payload"] for message in await daemon.poll(**body)]


class Held:
    """Asks that wait for a stalled store, and their answers."""

    def __init__(self, daemon, nursery):
        self.daemon, self.nursery, self.answers = daemon, nursery, {}

    async def ask(self, name, call, *arguments, **more):
        """Ask, and return once the ask waits."""

        async def asked():
            self.answers[name] = await call(self.daemon, *arguments, **more)

        self.nursery.start_soon(asked)
        await wait_all_tasks_blocked()


@asynccontextmanager
async def held(daemon):
    """Stall every write inside the block."""
    daemon.store.stall("write")
    async with trio.open_nursery() as nursery:
        try:
            yield Held(daemon, nursery)
        finally:
            daemon.store.release("write")


# --- clients that die ----------------------------------------------------------------------------


async def test_row_1_a_client_that_died_before_sending_reopens_and_continues_after_its_last_id(store):
    async with life_of(store) as daemon:
        session = await opened(daemon)
        await send(daemon, [0, 1], session=session)
        again = await opened(daemon)
        assert again["lastSequenceId"] == 1
        await send(daemon, [2], session=again)
        assert await payloads(daemon) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("stored", [False, True])
async def test_row_2_reopening_tells_a_client_that_died_after_sending_whether_it_was_stored(store, stored):
    async with life_of(store) as daemon:
        session = await opened(daemon)
        store.fail_next("write", applied=stored)
        await send(daemon, [0], session=session, status=503, code="outcome_unknown")
        session = await opened(daemon)
        assert session["lastSequenceId"] == (0 if stored else -1)
        if not stored:
            await send(daemon, [0], session=session)
        assert await payloads(daemon) == ["p0"]


# --- servers that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [0, 1, 2, True])
async def test_rows_3_to_5_a_batch_whose_daemon_died_in_its_commit_is_whole_or_absent(store, applied):
    async with life_of(store) as daemon:
        session = await opened(daemon)
        await send(daemon, [0], session=session)
        store.fail_next("write", applied=applied)
        await send(daemon, [1, 2, 3], atomic=True, session=session, status=503, code="outcome_unknown")
    async with life_of(store) as daemon:
        session = await opened(daemon)
        whole = applied is True
        assert session["lastSequenceId"] == (3 if whole else 0)
        assert len(await payloads(daemon)) == (4 if whole else 1)
        if not whole:
            await send(daemon, [1, 2, 3], atomic=True, session=session)
        assert await payloads(daemon) == ["p0", "p1", "p2", "p3"]


async def test_row_6_answers_that_are_in_no_snapshot_are_known_after_a_crash(store):
    async with life_of(store) as daemon:
        first = await send(daemon, [0, 1, 2])
    async with life_of(store) as daemon:
        again = await send(daemon, [0, 1, 2])
        assert (again["duplicate"], again["firstId"], again["lastId"]) == (True, first["firstId"], first["lastId"])
        told = (await daemon.call("GET", PRODUCERS)).json()
        assert (told["lastReplay"]["entries"], told["snapshot"]["entriesSince"]) == (1, 1)


@pytest.mark.parametrize("applied", range(8))
async def test_row_7_an_interrupted_snapshot_loses_no_producer(store, applied):
    async with life_of(store, deduplication__snapshot_entries=4) as daemon:
        for producer in "abc":
            await send(daemon, [5], producer=producer)
        store.fail_next("write", applied=applied)  # the next commit writes all rows
        await send(daemon, [5], producer="d", status=503, code="outcome_unknown")
    async with life_of(store) as daemon:
        told = (await daemon.call("GET", PRODUCERS)).json()["producers"]
        there = await payloads(daemon)
        assert there[:3] == ["a5", "b5", "c5"]
        assert {f"{each['producer']}{each['persisted']}" for each in told} == set(there)
        for producer in "abcd":
            assert (await send(daemon, [5], producer=producer))["duplicate"] is (f"{producer}5" in there)


async def test_e26_a_timed_snapshot_that_fails_is_taken_later(store, autojump_clock):
    async with life_of(store, deduplication__snapshot_interval_s=60) as daemon:
        await send(daemon, [0])
        store.fail_next("write")
        await trio.sleep(61)
        await send(daemon, [1])
        assert (await send(daemon, [0]))["duplicate"] is True
        await trio.sleep(61)
        assert (await daemon.call("GET", PRODUCERS)).json()["snapshot"]["entriesSince"] == 0
        assert await payloads(daemon) == ["p0", "p1"]


# --- duplicates, and asks that wait --------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_row_9_copies_that_arrive_while_the_first_is_written_share_its_outcome(store, fails):
    async with life_of(store) as daemon:
        if fails:
            store.fail_next("write")
        expected = {"status": 503, "code": "outcome_unknown"} if fails else {}
        async with held(daemon) as behind:
            await behind.ask("first", send, [0, 1], **expected)
            for copy in ("second", "third"):
                await behind.ask(copy, send, [0, 1])
            assert behind.answers == {}
        first, second, third = (behind.answers[name] for name in ("first", "second", "third"))
        if fails:  # the duplicates were not in its commit, so the first of them is stored
            assert (second["duplicate"], third["duplicate"]) == (False, True)
        else:
            assert (first["duplicate"], second["duplicate"], third["duplicate"]) == (False, True, True)
            assert first["firstId"] == second["firstId"]
        assert (second["firstId"], second["lastId"]) == (third["firstId"], third["lastId"])
        assert await payloads(daemon) == ["p0", "p1"]


async def test_e20_no_id_is_reported_before_it_is_durable(store):
    async with life_of(store) as daemon:
        await send(daemon, [0])
        store.fail_next("write")
        async with held(daemon) as behind:
            await behind.ask("publish", send, [1], status=503, code="outcome_unknown")
            await behind.ask("open", opened)
            await behind.ask("poll", payloads)
            assert behind.answers == {}
        assert behind.answers["open"]["lastSequenceId"] == 0
        assert behind.answers["poll"] == ["p0"]


async def test_row_15_requests_of_an_older_session_that_arrive_after_the_opening_have_no_effect(store):
    async with life_of(store) as daemon:
        older = await opened(daemon)
        async with held(daemon) as behind:
            await behind.ask("before", send, [0], session=older)
            await behind.ask("newer", opened)
            await behind.ask("delayed", send, [1], session=older, status=409, code="producer_fenced")
        newer = behind.answers["newer"]
        assert (newer["epoch"] > older["epoch"], newer["lastSequenceId"]) == (True, 0)
        await send(daemon, [1], session=newer)
        assert await payloads(daemon) == ["p0", "p1"]


async def test_row_16_two_programs_with_one_name_and_no_sessions_get_the_dropped_ids(store):
    async with life_of(store) as daemon:
        await send(daemon, [0, 2, 4])
        told = await send(daemon, [1, 3, 5], messages=["q1", "q3", "q5"])
        assert (told["stored"], told["dropped"]) == ([5], [1, 3])
        assert await payloads(daemon) == ["p0", "p2", "p4", "q5"]


async def test_row_12_a_lower_id_that_was_never_stored_is_a_duplicate_without_ids_and_is_counted(store):
    async with life_of(store) as daemon:
        await send(daemon, [5])
        told = await send(daemon, [3])
        assert (told["duplicate"], told["firstId"], told["lastId"]) == (True, None, None)
        assert await payloads(daemon) == ["p5"]
        metrics = (await daemon.call("GET", "/metrics")).text
        assert 'plainsong_producer_events_total{event="unremembered"} 1.0' in metrics


# --- producers that were forgotten ---------------------------------------------------------------


async def test_rows_17_and_18_a_forgotten_producer_is_refused_by_its_session_and_starts_over_without_one(store):
    async with life_of(store, deduplication__producer_retention_s=60) as daemon:
        session = await opened(daemon)
        await send(daemon, [0], session=session)
        await send(daemon, [0], producer="nameless")
        daemon.clock.ms += 61_000
        await send(daemon, [0], session=session, status=410, code="producer_expired")
        assert (await opened(daemon))["lastSequenceId"] == -1
        assert (await send(daemon, [0], producer="nameless"))["duplicate"] is False
        assert await payloads(daemon) == ["p0", "nameless0", "nameless0"]
    async with life_of(store, deduplication__producer_retention_s=60) as daemon:
        await send(daemon, [1], session=session, status=409, code="producer_fenced")


async def test_row_19_a_recreated_topic_accepts_nothing_from_producers_of_the_old_one(store):
    async with life_of(store) as daemon:
        session = await opened(daemon)
        await send(daemon, [0], session=session)
        await daemon.call("DELETE", f"{TOPICS}/t")
        await daemon.create()
        await send(daemon, [0], session=session, status=409, code="generation_changed")
        told = (await daemon.call("GET", f"{PRODUCERS}/p?generation=1")).json()
        assert told["lastSequenceId"] == 0
        assert await payloads(daemon) == []


# --- groups --------------------------------------------------------------------------------------


async def test_row_22_an_invalid_request_in_the_middle_of_a_group_fails_alone(store):
    async with life_of(store) as daemon:
        await send(daemon, [7], producer="p3")
        writes = store.calls["write"]
        async with held(daemon) as behind:
            await behind.ask("first", send, [0], producer="p0")
            for each in (1, 2, 4, 5):
                await behind.ask(f"p{each}", send, [0], producer=f"p{each}")
                if each == 2:
                    partial = {"status": 409, "code": "partial_duplicate"}
                    await behind.ask("p3", send, [7, 8], producer="p3", atomic=True, **partial)
        assert store.calls["write"] == writes + 2  # one for the first, and one for all others
        assert await payloads(daemon) == ["p37", "p00", "p10", "p20", "p40", "p50"]


@pytest.mark.parametrize("applied", [False, True])
async def test_row_23_a_group_whose_write_fails_has_one_outcome_and_each_is_stored_once(store, applied):
    async with life_of(store) as daemon:
        store.fail_next("write", applied=applied, after=1)
        unknown = {"status": 503, "code": "outcome_unknown"}
        names = [f"p{each}" for each in range(10)]
        async with held(daemon) as behind:
            await behind.ask("first", send, [0], producer="first")
            for name in names:
                await behind.ask(name, send, [0, 1], producer=name, atomic=name in names[::2], **unknown)
        assert {behind.answers[name]["outcome"] for name in names} == {"unknown"}
        for name in names:
            assert (await send(daemon, [0, 1], producer=name, atomic=name in names[::2]))["duplicate"] is applied
        assert await payloads(daemon) == ["first0", *(f"{name}{each}" for name in names for each in (0, 1))]


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ms", [-3_600_000, 0], ids=["set back an hour", "the same millisecond"])
async def test_row_24_a_restart_with_the_same_clock_overwrites_nothing(store, ms):
    ids = []
    for number in range(3):
        async with life_of(store) as daemon:
            daemon.clock.ms = START_MS + number * ms
            session = await opened(daemon)
            assert session["lastSequenceId"] == 2 * number - 1
            receipt = await send(daemon, [2 * number, 2 * number + 1], session=session)
            ids += [receipt["firstId"], receipt["lastId"]]
            assert (await send(daemon, [2 * number], session=session))["duplicate"] is True
    assert ids == sorted(set(ids))
    async with life_of(store) as daemon:
        assert await payloads(daemon) == [f"p{each}" for each in range(6)]


# --- loads that fail -----------------------------------------------------------------------------


async def test_row_26_a_topic_that_cannot_be_loaded_accepts_nothing_unchecked_and_then_recovers(store, autojump_clock):
    async with life_of(store) as daemon:
        await send(daemon, [0])
    # The application's own loads come first, and only the topic's loads may fail.
    async with life(store) as daemon:
        store.fail_next("scan")
        store.fail_next("scan", after=1)
        for _ in range(2):
            answer = await daemon.http.post(PUBLISH, json={"messages": ["x"], "producer": "p", "sequenceIds": [0]})
            assert answer.status_code == 503, answer.text
            assert answer.json()["outcome"] != "applied"
        with trio.fail_after(PATIENCE_S):
            while (answer := await daemon.http.get(f"{PRODUCERS}/p")).status_code != 200:
                assert answer.status_code == 503
                await trio.sleep(0.1)
        assert (await send(daemon, [0]))["duplicate"] is True
        assert await payloads(daemon) == ["p0"]


async def test_e28_requests_during_a_load_wait_for_its_producers(store):
    async with life_of(store) as daemon:
        await send(daemon, [0])
    async with life(store) as daemon, trio.open_nursery() as nursery:
        behind = Held(daemon, nursery)
        store.stall("scan")
        nursery.cancel_scope.deadline = trio.current_time() + PATIENCE_S
        for each in range(3):
            await behind.ask(each, send, [0])
        assert behind.answers == {}
        claims = store.calls["claim"]
        store.release("scan")
        await wait_all_tasks_blocked()
        assert [answer["duplicate"] for answer in behind.answers.values()] == [True] * 3
        assert store.calls["claim"] == claims  # one load for all asks
        assert await payloads(daemon) == ["p0"]


async def test_e30_deduplication_switched_off_during_a_load_is_off(store):
    async with life_of(store) as daemon:
        await send(daemon, [0])
    async with life(store) as daemon, trio.open_nursery() as nursery:
        behind = Held(daemon, nursery)
        store.stall("scan")
        await behind.ask("publish", send, [0])
        await daemon.call("PUT", "/v1/namespaces/ns/properties", json={"deduplication": "disabled"})
        store.release("scan")
        await wait_all_tasks_blocked()
        told = behind.answers["publish"]
        assert (told["duplicate"], told["deduplicated"], told["lastSequenceId"]) == (False, False, None)
        assert (await daemon.call("GET", PRODUCERS)).json()["producers"] == []


@pytest.mark.parametrize("damage", ["missing", "damaged"])
async def test_e31_a_topic_without_its_high_water_mark_still_remembers_its_producers(store, damage):
    async with life_of(store, deduplication__snapshot_entries=2) as daemon:
        for each in range(4):
            await send(daemon, [each])
            await send(daemon, [each], producer="q")
    rows = store.inner.tables[Table.METADATA].rows
    [mark] = [key for key in rows if key[:2] == b"\x00" + HIGH_WATER]
    if damage == "missing":
        store.inner.tables[Table.METADATA].remove([mark])
    else:
        rows[mark] = b"\xff"
    async with life_of(store) as daemon:
        for producer in "pq":
            assert (await send(daemon, [3], producer=producer))["duplicate"] is True
            assert (await send(daemon, [4], producer=producer))["duplicate"] is False


async def test_a_producer_whose_row_is_damaged_is_refused_until_it_is_deleted_and_others_continue(store):
    async with life_of(store) as daemon:
        await opened(daemon)
        await opened(daemon, "q")
    rows = store.inner.tables[Table.METADATA].rows
    [key] = [key for key in rows if key[:2] == b"\x00" + PRODUCER and key.endswith(b"p")]
    rows[key] = b"\xff"
    async with life_of(store) as daemon:
        await send(daemon, [0], status=503, code="storage_failed")
        await send(daemon, [0], producer="q")
        await daemon.call("DELETE", f"{PRODUCERS}/p")
        await send(daemon, [0])
        assert await payloads(daemon) == ["q0", "p0"]


# --- cleaning, write pointers, the transaction service -------------------------------------------


async def test_row_27_removed_expired_messages_stay_duplicates_after_a_crash(store):
    async with life_of(store, ttl_s=60) as daemon:
        await send(daemon, [0, 1, 2])
        daemon.clock.ms += 61_000
        service = daemon.service
        await Janitor(store, service.directory, daemon.clock, service.metrics, RetentionConfig()).clean_all()
        assert not store.inner.tables[Table.MESSAGE].rows
        assert (await send(daemon, [2]))["duplicate"] is True
    async with life_of(store, ttl_s=60) as daemon:
        assert (await send(daemon, [1]))["duplicate"] is True
        assert (await opened(daemon))["lastSequenceId"] == 2


@pytest.mark.parametrize("restart", [False, True])
async def test_row_28_ids_that_a_rolled_back_transaction_used_are_consumed(store, restart):
    async with life_of(store) as daemon:
        begun = (await daemon.call("POST", "/v1/transactions", json={})).json()["id"]
        await send(daemon, [0, 1], transactionWritePointer=begun)
        await daemon.call("POST", f"/v1/transactions/{begun}/abort")
        if not restart:
            await consumed(daemon)
    if restart:
        async with life_of(store) as daemon:
            await consumed(daemon)


async def consumed(daemon):
    other = (await daemon.call("POST", "/v1/transactions", json={})).json()["id"]
    await send(daemon, [0, 1], transactionWritePointer=other, status=409, code="sequence_consumed")
    await send(daemon, [0, 1], status=409, code="sequence_consumed")
    await send(daemon, [2, 3], transactionWritePointer=other)
    await daemon.call("POST", f"/v1/transactions/{other}/commit")
    assert await payloads(daemon, isolation="committed") == ["p2", "p3"]


@pytest.mark.parametrize("applied", [False, True])
async def test_e60_a_store_repeated_after_a_crash_and_its_publish_deliver_each_payload_once(store, applied):
    async with life_of(store) as daemon:
        begun = (await daemon.call("POST", "/v1/transactions", json={})).json()["id"]
        stored = {"transactionWritePointer": begun, "path": f"{TOPICS}/t/store"}
        for each in (0, 1):
            store.fail_next("write", applied=applied)
            unknown = {"status": 503, "code": "outcome_unknown"}
            await daemon.call("POST", stored["path"], json=request([each], begun), **unknown)
            for _ in range(2):
                await daemon.call("POST", stored["path"], json=request([each], begun))
        store.fail_next("write", applied=applied)
        body = {"messages": [], "producer": "p", "sequenceIds": [2], "transactionWritePointer": begun}
        await daemon.call("POST", PUBLISH, json=body, status=503, code="outcome_unknown")
        for _ in range(2):
            await daemon.call("POST", PUBLISH, json=body)
        await daemon.call("POST", f"/v1/transactions/{begun}/commit")
        assert await payloads(daemon, isolation="committed") == ["p0", "p1"]


def request(ids, pointer):
    messages = [f"p{each}" for each in ids]
    return {"messages": messages, "producer": "p", "sequenceIds": ids, "transactionWritePointer": pointer}


async def test_e53_atomic_batches_need_no_transaction_service(store):
    async with life_of(store, transactions__service="off") as daemon:
        await send(daemon, [0, 1], atomic=True, routingKey="k")
        assert await payloads(daemon) == ["p0", "p1"]
