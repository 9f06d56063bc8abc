"""Avro binary, version 1: what the genuine clients speak, byte for byte."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from fastavro import schemaless_writer

from protocol.codec import schemas
from protocol.codec.base import DEFAULT_OPTIONS, Message, PageOptions
from protocol.codec.cursor import NO_BOUND, Cursor
from protocol.page import length_prefix, varint
from protocol.requests import PollRequest, PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from protocol.page import Page

#: What ends an array, and so a streamed answer.
AVRO_END = b"\x00"


def avro_block(page: Page) -> bytes:
    """A page as one array block of a streamed answer; nothing for an empty page, since 0 items are the end."""
    return b"".join((varint(page.count), *page.parts)) if page.count else b""


def written(schema: schemas.Schema, record: Any) -> bytes:
    """A record as raw Avro."""
    out = BytesIO()
    schemaless_writer(out, schema, record)
    return out.getvalue()


class AvroCodec:
    """Version 1. Polls are streamed: this client cannot be told that there is more."""

    content_type = "avro/binary"
    bounded = False

    def decode_publish(self, body: bytes) -> PublishRequest:
        """The body of publish and store."""
        cursor = Cursor(body)
        pointer = cursor.or_null(cursor.long)
        messages = cursor.payloads()
        cursor.finish()
        return PublishRequest(messages, pointer)

    def decode_poll(self, body: bytes) -> PollRequest:
        """The body of poll."""
        cursor = Cursor(body)
        request = read_poll(cursor)
        cursor.finish()
        return request

    def decode_rollback(self, body: bytes) -> PublishResponse:
        """The body of rollback: what a publish answered."""
        cursor = Cursor(body)
        response = read_publish_response(cursor)
        cursor.finish()
        return response

    decode_publish_response = decode_rollback

    def decode_receipt(self, body: bytes) -> Receipt:
        """The answer to a publish without a write pointer."""
        return read_receipt(body)

    def decode_page(self, body: bytes) -> list[Message]:
        """The answer to a poll; its end is the array's end."""
        cursor = Cursor(body, room=NO_BOUND)
        found = cursor.array(lambda: Message(cursor.octets(), cursor.octets()))
        cursor.finish()
        return found

    def encode_publish(self, request: PublishRequest) -> bytes:
        """The body of publish and store; fields of version 2 have no place in it."""
        return written(schemas.PUBLISH_REQUEST, publish_fields(request))

    def encode_poll(self, request: PollRequest) -> bytes:
        """The body of poll; fields of version 2 have no place in it."""
        return written(schemas.CONSUME_REQUEST, poll_fields(request))

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish with a write pointer."""
        return written(schemas.PUBLISH_RESPONSE, response_fields(response))

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish without one: the same record under both versions."""
        return write_receipt(receipt)

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """A whole answer: one block and the end. Pages are in this form already."""
        return b"".join((varint(page.count), *page.parts, AVRO_END)) if page.count else AVRO_END


def read_poll(cursor: Cursor) -> PollRequest:
    """The fields of version 1."""
    start_from: bytes | int | None = None
    branch = cursor.branch(3)
    if branch == 0:
        start_from = cursor.octets()
    elif branch == 1:
        start_from = cursor.long()
    return PollRequest(start_from, cursor.boolean(), cursor.or_null(cursor.int32), cursor.or_null(cursor.octets))


def read_publish_response(cursor: Cursor) -> PublishResponse:
    """The fields of version 1."""
    pointer = cursor.or_null(cursor.long)
    return PublishResponse(pointer, cursor.long(), cursor.int32(), cursor.long(), cursor.int32())


def read_receipt(body: bytes) -> Receipt:
    """A whole receipt."""
    cursor = Cursor(body)
    first_id, last_id = cursor.null_or(cursor.octets), cursor.null_or(cursor.octets)
    duplicate, deduplicated = cursor.boolean(), cursor.boolean()
    last_sequence_id = cursor.null_or(cursor.long)
    generation = cursor.int32()
    stored = cursor.null_or(lambda: cursor.array(cursor.long))
    dropped = cursor.null_or(lambda: cursor.array(cursor.long))
    cursor.finish()
    return Receipt(first_id, last_id, generation, duplicate, deduplicated, last_sequence_id, stored, dropped)


def write_receipt(receipt: Receipt) -> bytes:
    """A whole receipt."""
    first, last, sequence_id = receipt.first_id, receipt.last_id, receipt.last_sequence_id
    straddled = receipt.stored is not None or receipt.dropped is not None
    natural = receipt.generation >= 0 and (sequence_id is None or sequence_id >= 0)
    if natural and not straddled and first is not None and last is not None:
        # Nearly every answer to a producer: by hand it takes a quarter of the time.
        known = b"\x00" if sequence_id is None else b"\x02" + varint(sequence_id)
        ids = b"\x02%b%b\x02%b%b" % (length_prefix(len(first)), first, length_prefix(len(last)), last)
        flags = b"%c%c" % (receipt.duplicate, receipt.deduplicated)
        return b"%b%b%b%b\x00\x00" % (ids, flags, known, varint(receipt.generation))
    record = {
        "firstId": receipt.first_id,
        "lastId": receipt.last_id,
        "duplicate": receipt.duplicate,
        "deduplicated": receipt.deduplicated,
        "lastSequenceId": receipt.last_sequence_id,
        "generation": receipt.generation,
        "stored": receipt.stored,
        "dropped": receipt.dropped,
    }
    return written(schemas.RECEIPT, record)


def publish_fields(request: PublishRequest) -> dict[str, Any]:
    """The record of version 1."""
    return {"transactionWritePointer": request.write_pointer, "messages": request.messages}


def poll_fields(request: PollRequest) -> dict[str, Any]:
    """The record of version 1."""
    return {
        "startFrom": request.start_from,
        "inclusive": request.inclusive,
        "limit": request.limit,
        "transaction": request.transaction,
    }


def response_fields(response: PublishResponse) -> dict[str, Any]:
    """The record of version 1."""
    return {
        "transactionWritePointer": response.write_pointer,
        "startTimestamp": response.start_timestamp_ms,
        "startSequenceId": response.start_sequence_id,
        "endTimestamp": response.end_timestamp_ms,
        "endSequenceId": response.end_sequence_id,
    }
