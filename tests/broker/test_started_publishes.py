"""Publishes and stores that are answered without a task."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from broker_in_process import TOPICS, in_process
from started_polls import JSON_TYPE, endpoint, shown

from actors.directory import Directory
from broker.api.route import LOOP_BYTES
from broker.http.messages import Request, answer_for
from plainsong.protocol.codec import JSON
from plainsong.protocol.errors import PlainsongError, StorageFailed
from plainsong.protocol.requests import PublishRequest, PublishResponse
from tests.patience import PATIENCE_S


def request(verb, payload=b"m", **wanted):
    content = JSON.encode_publish(PublishRequest([payload], **wanted))
    return verb, Request({"namespace": "ns", "topic": "t"}, "", dict(JSON_TYPE), content)


def begin(daemon, asked, answers):
    """Starts it; whether it needs no task."""
    verb, asked = asked
    return endpoint(daemon, verb).start(asked, answers.append) is not None


async def answered(answers, count=1):
    with trio.fail_after(PATIENCE_S):
        while len(answers) < count:
            await trio.testing.wait_all_tasks_blocked()
    return [shown(each) for each in answers]


async def by_task(daemon, asked):
    verb, asked = asked
    return await endpoint(daemon, verb).handler(asked)


async def transaction(daemon):
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    return begun["id"], begun["writePointer"]


async def test_what_was_stored_without_a_task_is_published_with_its_transaction():
    async with in_process() as daemon:
        await daemon.create()
        identity, pointer = await transaction(daemon)
        answers = []
        await by_task(daemon, request("store", b"a", write_pointer=pointer))
        assert begin(daemon, request("store", b"b", write_pointer=pointer), answers)
        (stored,) = await answered(answers)
        assert (stored[0], stored[3]) == (200, b"")
        under = {"transactionWritePointer": pointer, "messages": ["c"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        assert await daemon.poll(isolation="committed") == []
        for verb in ("prepare", "commit"):
            await daemon.call("POST", f"/v1/transactions/{identity}/{verb}")
        assert [each["payload"] for each in await daemon.poll(isolation="committed")] == ["a", "b", "c"]


@pytest.mark.parametrize("verb", ["publish", "store"])
async def test_a_transaction_that_ends_before_its_turn_refuses_it(verb):
    async with in_process() as daemon:
        await daemon.create()
        identity, pointer = await transaction(daemon)
        await by_task(daemon, request(verb, write_pointer=pointer))
        daemon.store.stall("write")
        answers, plain = [], []
        async with trio.open_nursery() as nursery:
            # The topic is at work on something else, so that the abort closes the pointer before it comes to the store.
            assert begin(daemon, request("publish", b"plain"), plain)
            await daemon.store.stalled("write")
            assert begin(daemon, request(verb, write_pointer=pointer), answers)
            nursery.start_soon(daemon.call, "POST", f"/v1/transactions/{identity}/abort")
            await trio.testing.wait_all_tasks_blocked()
            daemon.store.release("write")
        ((status, *_),) = await answered(answers)
        assert status == 409
        assert begin(daemon, request(verb, write_pointer=pointer), answers)
        assert (await answered(answers, 2))[1][0] == 409
        assert [each["payload"] for each in await daemon.poll(isolation="committed")] == ["plain"]


@pytest.mark.parametrize("verb", ["publish", "store"])
@pytest.mark.parametrize("failure", [None, StorageFailed("the disk is gone")])
async def test_an_answer_that_is_made_while_the_disk_works_is_given_once_it_is_known_what_came_of_it(
    monkeypatch, verb, failure
):
    put = []
    monkeypatch.setattr(Directory, "put", lambda self, name, ask, settled, prepare: put.append((settled, prepare)))
    async with in_process() as daemon:
        answers, found = [], PublishResponse(5, 1, 1, 1, 1)
        assert begin(daemon, request(verb, write_pointer=5), answers)
        ((settled, prepare),) = put
        prepare(found)
        assert answers == []
        settled(failure or found)
        assert [each.status for each in answers] == [503 if failure else 200]


async def test_a_large_store_is_left_to_a_task_and_whatever_is_stored_has_the_same_answer():
    async with in_process() as daemon:
        await daemon.create()
        _, pointer = await transaction(daemon)
        answers = []
        assert not begin(daemon, request("store", b"x" * LOOP_BYTES, write_pointer=pointer), answers)
        for asked in (
            request("store", b"x" * 1000, write_pointer=pointer),
            request("store", write_pointer=pointer, ttl_s=5),
            request("store", write_pointer=1),
            request("store", producer="p", sequence_ids=[1], segment="s", producer_epoch=7),
        ):
            answers.clear()
            assert begin(daemon, asked, answers)
            try:
                expected = shown(await by_task(daemon, asked))
            except PlainsongError as error:
                expected = shown(answer_for(error))
            assert await answered(answers) == [expected]


async def test_a_body_that_cannot_be_stored_is_refused_as_any():
    async with in_process() as daemon:
        await daemon.create()
        with pytest.raises(Exception, match="write pointer"):
            begin(daemon, request("store"), [])
