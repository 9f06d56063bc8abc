"""Avro binary, version 2: version 1 with fields appended, for producers, attributes and bounded polls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.codec import schemas
from protocol.codec.avro import (
    AVRO_END,
    poll_fields,
    publish_fields,
    read_poll,
    read_publish_response,
    read_receipt,
    response_fields,
    write_receipt,
    written,
)
from protocol.codec.base import DEFAULT_OPTIONS, Message, PageOptions
from protocol.codec.cursor import NO_BOUND, Cursor
from protocol.codec.runs import read_run
from protocol.page import ITEM_HEAD_BYTES, read_varint, varint
from protocol.requests import Isolation, PollRequest, PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.page import Page

#: The symbols of the enum, in its order.
_ISOLATIONS: tuple[Isolation, ...] = ("uncommitted", "committed")


class Avro2Codec:
    """Version 2. Polls are pages, and say in their headers why they end."""

    content_type = "avro/binary; version=2"
    bounded = True

    def decode_publish(self, body: bytes) -> PublishRequest:
        """The body of publish and store: every field, in the schema's order."""
        cursor = Cursor(body)
        null_or = cursor.null_or
        pointer = cursor.or_null(cursor.long)
        request = PublishRequest(cursor.payloads(), pointer)
        request.ttl_s = null_or(cursor.int32)
        request.producer = null_or(cursor.string)
        request.producer_epoch = null_or(cursor.long)
        request.generation = null_or(cursor.int32)
        request.sequence_ids = null_or(lambda: read_run(cursor) or cursor.array(cursor.long))
        request.atomic = cursor.boolean()
        request.routing_key = null_or(cursor.string)
        request.segment = null_or(cursor.string)
        request.segments = null_or(lambda: cursor.array(cursor.string))
        request.message_ttls_s = null_or(lambda: cursor.array(lambda: null_or(cursor.int32)))
        request.attributes = null_or(lambda: cursor.array(cursor.strings))
        cursor.finish()
        return request

    def decode_poll(self, body: bytes) -> PollRequest:
        """The body of poll."""
        cursor = Cursor(body)
        request = read_poll(cursor)
        request.end_before = cursor.null_or(cursor.octets)
        request.wait_ms = cursor.null_or(cursor.int32)
        request.max_bytes = cursor.null_or(cursor.int32)
        request.isolation = cursor.null_or(lambda: _ISOLATIONS[cursor.branch(2)])
        cursor.finish()
        return request

    def decode_rollback(self, body: bytes) -> PublishResponse:
        """The body of rollback: what a publish answered in version 2."""
        cursor = Cursor(body)
        response = read_publish_response(cursor)
        response.duplicate = cursor.boolean()
        cursor.finish()
        return response

    decode_publish_response = decode_rollback

    def decode_receipt(self, body: bytes) -> Receipt:
        """The answer to a publish without a write pointer."""
        return read_receipt(body)

    def decode_page(self, body: bytes) -> list[Message]:
        """The answer to a poll."""
        cursor = Cursor(body, room=NO_BOUND)
        octets, strings = cursor.octets, cursor.strings
        found = cursor.array(lambda: Message(octets(), octets(), strings()))
        cursor.finish()
        return found

    def encode_publish(self, request: PublishRequest) -> bytes:
        """The body of publish and store."""
        record = publish_fields(request)
        record |= {
            "ttlSeconds": request.ttl_s,
            "producer": request.producer,
            "producerEpoch": request.producer_epoch,
            "generation": request.generation,
            "sequenceIds": request.sequence_ids,
            "atomic": request.atomic,
            "routingKey": request.routing_key,
            "segment": request.segment,
            "segments": request.segments,
            "messageTtlsSeconds": request.message_ttls_s,
            "attributes": request.attributes,
        }
        return written(schemas.PUBLISH_REQUEST_2, record)

    def encode_poll(self, request: PollRequest) -> bytes:
        """The body of poll."""
        record = poll_fields(request)
        record |= {
            "endBefore": request.end_before,
            "waitMs": request.wait_ms,
            "maxBytes": request.max_bytes,
            "isolation": request.isolation,
        }
        return written(schemas.CONSUME_REQUEST_2, record)

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish with a write pointer."""
        return written(schemas.PUBLISH_RESPONSE_2, response_fields(response) | {"duplicate": response.duplicate})

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish without one."""
        return write_receipt(receipt)

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """A whole answer: every item as it is, and its attributes behind it."""
        if not page.count:
            return AVRO_END
        out = [varint(page.count)]
        index = 0
        for part in page.parts:
            index = _add_items(out, part, index, page.attributes)
        out.append(AVRO_END)
        return b"".join(out)


def _add_items(out: list[bytes], part: bytes, index: int, attributes: Mapping[int, Mapping[str, str]]) -> int:
    """Add each item of ``part`` with its attributes to ``out``; ``index`` of the next part's first item."""
    at = 0
    while at < len(part):
        start = at
        size = part[at + ITEM_HEAD_BYTES]
        if size < 0x80:
            at += ITEM_HEAD_BYTES + 1 + (size >> 1)
        else:
            size, after_size = read_varint(part, at + ITEM_HEAD_BYTES)
            at = after_size + size
        out.append(part[start:at])
        out.append(_string_map(attributes[index]) if index in attributes else AVRO_END)
        index += 1
    return index


def _string_map(strings: Mapping[str, str]) -> bytes:
    """A map of strings: one block, and the end."""
    if not strings:
        return AVRO_END
    out = [varint(len(strings))]
    for pair in strings.items():
        for text in pair:
            raw = text.encode()
            out += (varint(len(raw)), raw)
    out.append(AVRO_END)
    return b"".join(out)
