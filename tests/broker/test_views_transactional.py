"""Views of a topic with transactions: messages and their states, counts, extents, many topics at once."""

from __future__ import annotations

import itertools
from binascii import b2a_base64
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process

from broker.api.topics import stats as topic_stats
from plainsong.protocol.ids import after
from plainsong.protocol.tephra.state import encode_transaction
from plainsong.protocol.transactions.transaction import Transaction
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

MANY = "/v1/namespaces/ns/poll"


class Transacting:
    """A daemon with its own transaction service, and shorthands for its requests."""

    def __init__(self, daemon):
        self.daemon = daemon

    async def begin(self):
        return (await self.daemon.call("POST", "/v1/transactions", json={})).json()

    async def end(self, transaction, how):
        return (await self.daemon.call("POST", f"/v1/transactions/{transaction['id']}/{how}")).json()

    async def post(self, verb, *payloads, pointer=None, topic="t", ms=None, **more):
        if ms is not None:
            self.daemon.clock.ms = START_MS + ms
        body = {"transactionWritePointer": pointer, "messages": list(payloads), **more}
        answer = await self.daemon.call("POST", f"{TOPICS}/{topic}/{verb}", json=body)
        return answer.json() if answer.content else None

    async def publish(self, *payloads, **more):
        return await self.post("publish", *payloads, **more)

    async def store(self, *payloads, **more):
        return await self.post("store", *payloads, **more)

    async def look(self, **parameters):
        return await self.daemon.call("GET", f"{TOPICS}/t/messages", params=parameters)

    async def offsets(self, **body):
        return (await self.daemon.call("POST", f"{TOPICS}/t/offsets", json=body)).json()

    async def poll(self, **body):
        return await self.daemon.call("POST", f"{TOPICS}/t/poll", json=body)

    async def reader(self, reader="00" * 20):
        return (await self.daemon.call("GET", f"{TOPICS}/t/stats", params={"reader": reader})).json()["reader"]


@asynccontextmanager
async def transacting(**settings):
    async with in_process(transactions__service="embedded", **settings) as daemon:
        await daemon.create()
        yield Transacting(daemon)


async def everything(harness):
    """Publish one message of every state, a stored transaction among them; return the transactions by name."""
    done, aborted, invalid, held = [await harness.begin() for _ in range(4)]
    await harness.publish("p0", ms=0)
    await harness.store("s0", "s1", "s2", pointer=done["writePointer"], ms=1)
    await harness.publish("c0", pointer=done["writePointer"], ms=2)
    await harness.publish("r0", pointer=aborted["writePointer"], ms=3)
    await harness.publish("i0", pointer=invalid["writePointer"], ms=4)
    await harness.end(done, "commit")
    await harness.end(aborted, "abort")
    await harness.end(invalid, "invalidate")
    await harness.publish("p1", ms=5)
    await harness.publish("o0", "o1", pointer=held["writePointer"], ms=6)
    await harness.publish("p2", ms=7)
    return {"done": done, "aborted": aborted, "invalid": invalid, "held": held}


# --- messages -------------------------------------------------------------------------------------


async def test_each_message_is_shown_with_the_state_of_its_transaction():
    async with transacting() as harness:
        pointers = {name: one["writePointer"] for name, one in (await everything(harness)).items()}
        shown = (await harness.look()).json()
        done = ("committed", pointers["done"])
        assert [(each["payload"], each["state"], each["writePointer"]) for each in shown] == [
            ("p0", "plain", None),
            *((payload, *done) for payload in ("s0", "s1", "s2", "c0")),
            ("r0", "rolled-back", pointers["aborted"]),
            ("i0", "invalid", pointers["invalid"]),
            ("p1", "plain", None),
            ("o0", "open", pointers["held"]),
            ("o1", "open", pointers["held"]),
            ("p2", "plain", None),
        ]
        assert {each["publishTimeMs"] for each in shown[1:4]} == {START_MS + 2}, "when they were published"
        assert {each["expiresMs"] - each["publishTimeMs"] for each in shown} == {604_800_000}
        as_strings = (await harness.look(longs="string")).json()
        assert as_strings[1]["writePointer"] == str(pointers["done"])


@pytest.mark.parametrize("restart", [False, True])
async def test_stored_messages_are_never_half_published_in_the_next_topic_of_the_same_name(restart):
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        transacting = Transacting(daemon)
        await daemon.create()
        begun = await transacting.begin()
        await transacting.post("store", "first half", pointer=begun["writePointer"])
        await daemon.call("DELETE", f"{TOPICS}/t")
        await daemon.create()
        if not restart:
            await _refused(daemon, begun)
    if restart:
        async with in_process(store=store) as daemon:
            await _refused(daemon, begun)


async def _refused(daemon, begun):
    for verb, messages in (("publish", []), ("publish", ["second half"]), ("store", ["second half"])):
        body = {"transactionWritePointer": begun["writePointer"], "messages": messages}
        await daemon.call("POST", f"{TOPICS}/t/{verb}", json=body, status=409, code="generation_changed")
    await daemon.call("POST", f"/v1/transactions/{begun['id']}/abort")
    assert await daemon.poll(isolation="committed") == []
    await daemon.publish("plain")
    assert len(await daemon.poll(isolation="committed")) == 1


async def test_paging_goes_through_stored_messages():
    async with transacting() as harness:
        await everything(harness)
        whole = (await harness.look()).json()
        for limit in (1, 2, 3, 20):
            got, at = [], "00" * 20
            while True:
                page = await harness.look(**{"from": at, "limit": limit})
                got += page.json()
                if page.headers["plainsong-end"] == "end":
                    break
                at = after(bytes.fromhex(page.headers["plainsong-last-id"])).hex()
            assert got == whole


async def test_the_committed_reader_decides_about_pointers_unknown_here():
    async with in_process() as daemon:
        harness = Transacting(daemon)
        environment = daemon.service.directory.environment
        environment.limits = replace(environment.limits, issues_pointers=False)  # as in earlier versions
        await harness.daemon.create()
        await harness.publish("mine", pointer=(START_MS - 1_000) * 1_000_000 + 7)
        assert [each["state"] for each in (await harness.look()).json()] == ["committed"]
        await harness.publish("later", pointer=(START_MS + 60_000) * 1_000_000)
        assert [each["state"] for each in (await harness.look()).json()] == ["committed", "open"]
    async with in_process(transactions__service="off") as daemon:
        await daemon.create()
        await Transacting(daemon).publish("mine", pointer=(START_MS - 1_000) * 1_000_000 + 7)
        shown = (await Transacting(daemon).look()).json()
        assert [each["state"] for each in shown] == ["open"], "without a service no more is known"


# --- stats ----------------------------------------------------------------------------------------


async def test_a_committed_reader_gets_counts_of_visible_hidden_and_lost_messages():
    async with transacting() as harness:
        transactions = await everything(harness)
        assert await harness.reader() == {"visible": 6, "hidden": 3, "expiredUnread": 0, "estimated": False}
        page = await harness.poll(isolation="committed")
        assert len(page.json()) == 6
        at = page.headers["plainsong-last-id"]
        assert await harness.reader(at) == {"visible": 0, "hidden": 3, "expiredUnread": 0, "estimated": False}
        inside = page.json()[2]["id"]
        assert (await harness.reader(inside))["visible"] == 3, "from inside what was stored"
        await harness.end(transactions["held"], "abort")
        assert await harness.reader(at) == {"visible": 1, "hidden": 0, "expiredUnread": 0, "estimated": False}


async def test_expired_unread_counts_what_the_reader_would_have_read():
    async with transacting() as harness:
        await everything(harness)
        harness.daemon.clock.ms = START_MS + 604_800_000 + 5
        assert await harness.reader() == {"visible": 1, "hidden": 3, "expiredUnread": 5, "estimated": False}


async def test_counts_of_a_topic_include_stored_messages():
    async with transacting() as harness:
        await everything(harness)
        found = (await harness.daemon.call("GET", f"{TOPICS}/t/stats")).json()
        assert (found["messages"], found["openTransactions"]) == (11, 2), "the invalid one's rows are not rewritten yet"
        shown = (await harness.look()).json()
        assert (found["oldestId"], found["newestId"]) == (shown[0]["id"], shown[-1]["id"])
        last = await harness.begin()
        await harness.store("a", "b", pointer=last["writePointer"])
        await harness.publish(pointer=last["writePointer"], ms=9)
        found = (await harness.daemon.call("GET", f"{TOPICS}/t/stats")).json()
        assert found["newestId"] == (await harness.look()).json()[-1]["id"], "the last of the stored ones"


async def test_counts_of_large_ranges_come_from_the_topic(monkeypatch):
    monkeypatch.setattr(topic_stats, "MAX_LOOKS", 5)
    async with transacting() as harness:
        await everything(harness)
        found = await harness.reader()
        assert found["estimated"]
        assert (found["visible"], found["hidden"]) == (8, 3), "rolled back and invalid ones are in its counts"


# --- offsets --------------------------------------------------------------------------------------


async def test_an_extent_with_a_view_equals_the_poll_with_it():
    async with transacting() as harness:
        transactions = await everything(harness)
        for how in ({"isolation": "committed"}, {}, {"transaction": transactions["held"]["snapshot"]}):
            for bounds in ({}, {"limit": 1}, {"limit": 3}, {"limit": 5}, {"maxBytes": 60}):
                polled = await harness.poll(**how, **bounds)
                asked = {"maxMessages": bounds.get("limit"), "maxBytes": bounds.get("maxBytes")}
                found = await harness.offsets(**how, **asked)
                assert found["count"] == len(polled.json())
                if polled.headers["plainsong-end"] != "end":
                    assert found["end"] == after(bytes.fromhex(polled.headers["plainsong-last-id"])).hex()


async def test_splits_may_stand_inside_a_stored_transaction_and_lose_nothing():
    async with transacting() as harness:
        one = await harness.begin()
        await harness.publish("before")
        await harness.store(*("x" * 50 for _ in range(40)), pointer=one["writePointer"], ms=1)
        await harness.publish(pointer=one["writePointer"], ms=2)
        await harness.end(one, "commit")
        await harness.publish("behind", ms=3)
        found = await harness.offsets(splits=4, isolation="committed")
        assert (found["count"], len(found["splits"])) == (42, 3)
        assert all(bound[20:] != "0" * 20 for bound in found["splits"]), "inside"
        bounds = ["00" * 20, *found["splits"], found["end"]]
        parts = []
        for start, end in itertools.pairwise(bounds):
            body = {"startFrom": start, "endBefore": end, "isolation": "committed"}
            part = (await harness.poll(**body)).json()
            assert (await harness.offsets(start=start, end=end, isolation="committed"))["count"] == len(part)
            assert 8 <= len(part) <= 13
            parts += part
        assert parts == (await harness.poll(isolation="committed")).json()


async def test_measuring_waits_for_the_transaction_that_holds_it(nursery):
    async with transacting() as harness:
        one = await harness.begin()
        await harness.publish("a", pointer=one["writePointer"])
        answers = []

        async def wait():
            answers.append(await harness.offsets(isolation="committed", waitMs=60_000))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not answers
        await harness.end(one, "commit")
        await trio.testing.wait_all_tasks_blocked()
        assert [each["count"] for each in answers] == [1]
        held = await harness.begin()
        await harness.publish("b", pointer=held["writePointer"])
        brought = await harness.offsets(start=answers[0]["end"], transaction=one["snapshot"], waitMs=60_000)
        assert (brought["count"], brought["end"]) == (0, answers[0]["end"]), "its snapshot never includes it"


# --- many topics ----------------------------------------------------------------------------------


async def many(harness, **body):
    return (await harness.daemon.call("POST", MANY, json=body)).json()["topics"]


async def test_a_committed_poll_of_many_topics_reports_the_transaction_that_holds_each():
    async with transacting() as harness:
        await harness.daemon.create("u")
        one = await harness.begin()
        await harness.publish("a")
        await harness.publish("b", pointer=one["writePointer"], ms=1)
        await harness.publish("c", topic="u")
        found = await many(harness, topics={"t": {}, "u": {}}, isolation="committed")
        assert [each["payload"] for each in found["t"]["messages"]] == ["a"]
        assert found["t"]["end"] == "held"
        assert found["t"]["heldBy"] == one["writePointer"]
        assert (found["t"]["heldSince"], found["t"]["hiddenMessages"]) == (START_MS + 1, "1")
        assert [each["payload"] for each in found["u"]["messages"]] == ["c"]
        assert found["u"].keys() == {"messages", "lastId", "end"}
        without = await many(harness, topics={"t": {}, "u": {}})
        assert len(without["t"]["messages"]) == 2


@pytest.mark.parametrize("how", ["commit", "abort", "invalidate", "publish"])
async def test_a_wait_for_many_ends_with_a_decision_or_a_message(how, nursery):
    async with transacting() as harness:
        await harness.daemon.create("u")
        one = await harness.begin()
        await harness.publish("a", pointer=one["writePointer"])
        await harness.publish("b", ms=1)
        answers = []

        async def wait():
            body = {"topics": {"t": {}, "u": {}}, "isolation": "committed", "waitMs": 60_000}
            answers.append(await many(harness, **body))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not answers
        if how == "publish":
            await harness.publish("c", topic="u")
        else:
            await harness.end(one, how)
        await trio.testing.wait_all_tasks_blocked()
        assert len(answers) == 1
        got = {topic: [each["payload"] for each in found["messages"]] for topic, found in answers[0].items()}
        wanted = {"commit": (["a", "b"], []), "publish": ([], ["c"])}.get(how, (["b"], []))
        assert (got["t"], got["u"]) == wanted


async def test_a_given_snapshot_hides_later_commits():
    async with transacting() as harness:
        pointers = {name: one["writePointer"] for name, one in (await everything(harness)).items()}
        view = Transaction(max(pointers.values()), 1, 1, (pointers["invalid"],), (pointers["done"],))
        brought = b2a_base64(encode_transaction(view), newline=False).decode()
        assert (await harness.offsets(transaction=brought))["count"] == 1, "a transaction committed since was open then"


# --- without a transaction service ----------------------------------------------------------------


async def test_without_a_service_commits_are_refused_and_everything_else_works():
    async with in_process(transactions__service="off") as daemon:
        await daemon.create()
        harness = Transacting(daemon)
        await harness.publish("a", pointer=(START_MS - 1_000) * 1_000_000 + 7)
        await harness.publish("b")
        unavailable = {"status": 503, "code": "transactions_unavailable"}
        await daemon.call("POST", f"{TOPICS}/t/offsets", json={"isolation": "committed"}, **unavailable)
        await daemon.call("POST", MANY, json={"topics": {"t": {}}, "isolation": "committed"}, **unavailable)
        assert (await harness.offsets())["count"] == 2
        own = Transaction(START_MS * 1_000_000, 1, 1)
        brought = b2a_base64(encode_transaction(own), newline=False).decode()
        assert (await harness.offsets(transaction=brought))["count"] == 2, "a snapshot in the request needs no service"
        assert await harness.reader() == {"visible": 2, "hidden": 0, "expiredUnread": 0, "estimated": False}
