"""Every call of the HTTP contract that a client makes, as a request and a way to read its answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from plainsong.core.attempts import Call
from plainsong.core.effects import Request
from plainsong.ids import MessageId
from plainsong.messages import Receipt
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.errors import MalformedBody, NotFound
from plainsong.protocol.names import namespace_name, reader_name, topic_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.core.effects import Answer
    from plainsong.protocol.requests import PublishRequest

_JSON = (("Content-Type", "application/json"),)
_RECEIPT = ("Prefer", "return=representation")


def namespace_path(namespace: str) -> str:
    """Raises InvalidName."""
    return f"/v1/namespaces/{namespace_name(namespace)}"


def topic_path(namespace: str, topic: str, rest: str = "") -> str:
    """Raises InvalidName."""
    topic_name(namespace, topic)
    return f"/v1/namespaces/{namespace}/topics/{topic}{rest}"


def json_of(answer: Answer) -> Any:
    """The body as JSON. Raises ValueError."""
    return json.loads(answer.body)


def nothing(answer: Answer) -> None:
    """For calls that are answered with a status alone."""


def as_json(value: Any) -> bytes:
    """A body."""
    return json.dumps(value, separators=(",", ":")).encode()


# --- topics --------------------------------------------------------------------------------------


def create_topic(namespace: str, topic: str, properties: Mapping[str, Any], *, if_not_exists: bool) -> Call[None]:
    """``PUT /{t}``; sent again after a doubt only where finding it there is no error."""
    path = topic_path(namespace, topic, "?ifNotExists=true" if if_not_exists else "")
    return Call(Request("PUT", path, _JSON, as_json(properties)), nothing, "harmless" if if_not_exists else "twice")


def set_properties(namespace: str, topic: str, properties: Mapping[str, Any]) -> Call[None]:
    """``PUT /{t}/properties``."""
    return Call(
        Request("PUT", topic_path(namespace, topic, "/properties"), _JSON, as_json(properties)), nothing, "harmless"
    )


def describe_topic(namespace: str, topic: str) -> Call[dict[str, str]]:
    """``GET /{t}``: its properties, in either of the two forms a daemon gives them."""

    def read(answer: Answer) -> dict[str, str]:
        found = json_of(answer)
        properties = found["properties"] if isinstance(found.get("properties"), dict) else found
        return {str(key): str(value) for key, value in properties.items()}

    return Call(Request("GET", topic_path(namespace, topic)), read)


def list_topics(namespace: str) -> Call[list[str]]:
    """``GET`` of all names, sorted."""

    def read(answer: Answer) -> list[str]:
        return [str(name) for name in json_of(answer)]

    return Call(Request("GET", namespace_path(namespace) + "/topics"), read)


def delete_topic(namespace: str, topic: str) -> Call[None]:
    """``DELETE /{t}``."""
    return Call(Request("DELETE", topic_path(namespace, topic)), nothing, "twice")


def undelete_topic(namespace: str, topic: str) -> Call[None]:
    """``POST /{t}/undelete``."""
    return Call(Request("POST", topic_path(namespace, topic, "/undelete")), nothing, "twice")


def topic_stats(namespace: str, topic: str, reader: str | None = None) -> Call[dict[str, Any]]:
    """``GET /{t}/stats``."""
    query = "?" + urlencode({"reader": reader}) if reader is not None else ""

    def read(answer: Answer) -> dict[str, Any]:
        return dict(json_of(answer))

    return Call(Request("GET", topic_path(namespace, topic, "/stats" + query)), read)


def topic_offsets(namespace: str, topic: str, bounds: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """``POST /{t}/offsets``: where a bounded read would end."""

    def read(answer: Answer) -> dict[str, Any]:
        return dict(json_of(answer))

    return Call(Request("POST", topic_path(namespace, topic, "/offsets"), _JSON, as_json(bounds)), read)


# --- readers -------------------------------------------------------------------------------------


def reader_path(namespace: str, topic: str, reader: str) -> str:
    """Raises InvalidName."""
    return topic_path(namespace, topic, "/readers/" + reader_name(reader))


def list_readers(namespace: str, topic: str) -> Call[list[dict[str, Any]]]:
    """``GET /{t}/readers``."""

    def read(answer: Answer) -> list[dict[str, Any]]:
        return [dict(each) for each in json_of(answer)]

    return Call(Request("GET", topic_path(namespace, topic, "/readers")), read)


def show_reader(namespace: str, topic: str, reader: str) -> Call[dict[str, Any]]:
    """``GET /{t}/readers/{name}``."""

    def read(answer: Answer) -> dict[str, Any]:
        return dict(json_of(answer))

    return Call(Request("GET", reader_path(namespace, topic, reader)), read)


def set_reader(
    namespace: str, topic: str, reader: str, position: bytes, *, compare: bool = False, expected: bytes | None = None
) -> Call[None]:
    """``PUT /{t}/readers/{name}``; with ``compare`` only if it stands at ``expected`` (None: if there is none)."""
    body: dict[str, Any] = {"position": position.hex()}
    if compare:
        body["expected"] = None if expected is None else expected.hex()
    return Call(Request("PUT", reader_path(namespace, topic, reader), _JSON, as_json(body)), nothing, "harmless")


def delete_reader(namespace: str, topic: str, reader: str) -> Call[None]:
    """``DELETE /{t}/readers/{name}``."""
    return Call(Request("DELETE", reader_path(namespace, topic, reader)), nothing, "twice")


def position_of(shown: Mapping[str, Any]) -> MessageId:
    """The position in what ``show_reader`` answers. Raises KeyError, InvalidMessageId."""
    return MessageId(str(shown["position"]))


def checked_position(position: bytes | str) -> MessageId:
    """Raises InvalidMessageId."""
    return MessageId(position)


def is_missing_reader(error: NotFound) -> bool:
    """Whether a 404 is about the reader, not its topic."""
    return error.code == NotFound.code


# --- publish -------------------------------------------------------------------------------------


def publish(namespace: str, topic: str, request: PublishRequest, *, retry_unknown: bool = False) -> Call[Receipt]:
    """``POST /{t}/publish``, answered with a receipt. Version 1 where it can say it: it is decoded faster."""
    codec = AVRO if is_plain(request) else AVRO_2
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        return read_receipt(answer, count)

    path = topic_path(namespace, topic, "/publish")
    headers = (("Content-Type", codec.content_type), _RECEIPT)
    return Call(
        Request("POST", path, headers, codec.encode_publish(request)), read, "harmless" if retry_unknown else "twice"
    )


def is_plain(request: PublishRequest) -> bool:
    """Whether version 1 has a place for all of it."""
    return (
        request.ttl_s is None
        and request.message_ttls_s is None
        and request.producer is None
        and request.generation is None
        and not request.atomic
        and request.routing_key is None
        and request.segment is None
        and request.segments is None
        and request.attributes is None
    )


def read_receipt(answer: Answer, count: int) -> Receipt:
    """The receipt in an answer. Raises MalformedBody."""
    if not answer.body:
        raise MalformedBody("the receipt is missing")
    told = AVRO_2.decode_receipt(answer.body)
    return Receipt(
        None if told.first_id is None else MessageId(told.first_id),
        None if told.last_id is None else MessageId(told.last_id),
        count,
        told.generation,
        told.duplicate,
        told.deduplicated,
        told.last_sequence_id,
        told.stored,
        told.dropped,
    )


def own_ttls(ttls_s: Sequence[int | None]) -> Sequence[int | None] | None:
    """None when no message has a time to live of its own."""
    return ttls_s if any(ttl is not None for ttl in ttls_s) else None
