"""Checks of requests that need no topic."""

from __future__ import annotations

import pytest

from plainsong.protocol.codec import rollback_of_all
from plainsong.protocol.errors import (
    InvalidMessageId,
    InvalidParameter,
    InvalidSequenceIds,
    NoMessages,
    TransactionRequired,
)
from plainsong.protocol.requests import (
    MAX_WAIT_MS,
    PollRequest,
    PublishRequest,
    check_poll,
    check_publish,
    check_rollback,
    check_store,
)


def publish(*messages: bytes, **fields) -> PublishRequest:
    return PublishRequest(messages, **fields)


@pytest.mark.parametrize(
    "request_",
    [
        publish(b""),
        publish(b"m", write_pointer=1),
        publish(write_pointer=1),
        publish(b"m", ttl_s=1, generation=1, message_ttls_s=[None], attributes=[{"k": "x" * 4095}]),
        publish(b"m", b"n", producer="p", producer_epoch=0, sequence_ids=[0, 5]),
        publish(producer="p", sequence_ids=[3], segments=["a"]),
        publish(producer="p", sequence_ids=[3], write_pointer=4),
        publish(b"m", b"n", message_ttls_s=[1, 2**31 - 1], atomic=True, routing_key="é" * 2048),
    ],
)
def test_a_valid_publish_passes(request_):
    check_publish(request_)


def test_an_empty_publish_requires_a_pointer_or_staged_messages():
    for request in (publish(), publish(producer="p", sequence_ids=[1]), publish(producer="p", segments=[])):
        with pytest.raises(NoMessages):
            check_publish(request)


def test_staged_segments_are_published_with_one_sequence_id():
    for ids in (None, [1, 2], []):
        with pytest.raises(InvalidSequenceIds):
            check_publish(publish(producer="p", segments=["a"], sequence_ids=ids))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (publish(b"m", write_pointer=0), "transactionWritePointer is 0"),
        (publish(b"m", write_pointer=-1), "transactionWritePointer is -1"),
        (publish(b"m", ttl_s=0), "ttlSeconds is 0"),
        (publish(b"m", ttl_s=2**31), "ttlSeconds is 2147483648"),
        (publish(b"m", b"n", message_ttls_s=[1, 0]), r"messageTtlsSeconds\[1\] is 0"),
        (publish(b"m", message_ttls_s=[1, 1]), "messageTtlsSeconds has 2 entries for 1 message"),
        (publish(b"m", attributes=[]), "attributes has 0 entries for 1 message"),
        (publish(b"m", attributes=[{"é": "x" * 4095}]), "attributes of message 0 are 4097 bytes"),
        (publish(b"m", generation=0), "generation is 0"),
        (publish(b"m", producer=""), "producer is 0 bytes long"),
        (publish(b"m", producer="p" * 256), "producer is 256 bytes long"),
        (publish(b"m", producer="p", producer_epoch=-1), "producerEpoch is -1"),
        (publish(b"m", producer_epoch=1), "belong to a producer"),
        (publish(b"m", sequence_ids=[1]), "belong to a producer"),
        (publish(b"m", routing_key="x" * 4097), "routingKey is 4097 bytes long"),
        (publish(b"m", segment="a"), "segment is for store"),
        (publish(write_pointer=1, segments=["a", ""]), r"segments\[1\] is 0 bytes long"),
        (publish(producer="p", sequence_ids=[1], segments=["a"] * 65_537), "65537 segments"),
        (publish(segments=["a"]), "are a producer's"),
        (publish(b"m", producer="p", sequence_ids=[1], segments=["a"]), "has messages and segments"),
        (publish(b"m", producer="p", sequence_ids=[1], segments=[]), "has messages and segments"),
        (publish(producer="p", sequence_ids=[1], segments=["a"], routing_key="k"), "routingKey is for messages"),
    ],
)
def test_an_invalid_publish_is_refused_with_its_field(request_, why):
    with pytest.raises(InvalidParameter, match=why) as caught:
        check_publish(request_)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("messages", "sequence_ids"),
    [
        ([b"m"], []),
        ([b"m"], [1, 2]),
        ([], [1, 2]),
        ([], []),
        ([b"m"], [-1]),
        ([b"m", b"n"], [2, 1]),
        ([b"m", b"n"], [2, 2]),
    ],
)
def test_sequence_ids_are_one_per_message_not_negative_and_increasing(messages, sequence_ids):
    request = publish(*messages, producer="p", write_pointer=1, sequence_ids=sequence_ids)
    with pytest.raises(InvalidSequenceIds):
        check_publish(request)


def test_a_store_needs_messages_and_a_pointer_or_a_producer_with_a_segment():
    check_store(publish(b"m", write_pointer=1))
    check_store(publish(b"m", producer="p", segment="s" * 64))
    with pytest.raises(NoMessages):
        check_store(publish(write_pointer=1))
    for request in (publish(b"m"), publish(b"m", producer="p"), publish(b"m", segment="s")):
        with pytest.raises(TransactionRequired):
            check_store(request)
    with pytest.raises(InvalidParameter, match="segment is 65 bytes"):
        check_store(publish(b"m", producer="p", segment="s" * 65))
    with pytest.raises(InvalidParameter, match="segments is for publish"):
        check_store(publish(b"m", write_pointer=1, segments=["a"]))


def test_a_rollback_needs_a_pointer_above_0():
    check_rollback(rollback_of_all(1))
    with pytest.raises(TransactionRequired):
        check_rollback(rollback_of_all(None))
    with pytest.raises(InvalidParameter):
        check_rollback(rollback_of_all(0))


@pytest.mark.parametrize(
    "request_",
    [
        PollRequest(),
        PollRequest(0, limit=1, max_bytes=1, wait_ms=0),
        PollRequest(bytes(20), end_before=bytes(20), wait_ms=MAX_WAIT_MS, transaction=b""),
        PollRequest(limit=2**31 - 1, isolation="committed"),
    ],
)
def test_a_valid_poll_passes(request_):
    check_poll(request_)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (PollRequest(-1), InvalidParameter),
        (PollRequest(bytes(19)), InvalidMessageId),
        (PollRequest(b""), InvalidMessageId),
        (PollRequest(end_before=bytes(21)), InvalidMessageId),
        (PollRequest(limit=0), InvalidParameter),
        (PollRequest(max_bytes=0), InvalidParameter),
        (PollRequest(wait_ms=-1), InvalidParameter),
        (PollRequest(wait_ms=MAX_WAIT_MS + 1), InvalidParameter),
        (PollRequest(transaction=b"", isolation="uncommitted"), InvalidParameter),
    ],
)
def test_an_invalid_poll_is_refused(request_, error):
    with pytest.raises(error):
        check_poll(request_)
