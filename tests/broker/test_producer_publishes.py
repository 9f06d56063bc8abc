"""Publishes of producers over HTTP: verdicts, receipts and headers, at every listener."""

from __future__ import annotations

import pytest
import trio
from broker_in_process import TOPICS, in_process
from test_committed_polls import begin

from plainsong.protocol.requests import PublishRequest
from tests.codecs import AVRO, AVRO_2
from tests.patience import PATIENCE_S

PUBLISH = f"{TOPICS}/t/publish"
STORE = f"{TOPICS}/t/store"
LISTENERS = (None, "hot", "application")


@pytest.fixture(params=LISTENERS)
async def daemon(request):
    """A daemon called without a listener, and one behind each of the two listeners."""
    async with in_process(listener=request.param) as running:
        yield running


async def send(daemon, ids, *, producer="p", messages=None, status=200, code=None, path=PUBLISH, **more):
    """Publish one message for each id."""
    messages = [f"m{number}" for number in ids] if messages is None else messages
    body = {"messages": messages, "producer": producer, "sequenceIds": list(ids), **more}
    return await daemon.call("POST", path, json=body, status=status, code=code)


async def payloads(daemon):
    return [message["payload"] for message in await daemon.poll()]


def said(answer):
    """Return the two headers about producers."""
    return answer.headers.get("plainsong-duplicate"), answer.headers.get("plainsong-last-sequence-id")


# --- verdicts ----------------------------------------------------------------------------------------


async def test_a_publish_of_a_producer_is_answered_with_a_receipt_and_its_headers(daemon):
    await daemon.create()
    answer = await send(daemon, [0, 1, 2])
    receipt = answer.json()
    first, *_, last = await daemon.poll()
    assert receipt == {
        "firstId": first["id"],
        "lastId": last["id"],
        "duplicate": False,
        "deduplicated": True,
        "lastSequenceId": 2,
        "generation": 1,
    }
    assert said(answer) == ("false", "2")


async def test_a_repeated_request_is_a_duplicate_with_the_ids_of_the_first(daemon):
    await daemon.create()
    first = await send(daemon, [0, 1, 2])
    again = await send(daemon, [0, 1, 2])
    assert again.json() == first.json() | {"duplicate": True}
    assert said(again) == ("true", "2")
    assert await payloads(daemon) == ["m0", "m1", "m2"]


async def test_a_duplicate_of_a_forgotten_request_has_no_ids(daemon):
    await daemon.create()
    for number in range(7):
        await send(daemon, [number])
    old = (await send(daemon, [0])).json()
    assert (old["duplicate"], old["firstId"], old["lastId"], old["lastSequenceId"]) == (True, None, None, 6)
    assert (await send(daemon, [6])).json()["firstId"] is not None
    assert len(await payloads(daemon)) == 7


async def test_gaps_are_accepted_and_ids_inside_them_are_duplicates(daemon):
    await daemon.create()
    await send(daemon, [1, 5, 9])
    assert said(await send(daemon, [3])) == ("true", "9")
    assert said(await send(daemon, [10])) == ("false", "10")
    assert await payloads(daemon) == ["m1", "m5", "m9", "m10"]


async def test_a_straddling_request_is_trimmed_and_reports_which_were_stored(daemon):
    await daemon.create()
    await send(daemon, [5])
    answer = await send(daemon, [4, 5, 6, 7, 8])
    receipt = answer.json()
    assert (receipt["stored"], receipt["dropped"]) == ([6, 7, 8], [4, 5])
    assert (receipt["duplicate"], receipt["lastSequenceId"]) == (False, 8)
    assert said(answer) == ("partial", "8")
    assert await payloads(daemon) == ["m5", "m6", "m7", "m8"]


async def test_a_straddling_atomic_request_is_refused_as_a_whole(daemon):
    await daemon.create()
    await send(daemon, [5])
    await send(daemon, [4, 5, 6], atomic=True, status=409, code="partial_duplicate")
    assert await payloads(daemon) == ["m5"]
    assert said(await send(daemon, [6], atomic=True)) == ("false", "6")


async def test_producers_and_topics_have_numbers_of_their_own(daemon):
    await daemon.create()
    await daemon.create("other")
    for producer in ("a", "b"):
        assert said(await send(daemon, [0], producer=producer)) == ("false", "0")
    assert said(await send(daemon, [0], producer="a", path=f"{TOPICS}/other/publish")) == ("false", "0")
    assert len(await payloads(daemon)) == 2


@pytest.mark.parametrize("ids", [[-1], [1, 1], [2, 1], [0, 1, 2], []])
async def test_invalid_ids_are_refused(daemon, ids):
    await daemon.create()
    answer = await send(daemon, ids, messages=["a", "b"], status=400, code="invalid_sequence_ids")
    assert said(answer) == (None, None)
    assert await payloads(daemon) == []


async def test_a_producer_without_sequence_ids_is_refused(daemon):
    await daemon.create()
    body = {"messages": ["a"], "producer": "p"}
    await daemon.call("POST", PUBLISH, json=body, status=400, code="invalid_sequence_ids")


async def test_some_items_with_and_some_without_a_sequence_id_are_refused(daemon):
    await daemon.create()
    items = [{"payload": "a", "sequenceId": 0}, {"payload": "b"}]
    await daemon.call(
        "POST", PUBLISH, json={"producer": "p", "messages": items}, status=400, code="invalid_sequence_ids"
    )
    items[1]["sequenceId"] = 4
    assert said(await daemon.call("POST", PUBLISH, json={"producer": "p", "messages": items})) == ("false", "4")


async def test_sequence_ids_without_a_producer_are_refused(daemon):
    await daemon.create()
    body = {"messages": ["a"], "sequenceIds": [0]}
    await daemon.call("POST", PUBLISH, json=body, status=400, code="invalid_parameter")


async def test_a_publish_for_another_generation_is_refused(daemon):
    await daemon.create()
    await send(daemon, [0], generation=1)
    await send(daemon, [1], generation=2, status=409, code="generation_changed")
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.create()
    await send(daemon, [1], generation=1, status=409, code="generation_changed")
    assert said(await send(daemon, [0], generation=2)) == ("false", "0")


async def test_a_request_without_a_producer_is_answered_as_before(daemon):
    await daemon.create()
    answer = await daemon.call("POST", PUBLISH, json={"messages": ["a"]})
    assert answer.content == b""
    assert said(answer) == (None, None)


async def test_a_restarted_daemon_remembers_its_producers(daemon):
    await daemon.create()
    first = await send(daemon, [0, 1, 2])
    async with in_process(store=daemon.store) as again:
        second = await send(again, [1, 2])
        assert second.json()["duplicate"]
        assert said(second) == ("true", "2")
        assert said(await send(again, [0, 1, 2])) == ("true", "2")
        assert (await send(again, [0, 1, 2])).json()["firstId"] == first.json()["firstId"]


# --- encodings ---------------------------------------------------------------------------------------


async def test_avro_of_version_two_is_answered_in_kind(daemon):
    await daemon.create()
    request = PublishRequest([b"a", b"b"], producer="p", sequence_ids=[3, 4])
    answer = await daemon.call(
        "POST", PUBLISH, content=AVRO_2.encode_publish(request), headers={"Content-Type": AVRO_2.content_type}
    )
    assert answer.headers["content-type"] == "avro/binary; version=2"
    receipt = AVRO_2.decode_receipt(answer.content)
    assert (receipt.deduplicated, receipt.duplicate, receipt.last_sequence_id) == (True, False, 4)
    assert (receipt.stored, receipt.dropped) == (None, None)
    assert said(answer) == ("false", "4")


async def test_long_runs_of_ids_in_avro_are_checked_like_all_others(daemon):
    await daemon.create()
    headers = {"Content-Type": AVRO_2.content_type}
    for first in (0, 0, 60):
        request = PublishRequest([b"x"] * 100, producer="p", sequence_ids=range(first, first + 100))
        answer = await daemon.call("POST", PUBLISH, content=AVRO_2.encode_publish(request), headers=headers)
    receipt = AVRO_2.decode_receipt(answer.content)
    assert (list(receipt.stored), list(receipt.dropped)) == (list(range(100, 160)), list(range(60, 100)))
    assert said(answer) == ("partial", "159")
    assert len(await payloads(daemon)) == 160


async def test_avro_of_version_one_has_no_producers(daemon):
    await daemon.create()
    answer = await daemon.call(
        "POST",
        PUBLISH,
        content=AVRO.encode_publish(PublishRequest([b"a"])),
        headers={"Content-Type": "avro/binary", "Prefer": "return=representation"},
    )
    receipt = AVRO.decode_receipt(answer.content)
    assert (receipt.deduplicated, receipt.last_sequence_id) == (False, None)
    assert said(answer) == (None, None)


# --- under a write pointer ---------------------------------------------------------------------------


async def test_under_a_write_pointer_a_retry_gets_the_same_range_again(daemon):
    await daemon.create()
    pointer = (await begin(daemon))["writePointer"]
    first = await send(daemon, [0, 1], transactionWritePointer=pointer)
    again = await send(daemon, [0, 1], transactionWritePointer=pointer)
    assert first.json()["transactionWritePointer"] == pointer
    assert again.json() == first.json() | {"duplicate": True}
    assert (said(first), said(again)) == (("false", "1"), ("true", "1"))
    assert await payloads(daemon) == ["m0", "m1"]


async def test_ids_used_under_another_write_pointer_are_consumed(daemon):
    await daemon.create()
    pointer, other = [(await begin(daemon))["writePointer"] for _ in range(2)]
    first = await send(daemon, [0, 1], transactionWritePointer=pointer)
    await daemon.call("POST", f"{TOPICS}/t/rollback", json=first.json())
    await send(daemon, [0, 1], transactionWritePointer=other, status=409, code="sequence_consumed")
    await send(daemon, [2, 3], transactionWritePointer=other)


async def test_a_repeated_store_is_stored_once(daemon):
    await daemon.create()
    pointer = (await begin(daemon))["writePointer"]
    for _ in range(2):
        answer = await send(daemon, [0, 1], path=STORE, transactionWritePointer=pointer)
        assert answer.content == b""
    await send(daemon, [2], messages=[], transactionWritePointer=pointer)
    assert await payloads(daemon) == ["m0", "m1"]


async def test_a_publish_of_stored_messages_has_one_sequence_id(daemon):
    await daemon.create()
    pointer = (await begin(daemon))["writePointer"]
    await send(daemon, [0, 1], path=STORE, transactionWritePointer=pointer)
    more = {"messages": [], "transactionWritePointer": pointer, "code": "invalid_sequence_ids", "status": 400}
    await send(daemon, [2, 3], **more)
    first = await send(daemon, [2], messages=[], transactionWritePointer=pointer)
    again = await send(daemon, [2], messages=[], transactionWritePointer=pointer)
    assert again.json() == first.json() | {"duplicate": True}


# --- atomic batches and attributes -------------------------------------------------------------------


async def test_an_atomic_batch_needs_no_producer(daemon):
    await daemon.create()
    body = {"messages": ["a", "b"], "atomic": True, "routingKey": "k"}
    answer = await daemon.call("POST", PUBLISH, json=body)
    assert answer.content == b""
    assert said(answer) == (None, None)
    assert [(each["payload"], each["attributes"]) for each in await daemon.poll()] == [
        ("a", {"routingKey": "k"}),
        ("b", {"routingKey": "k"}),
    ]


async def test_an_atomic_batch_of_more_than_sixteen_mebibytes_is_refused(daemon):
    await daemon.create()
    large = "x" * (6 << 20)
    body = {"messages": [large, large, large], "atomic": True}
    await daemon.call("POST", PUBLISH, json=body, status=413, code="transaction_too_large")
    assert await payloads(daemon) == []


async def test_attributes_are_returned_and_left_out_where_there_are_none(daemon):
    await daemon.create()
    items = [{"payload": "a", "attributes": {"traceparent": "00-1"}}, {"payload": "b"}]
    await daemon.call("POST", PUBLISH, json={"messages": items})
    with_them, without = await daemon.poll()
    assert with_them["attributes"] == {"traceparent": "00-1"}
    assert "attributes" not in without


# --- switched off ------------------------------------------------------------------------------------


async def test_when_deduplication_is_off_messages_are_stored_and_the_receipt_says_so(daemon):
    await daemon.create(deduplication="disabled")
    for _ in range(2):
        answer = await send(daemon, [0])
        assert (answer.json()["deduplicated"], answer.json()["duplicate"]) == (False, False)
        assert answer.json()["lastSequenceId"] is None
        assert said(answer) == ("false", None)
    assert await payloads(daemon) == ["m0", "m0"]


# --- time-outs ---------------------------------------------------------------------------------------


async def test_a_producer_not_answered_in_time_gets_an_unknown_outcome_and_its_publish_still_happens():
    async with in_process(deduplication__answer_timeout_s=0.05) as daemon:
        await daemon.create()
        daemon.store.stall("write")
        answer = await send(daemon, [0], status=503, code="outcome_unknown")
        assert answer.json()["outcome"] == "unknown"
        assert answer.headers["retry-after"]
        daemon.store.release("write")
        with trio.fail_after(PATIENCE_S):
            while not await payloads(daemon):
                await trio.lowlevel.checkpoint()
        again = await send(daemon, [0])
        assert (said(again), await payloads(daemon)) == (("true", "0"), ["m0"])
