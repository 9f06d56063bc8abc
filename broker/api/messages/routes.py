"""The routes of messages (publish, poll, follow, inspect) and of a topic's readers."""

from __future__ import annotations

from typing import Any

from broker.api.messages.events import MessageEvents
from broker.api.messages.poll import Polling, poll_wait_ms
from broker.api.messages.poll_many import MAX_BODY_BYTES as POLL_MANY_BODY_BYTES
from broker.api.messages.poll_many import PollingMany, poll_many_wait_ms
from broker.api.messages.publish import Publishing
from broker.api.messages.readers import Readers
from broker.api.messages.set_aside import SettingAside
from broker.api.messages.show import Messages
from broker.api.messages.stream import Streams
from broker.api.paths import NAMESPACE, READER, READERS, TOPIC
from broker.api.schemas import (
    ANY,
    AS_OF,
    BAD_POSITION,
    BODY,
    EXAMPLE_POINTER,
    LOOK,
    READS,
    VIEWS,
    WRITES,
    record,
    ref,
)
from broker.http.messages import EVENT_STREAM
from broker.http.route import JSON_TYPE, Body, Route
from plainsong.protocol.answers.messages import (
    ManyPages,
    MessageFields,
    PublishResponseFields,
    ReaderRow,
    ReceiptFields,
    ShownMessage,
)
from plainsong.protocol.answers.topics import ChangeReport
from plainsong.protocol.codec.cloud_events import BATCH_TYPE, EVENT_TYPE
from plainsong.protocol.frames import FRAMES_TYPE

AVRO_TYPE = "avro/binary"
#: For examples: a message id.
_ID = "0000018bcfe568000002" + "0" * 20
_POSITION_HEADERS = ("Plainsong-Last-Id", "Plainsong-End", "Plainsong-Set-Aside")
_HELD_HEADERS = ("Plainsong-Held-By", "Plainsong-Held-Since", "Plainsong-Hidden-Messages")
_VERDICT_HEADERS = ("Plainsong-Duplicate", "Plainsong-Last-Sequence-Id")
#: Writes under a write pointer.
_UNDER = (
    "transaction_refused",
    "transaction_required",
    "transaction_expired",
    "transaction_not_in_progress",
    "rolled_back",
    "transactions_unavailable",
)
#: Requests that store messages.
_STORES = (
    "unknown_field",
    "no_messages",
    "invalid_sequence_ids",
    "generation_changed",
    "message_too_large",
    "request_too_large",
    "low_space",
    "topic_full",
)
#: Publishes of a producer.
_PRODUCES = ("producer_fenced", "producer_expired", "sequence_consumed", "too_many_producers", "transaction_too_large")

ROUTES: tuple[Route[Any], ...] = (
    Route(
        "set_aside",
        "POST",
        TOPIC + "/set-aside",
        SettingAside,
        SettingAside.set_aside,
        owner="topic",
        verb="admin",
        on="topic",
        tag="topics",
        doc="Copy damaged rows unchanged to a file, and remove them from the topic so that readers can continue.",
        parameters=("dryRun",),
        body=Body(record("from to", **{"from": ref("MessageId"), "to": ref("MessageId")})),
        answer=ChangeReport,
        errors=(
            *WRITES,
            *BODY,
            "unknown_field",
            "invalid_message_id",
            "not_found",
            "generation_changed",
            "conflict",
            "low_space",
        ),
    ),
    Route(
        "publish",
        "POST",
        TOPIC + "/publish",
        Publishing,
        Publishing.publish,
        owner="topic",
        hot=True,
        verb="publish",
        on="topic",
        tag="messages",
        doc="Publish messages; with a write pointer, stored messages too; with a producer, the segments that it "
        "staged. 200 means durable. Without a write pointer the response is empty, or a receipt for a producer "
        "or with Prefer: return=representation. With the headers ce-id, ce-source, ce-type and ce-specversion, a "
        "body of any type is the data of a CloudEvent.",
        parameters=("ttl", "longs"),
        headers=("traceparent",),
        body=Body(
            ref("PublishRequest"),
            types=(JSON_TYPE, AVRO_TYPE, EVENT_TYPE, BATCH_TYPE),
            example={"messages": ["hello", {"payload": {"base64": "AP8="}, "ttlSeconds": 60}]},
        ),
        answered="done; the body is empty unless the request names a write pointer or a producer, or prefers "
        "return=representation",
        answer=PublishResponseFields | ReceiptFields,
        answer_types=(JSON_TYPE, AVRO_TYPE),
        answer_headers=(*_VERDICT_HEADERS, "Plainsong-Generation"),
        errors=(*WRITES, *BODY, *_UNDER, *_STORES, *_PRODUCES, "partial_duplicate"),
    ),
    Route(
        "store",
        "POST",
        TOPIC + "/store",
        Publishing,
        Publishing.store,
        owner="topic",
        hot=True,
        verb="publish",
        on="topic",
        tag="messages",
        doc=(
            "Store messages under a write pointer, or stage them as a producer's segment; they are invisible until a "
            "publish."
        ),
        parameters=("ttl",),
        headers=("traceparent",),
        body=Body(
            ref("StoreRequest"),
            types=(JSON_TYPE, AVRO_TYPE),
            example={"transactionWritePointer": EXAMPLE_POINTER, "messages": ["first", "second"], "segment": "task-7"},
        ),
        errors=(*WRITES, *BODY, *_UNDER, *_STORES, *_PRODUCES, "already_published", "conflict"),
    ),
    Route(
        "rollback",
        "POST",
        TOPIC + "/rollback",
        Publishing,
        Publishing.rollback,
        owner="topic",
        hot=True,
        verb=("publish", "operate"),
        on="topic",
        tag="messages",
        doc="Roll back a write pointer's messages in the topic: the range that a publish returned, or all of them.",
        body=Body(
            ref("RollbackRequest"), types=(JSON_TYPE, AVRO_TYPE), example={"transactionWritePointer": EXAMPLE_POINTER}
        ),
        errors=(
            *WRITES,
            *BODY,
            "unknown_field",
            "transaction_required",
            "transaction_not_in_progress",
            "transactions_unavailable",
        ),
    ),
    Route(
        "poll",
        "POST",
        TOPIC + "/poll",
        Polling,
        Polling.poll,
        owner="topic",
        reads_only=True,
        hot=True,
        wait_ms=poll_wait_ms,
        verb="poll",
        on="topic",
        tag="messages",
        doc="Read messages from a position on, oldest first; with waitMs, wait for one if there is none.",
        parameters=("wait_ms", "max_bytes", "isolation", "as_of_ms", "payload", "longs"),
        headers=("Plainsong-Reader",),
        body=Body(
            ref("PollRequest"),
            types=(JSON_TYPE, AVRO_TYPE),
            example={"startFrom": _ID, "inclusive": False, "limit": 1000, "waitMs": 30000},
        ),
        answer=list[MessageFields],
        answer_types=(JSON_TYPE, AVRO_TYPE, FRAMES_TYPE, BATCH_TYPE),
        answer_headers=(*_POSITION_HEADERS, *_HELD_HEADERS),
        errors=(*READS, *BODY, *VIEWS, *BAD_POSITION, *AS_OF),
    ),
    Route(
        "follow",
        "GET",
        TOPIC + "/events",
        MessageEvents,
        MessageEvents.follow,
        owner="topic",
        verb="poll",
        on="topic",
        tag="messages",
        doc="Read messages from a position on, or only new ones without a position, and follow the topic, as "
        "server-sent events.",
        parameters=("from", "isolation", "payload", "limit"),
        headers=("Last-Event-ID",),
        answer=str,
        answer_types=(EVENT_STREAM,),
        errors=(*READS, "invalid_message_id", "transactions_unavailable"),
    ),
    Route(
        "get_messages",
        "GET",
        TOPIC + "/messages",
        Messages,
        Messages.show,
        owner="topic",
        verb=("poll", "inspect"),
        on="topic",
        tag="looking",
        doc="Look at messages without consuming them, damaged ones included.",
        parameters=("from", "to", "limit", "payload", "longs", "payloadBytes", "order", "filter"),
        answer=list[ShownMessage],
        answer_headers=(*_POSITION_HEADERS, "Plainsong-Scanned"),
        errors=(*READS, "invalid_message_id"),
    ),
    Route(
        "get_message",
        "GET",
        TOPIC + "/messages/{message}",
        Messages,
        Messages.show_one,
        owner="topic",
        verb=("poll", "inspect"),
        on="topic",
        tag="looking",
        doc="Return one complete message; with Accept: application/octet-stream, only its payload.",
        parameters=("payload", "longs"),
        answer=ShownMessage,
        answer_types=(JSON_TYPE, "application/octet-stream"),
        errors=(*READS, "invalid_message_id", "not_found"),
    ),
    Route(
        "stream",
        "GET",
        TOPIC + "/stream",
        Streams,
        Streams.refuse,
        verb="publish",
        on="topic",
        tag="messages",
        doc="A WebSocket for pipelined publishes, in msgpack. OpenAPI cannot describe WebSockets: docs/http.md has "
        "the format. Without an upgrade the response is 400.",
        errors=(*ANY, "invalid_name", "forbidden", "replication_unavailable"),
    ),
    Route(
        "list_readers",
        "GET",
        READERS,
        Readers,
        Readers.list_all,
        owner="topic",
        verb=LOOK,
        on="topic",
        tag="readers",
        doc="All readers.",
        answer=list[ReaderRow],
        errors=READS,
    ),
    Route(
        "get_reader",
        "GET",
        READER,
        Readers,
        Readers.show,
        owner="topic",
        verb=LOOK,
        on="topic",
        tag="readers",
        doc="A reader.",
        answer=ReaderRow,
        errors=(*READS, "not_found"),
    ),
    Route(
        "put_reader",
        "PUT",
        READER,
        Readers,
        Readers.put,
        owner="topic",
        verb="poll",
        on="topic",
        tag="readers",
        doc="Save a reader's position; with expected, only if that is its current position.",
        parameters=("dryRun",),
        body=Body(ref("ReaderPosition"), example={"position": _ID, "expected": None}),
        answer=ReaderRow | ChangeReport,
        errors=(*WRITES, *BODY, *BAD_POSITION, "position_changed", "generation_changed", "quota_exceeded"),
    ),
    Route(
        "delete_reader",
        "DELETE",
        READER,
        Readers,
        Readers.remove,
        owner="topic",
        verb="admin",
        on="topic",
        tag="readers",
        doc="Delete a reader's position.",
        parameters=("dryRun",),
        answer=ChangeReport,
        errors=(*WRITES, "not_found"),
    ),
    Route(
        "poll_many",
        "POST",
        NAMESPACE + "/poll",
        PollingMany,
        PollingMany.poll,
        owner="topics",
        wait_ms=poll_many_wait_ms,
        reads_only=True,
        verb="poll",
        on="topics",
        tag="messages",
        doc="Poll up to 1000 topics at once, with one wait for all of them.",
        parameters=("wait_ms", "max_bytes", "isolation", "payload", "longs"),
        body=Body(
            ref("ManyRequest"),
            max_bytes=POLL_MANY_BODY_BYTES,
            example={"topics": {"orders": {"startFrom": _ID, "inclusive": False}, "prices": {}}, "waitMs": 30000},
        ),
        answer=ManyPages,
        errors=(*ANY, *BODY, *VIEWS, *BAD_POSITION, "invalid_name", "request_too_large", "replication_unavailable"),
    ),
)
