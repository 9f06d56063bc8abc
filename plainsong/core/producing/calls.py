"""The requests of a producer, and how their answers are read: sessions opened and asked about, messages published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from plainsong.core.attempts import Call
from plainsong.core.calls import as_json, json_of, read_receipt, topic_path
from plainsong.core.effects import Request
from plainsong.ids import MessageId
from plainsong.messages import Receipt
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.errors import MalformedBody
from plainsong.protocol.ids import pack_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.core.effects import Answer
    from plainsong.protocol.requests import PublishRequest

_JSON = (("Content-Type", "application/json"),)
_AVRO = (("Content-Type", AVRO_2.content_type),)


class Recent(NamedTuple):
    """One of the last requests of a producer, as the topic remembers it."""

    first: int
    last: int
    """Its lowest and highest sequence id."""
    first_id: MessageId | None
    last_id: MessageId | None
    pointer: int | None = None
    """The write pointer it was published under; None: plainly."""


class Known(NamedTuple):
    """What a topic knows of a producer."""

    producer: str
    epoch: int
    last_sequence_id: int
    """The highest that is durable; -1: none."""
    generation: int
    recent: Sequence[Recent]


def open_session(
    namespace: str, topic: str, producer: str | None, *, retention_s: int | None = None, generation: int | None = None
) -> Call[Known]:
    """``PUT /{t}/producers/{name}``, or ``POST`` for a name that the daemon makes.

    Made twice it is another session, or another name: the caller says whether that is harmless.
    """
    given = {"retentionSeconds": retention_s, "generation": generation}
    body = as_json({name: value for name, value in given.items() if value is not None})
    if producer is None:
        return Call(Request("POST", topic_path(namespace, topic, "/producers"), _JSON, body), _known, "twice")
    return Call(Request("PUT", producer_path(namespace, topic, producer), _JSON, body), _known, "twice")


def ask(namespace: str, topic: str, producer: str, generation: int) -> Call[Known]:
    """``GET /{t}/producers/{name}`` of a generation, which may be gone."""
    return Call(Request("GET", producer_path(namespace, topic, producer, f"?generation={generation}")), _known)


def producer_path(namespace: str, topic: str, producer: str, rest: str = "") -> str:
    """Any text may name a producer: what a path cannot have is escaped. Raises InvalidName."""
    return topic_path(namespace, topic, "/producers/" + quote(producer, safe="") + rest)


def _known(answer: Answer) -> Known:
    told = json_of(answer)
    return Known(
        str(told["producer"]),
        int(told["epoch"]),
        int(told["lastSequenceId"]),
        int(told["generation"]),
        [_recent(each) for each in told.get("recent", ())],
    )


def _recent(told: Mapping[str, Any]) -> Recent:
    under = (told.get("response") or {}).get("transactionWritePointer")
    pointer = None if under is None else int(under)
    return Recent(int(told["first"]), int(told["last"]), _id(told["firstId"]), _id(told["lastId"]), pointer)


def _id(told: str | None) -> MessageId | None:
    return None if told is None else MessageId(told)


def publish(namespace: str, topic: str, request: PublishRequest) -> Call[Receipt]:
    """``POST /{t}/publish`` of a producer, plainly or under a write pointer. Whether it is repeated, others decide."""
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        return read_receipt(answer, count) if request.write_pointer is None else _response(answer, request)

    body = AVRO_2.encode_publish(request)
    return Call(Request("POST", topic_path(namespace, topic, "/publish"), _AVRO, body), read, "twice")


def _response(answer: Answer, request: PublishRequest) -> Receipt:
    """What a publish under a pointer answers, as a receipt."""
    if not answer.body:
        raise MalformedBody("the response is missing")
    told = AVRO_2.decode_publish_response(answer.body)
    ids = request.sequence_ids or ()
    return Receipt(
        MessageId(pack_id(told.start_timestamp_ms, told.start_sequence_id)),
        MessageId(pack_id(told.end_timestamp_ms, told.end_sequence_id)),
        len(request.messages),
        request.generation or 0,
        told.duplicate,
        answer.headers.get("plainsong-last-sequence-id", "null") not in ("null", ""),
        ids[-1] if ids else None,
    )
