"""Store and rollback: messages kept under a write pointer until they are published, and taken back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from broker.handlers.producing import asked
from broker.handlers.publish import apply_publish_query, off_loop
from broker.handlers.query import parse_query
from broker.handlers.under import rolled_back
from broker.http.exchange import HttpAnswer
from protocol.checks import check_rollback, check_store
from protocol.codec import codec_for, rolls_back_all
from protocol.errors import InvalidParameter
from protocol.ids import SEQUENCES_PER_MS, pack_position
from protocol.names import topic_name
from protocol.topic.pointer_asks import RollBackPointer, StoreUnder
from protocol.topic.staging_asks import StoreStaged

if TYPE_CHECKING:
    from broker.http.exchange import HotRequest
    from broker.service import Service
    from protocol.requests import PublishResponse


async def store(service: Service, request: HotRequest) -> HttpAnswer:
    """Keep messages under a write pointer, or staged by a producer, until they are published; 200 means durable.

    Raises:
      PlainsongError: with its outcome: nothing happened, or nobody knows.
    """
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    body = await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
    if request.query:
        apply_publish_query(body, request.query, "ttl")
    check_store(body)
    keep = StoreStaged if body.write_pointer is None else StoreUnder
    await asked(service, name, body, keep(body, len(request.body)))
    return HttpAnswer(200)


async def rollback(service: Service, request: HotRequest) -> HttpAnswer:
    """Turn the rows of a write pointer into rolled-back ones; done again, it changes nothing.

    Raises:
      PlainsongError: with its outcome: nothing happened, or nobody knows.
    """
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    response = codec.decode_rollback(request.body)
    parse_query(request.query, ())
    check_rollback(response)
    assert response.write_pointer is not None  # checked above
    await rolled_back(service, name, RollBackPointer(response.write_pointer, _within(response)))
    return HttpAnswer(200)


def _within(response: PublishResponse) -> tuple[bytes, bytes] | None:
    """First and last position; None: everything. Raises InvalidParameter for a range no publish answers with."""
    if rolls_back_all(response):
        return None
    first = _position("start", response.start_timestamp_ms, response.start_sequence_id)
    last = _position("end", response.end_timestamp_ms, response.end_sequence_id)
    if first > last:
        raise InvalidParameter("the range ends before it starts", hint="send what the publish answered, unread")
    return first, last


def _position(which: str, timestamp_ms: int, sequence_id: int) -> bytes:
    if timestamp_ms < 0 or not 0 <= sequence_id < SEQUENCES_PER_MS:
        raise InvalidParameter(
            f"{which}Timestamp is {timestamp_ms} and {which}SequenceId {sequence_id}",
            hint="send what the publish answered, unread",
        )
    return pack_position(timestamp_ms, sequence_id)
