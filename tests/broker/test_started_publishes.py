"""Publishes and stores that are answered without a task."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from broker_in_process import TOPICS, in_process
from started_polls import JSON_TYPE, endpoint, shown

from actors.directory import Directory
from actors.transactions import TransactionService
from broker.api.answers import LOOP_BYTES
from broker.http.handlers import answer_of
from broker.http.messages import Request
from broker.http.wire import checked
from plainsong.protocol.errors import OutcomeUnknown, StorageFailed, TransactionExpired, TransactionRequired
from plainsong.protocol.requests import PublishRequest, PublishResponse
from plainsong.protocol.transactions.asks import Decision
from tests.codecs import JSON
from tests.patience import PATIENCE_S


def request(verb, payload=b"m", **wanted):
    content = JSON.encode_publish(PublishRequest([payload], **wanted))
    return verb, Request({"namespace": "ns", "topic": "t"}, "", dict(JSON_TYPE), content)


def begin(daemon, asked, answers):
    verb, asked = asked
    endpoint(daemon, verb).handler(asked, lambda outcome: answers.append(checked(outcome, "")))


async def answered(answers, count=1):
    with trio.fail_after(PATIENCE_S):
        while len(answers) < count:
            await trio.testing.wait_all_tasks_blocked()
    return [shown(each) for each in answers]


async def done(daemon, asked):
    verb, asked = asked
    return await answer_of(endpoint(daemon, verb).handler, asked)


async def transaction(daemon):
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    return begun["id"], begun["writePointer"]


async def test_messages_stored_without_a_task_are_published_with_their_transaction():
    async with in_process() as daemon:
        await daemon.create()
        identity, pointer = await transaction(daemon)
        answers = []
        await done(daemon, request("store", b"a", write_pointer=pointer))
        begin(daemon, request("store", b"b", write_pointer=pointer), answers)
        (stored,) = await answered(answers)
        assert (stored[0], stored[3]) == (200, b"")
        under = {"transactionWritePointer": pointer, "messages": ["c"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        assert await daemon.poll(isolation="committed") == []
        for verb in ("prepare", "commit"):
            await daemon.call("POST", f"/v1/transactions/{identity}/{verb}")
        assert [each["payload"] for each in await daemon.poll(isolation="committed")] == ["a", "b", "c"]


@pytest.mark.parametrize("verb", ["publish", "store"])
async def test_a_publish_whose_transaction_ends_before_its_step_is_refused(verb):
    async with in_process() as daemon:
        await daemon.create()
        identity, pointer = await transaction(daemon)
        await done(daemon, request(verb, write_pointer=pointer))
        daemon.store.stall("write")
        answers, plain = [], []
        async with trio.open_nursery() as nursery:
            # The topic is busy, so that the abort closes the pointer before the topic handles the store.
            begin(daemon, request("publish", b"plain"), plain)
            await daemon.store.stalled("write")
            begin(daemon, request(verb, write_pointer=pointer), answers)
            nursery.start_soon(daemon.call, "POST", f"/v1/transactions/{identity}/abort")
            await trio.testing.wait_all_tasks_blocked()
            daemon.store.release("write")
        ((status, *_),) = await answered(answers)
        assert status == 409
        begin(daemon, request(verb, write_pointer=pointer), answers)
        assert (await answered(answers, 2))[1][0] == 409
        assert [each["payload"] for each in await daemon.poll(isolation="committed")] == ["plain"]


@pytest.mark.parametrize("verb", ["publish", "store"])
@pytest.mark.parametrize("failure", [None, StorageFailed("the disk is gone")])
async def test_an_answer_prepared_during_a_sync_is_sent_once_its_outcome_is_known(monkeypatch, verb, failure):
    put = []
    monkeypatch.setattr(Directory, "put", lambda self, name, ask, settled, prepare: put.append((settled, prepare)))
    async with in_process() as daemon:
        answers, found = [], PublishResponse(5, 1, 1, 1, 1)
        begin(daemon, request(verb, write_pointer=5), answers)
        ((settled, prepare),) = put
        prepare(found)
        assert answers == []
        settled(failure or found)
        assert [each.status for each in answers] == [503 if failure else 200]


@pytest.mark.parametrize("failure", [None, StorageFailed("the disk is gone")])
async def test_the_answer_to_a_commit_prepared_during_a_sync_is_sent_once_its_outcome_is_known(monkeypatch, failure):
    put = []
    async with in_process() as daemon:
        identity, _ = await transaction(daemon)
        monkeypatch.setattr(
            TransactionService, "put", lambda self, ask, settled, prepare: put.append((settled, prepare))
        )
        answers, found = [], Decision(int(identity), "committed", changed=True)
        begin(daemon, ("commit", Request({"transaction": str(identity)}, "", {}, b"")), answers)
        ((settled, prepare),) = put
        prepare(found)
        assert answers == []
        settled(failure or found)
        assert [each.status for each in answers] == [503 if failure else 200]


@pytest.mark.parametrize("verb", ["publish", "store"])
async def test_a_body_that_takes_long_to_decode_is_answered_like_any_other(verb):
    async with in_process() as daemon:
        await daemon.create()
        _, pointer = await transaction(daemon)
        for size in (LOOP_BYTES, 10):
            assert (await done(daemon, request(verb, b"x" * size, write_pointer=pointer))).status == 200
            with pytest.raises(TransactionExpired):
                await done(daemon, request(verb, b"x" * size, write_pointer=1))


@pytest.mark.parametrize("size", [LOOP_BYTES, 10])
async def test_a_producer_waits_for_its_topic_no_longer_than_its_limit(size, autojump_clock):
    async with in_process(deduplication__default=True, deduplication__answer_timeout_s=3) as daemon:
        await daemon.create()
        await done(daemon, request("publish"))
        daemon.store.stall("write")
        begun_s, asked = trio.current_time(), request("publish", b"x" * size, producer="p", sequence_ids=[1])
        with pytest.raises(OutcomeUnknown, match="did not answer within 3 s"):
            await done(daemon, asked)
        assert 3 <= trio.current_time() - begun_s < 4
        daemon.store.release("write")
        assert (await done(daemon, asked)).status == 200
        await trio.sleep(10)
        assert not len(daemon.service.publishing.deadlines)


async def test_a_body_that_cannot_be_stored_is_refused_like_any_other():
    async with in_process() as daemon:
        await daemon.create()
        with pytest.raises(TransactionRequired, match="write pointer"):
            await done(daemon, request("store"))
