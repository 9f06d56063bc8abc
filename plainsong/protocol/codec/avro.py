"""The Avro codecs: version 1, byte for byte that of existing clients, and version 2, which appends fields to it.

docs/http.md lists the fields in their order. Unions of version 1 have null last, those of version 2 have it first.
"""

from __future__ import annotations

from functools import cached_property, partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from plainsong.protocol.codec.avro_cursor import Cursor, read_longs, read_only_message
from plainsong.protocol.codec.base import DEFAULT_OPTIONS, PIECE_BYTES, PageOptions, cut
from plainsong.protocol.page import ITEM_HEAD_BYTES, length_prefix, read_varint, varint
from plainsong.protocol.requests import Isolation, PollRequest, PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong.protocol.page import Page

Schema = Any


class AvroSchema:
    """A schema that is parsed when the first record is written.

    Decoding is by hand, so only encoders load fastavro, which would add half as much again to ``import plainsong``. A
    daemon calls ``prepare`` at its start, so that no request waits for that.
    """

    def __init__(self, declared: Schema) -> None:
        self._declared = declared

    @cached_property
    def parsed(self) -> Schema:
        """The schema as parsed by fastavro."""
        from fastavro import parse_schema

        return parse_schema(self._declared)

    def written(self, record: Any) -> bytes:
        from fastavro import schemaless_writer

        out = BytesIO()
        schemaless_writer(out, self.parsed, record)
        return out.getvalue()


def _record(name: str, **fields: Schema) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": key, "type": kind} for key, kind in fields.items()]}


def _array(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


_STRING_MAP = {"type": "map", "values": "string"}
_ISOLATION = {"type": "enum", "name": "Isolation", "symbols": ["uncommitted", "committed"]}
_PUBLISH_FIELDS: dict[str, Schema] = {
    "transactionWritePointer": ["long", "null"],
    "messages": _array("bytes"),
}
_PUBLISH_FIELDS_2: dict[str, Schema] = {
    "ttlSeconds": ["null", "int"],
    "producer": ["null", "string"],
    "producerEpoch": ["null", "long"],
    "generation": ["null", "int"],
    "sequenceIds": ["null", _array("long")],
    "atomic": "boolean",
    "routingKey": ["null", "string"],
    "segment": ["null", "string"],
    "segments": ["null", _array("string")],
    "messageTtlsSeconds": ["null", _array(["null", "int"])],
    "attributes": ["null", _array(_STRING_MAP)],
}
_RESPONSE_FIELDS: dict[str, Schema] = {
    "transactionWritePointer": ["long", "null"],
    "startTimestamp": "long",
    "startSequenceId": "int",
    "endTimestamp": "long",
    "endSequenceId": "int",
}
_CONSUME_FIELDS: dict[str, Schema] = {
    "startFrom": ["bytes", "long", "null"],
    "inclusive": "boolean",
    "limit": ["int", "null"],
    "transaction": ["bytes", "null"],
}
_CONSUME_FIELDS_2: dict[str, Schema] = {
    "endBefore": ["null", "bytes"],
    "waitMs": ["null", "int"],
    "maxBytes": ["null", "int"],
    "isolation": ["null", _ISOLATION],
}
PUBLISH_REQUEST = AvroSchema(_record("PublishRequest", **_PUBLISH_FIELDS))
PUBLISH_RESPONSE = AvroSchema(_record("PublishResponse", **_RESPONSE_FIELDS))
CONSUME_REQUEST = AvroSchema(_record("ConsumeRequest", **_CONSUME_FIELDS))
PUBLISH_REQUEST_2 = AvroSchema(_record("PublishRequest", **_PUBLISH_FIELDS, **_PUBLISH_FIELDS_2))
PUBLISH_RESPONSE_2 = AvroSchema(_record("PublishResponse", **_RESPONSE_FIELDS, duplicate="boolean"))
CONSUME_REQUEST_2 = AvroSchema(_record("ConsumeRequest", **_CONSUME_FIELDS, **_CONSUME_FIELDS_2))
#: The same under both versions.
RECEIPT = AvroSchema(
    _record(
        "Receipt",
        firstId=["null", "bytes"],
        lastId=["null", "bytes"],
        duplicate="boolean",
        deduplicated="boolean",
        lastSequenceId=["null", "long"],
        generation="int",
        stored=["null", _array("long")],
        dropped=["null", _array("long")],
    )
)


def prepare() -> None:
    """Loads fastavro and parses the schemas of answers."""
    for schema in (PUBLISH_RESPONSE, PUBLISH_RESPONSE_2, RECEIPT):
        _ = schema.parsed


# --- version 1 -------------------------------------------------------------------------------------


#: The end of an array, and so of a streamed answer.
AVRO_END = b"\x00"


def avro_block_pieces(page: Page) -> Iterator[bytes]:
    """A page as one array block of a streamed answer, in pieces of about ``PIECE_BYTES``.

    None for an empty page, since a block of 0 items is the end.
    """
    out, size = [varint(page.count)] if page.count else [], 0
    for part in page.parts:
        if len(part) > PIECE_BYTES:
            yield b"".join(out)
            yield from cut(part)
            out, size = [], 0
            continue
        out.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(out)
            out, size = [], 0
    if out:
        yield b"".join(out)


class AvroCodec:
    """Version 1. Polls are streamed to the end of the topic, since an answer cannot say that there is more."""

    content_type = "avro/binary"
    bounded = False

    def decode_publish(self, body: bytes) -> PublishRequest:
        message, end = read_only_message(body)
        if message is not None and len(body) == end + len(AVRO_END):
            return PublishRequest([message])
        cursor = Cursor(body)
        pointer = cursor.or_null(cursor.long)
        messages = cursor.payloads()
        cursor.finish()
        return PublishRequest(messages, pointer)

    def decode_poll(self, body: bytes) -> PollRequest:
        cursor = Cursor(body)
        request = read_poll(cursor)
        cursor.finish()
        return request

    def decode_rollback(self, body: bytes) -> PublishResponse:
        cursor = Cursor(body)
        response = read_publish_response(cursor)
        cursor.finish()
        return response

    decode_publish_response = decode_rollback

    def encode_publish(self, request: PublishRequest) -> bytes:
        """The body of publish and store, without the fields of version 2."""
        return PUBLISH_REQUEST.written(publish_fields(request))

    def encode_poll(self, request: PollRequest) -> bytes:
        """The body of poll, without the fields of version 2."""
        return CONSUME_REQUEST.written(poll_fields(request))

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        return PUBLISH_RESPONSE.written(response_fields(response))

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish without a write pointer: the same record in both versions."""
        return write_receipt(receipt)

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """A whole answer: one block and the end. Pages have this form already."""
        return b"".join((varint(page.count), *page.parts, AVRO_END)) if page.count else AVRO_END

    def page_pieces(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> Iterator[bytes]:
        """See ``Codec.page_pieces``."""
        yield from avro_block_pieces(page)
        yield AVRO_END


def read_poll(cursor: Cursor) -> PollRequest:
    start_from: bytes | int | None = None
    branch = cursor.branch(3)
    if branch == 0:
        start_from = cursor.octets()
    elif branch == 1:
        start_from = cursor.long()
    return PollRequest(start_from, cursor.boolean(), cursor.or_null(cursor.int32), cursor.or_null(cursor.octets))


def read_publish_response(cursor: Cursor) -> PublishResponse:
    pointer = cursor.or_null(cursor.long)
    return PublishResponse(pointer, cursor.long(), cursor.int32(), cursor.long(), cursor.int32())


def write_receipt(receipt: Receipt) -> bytes:
    first, last, sequence_id = receipt.first_id, receipt.last_id, receipt.last_sequence_id
    straddled = receipt.stored is not None or receipt.dropped is not None
    natural = receipt.generation >= 0 and (sequence_id is None or sequence_id >= 0)
    if natural and not straddled and first is not None and last is not None:
        # Nearly every answer to a producer: encoded by hand it takes a fifth of the time.
        begin = b"\x02" + length_prefix(len(first)) + first
        end = begin if last is first else b"\x02" + length_prefix(len(last)) + last
        return b"%b%b%c%c%b%b\x00\x00" % (
            begin,
            end,
            receipt.duplicate,
            receipt.deduplicated,
            b"\x00" if sequence_id is None else b"\x02" + varint(sequence_id),
            length_prefix(receipt.generation),
        )
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
    return RECEIPT.written(record)


def publish_fields(request: PublishRequest) -> dict[str, Any]:
    return {"transactionWritePointer": request.write_pointer, "messages": request.messages}


def poll_fields(request: PollRequest) -> dict[str, Any]:
    return {
        "startFrom": request.start_from,
        "inclusive": request.inclusive,
        "limit": request.limit,
        "transaction": request.transaction,
    }


def response_fields(response: PublishResponse) -> dict[str, Any]:
    return {
        "transactionWritePointer": response.write_pointer,
        "startTimestamp": response.start_timestamp_ms,
        "startSequenceId": response.start_sequence_id,
        "endTimestamp": response.end_timestamp_ms,
        "endSequenceId": response.end_sequence_id,
    }


# --- version 2 -------------------------------------------------------------------------------------


#: The symbols of the enum, in its order.
_ISOLATIONS: tuple[Isolation, ...] = ("uncommitted", "committed")


#: The last fields of a plain request: not atomic, and five nulls.
_NONE_OF_THE_REST = bytes(6)
#: The bytes after the only message of a request with no other field: the end of the array, five nulls, the last fields.
_NO_OTHER_FIELDS = bytes(6) + _NONE_OF_THE_REST
#: The bytes after the only sequence id of a request.
_BEHIND_ID = AVRO_END + _NONE_OF_THE_REST
#: The bytes before the only sequence id: the branch of the union, and an array block of one item.
_ONE_ID = b"\x02\x02"
#: The values of all bytes of a varint except its last.
_GO_ON = bytes(range(0x80, 0x100))
#: Bytes of the longest varint, of 64 bits.
_LONGEST_NUMBER = 10
#: Cached entries, one per producer; and the bytes of the longest, which has the longest name.
_MOST_SEEN = 1024
_LONGEST_SEEN = 300


class ProducersSeen:
    """A cache of the decoded fields between the only message of a producer's request and its only sequence id.

    A producer's requests differ only in these two, and decoding the other fields would take most of the time.
    """

    def __init__(self) -> None:
        #: The values are the arguments of ``PublishRequest`` from the time to live on.
        self._fields: dict[bytes, tuple[int | None, str | None, int | None, int | None]] = {}

    def request(self, message: bytes, behind: bytes) -> PublishRequest | None:
        """Return the request with this message and, after it, the bytes ``behind``; None if not cached, or malformed."""
        if not behind.endswith(_BEHIND_ID):
            return None
        end = len(behind) - len(_BEHIND_ID)
        fields = behind[: end - 1].rstrip(_GO_ON)
        seen = self._fields.get(fields)
        if seen is None:
            return None
        raw = shift = 0
        for byte in behind[len(fields) : end]:
            raw |= (byte & 0x7F) << shift
            shift += 7
        if raw >> 64 or shift > 7 * _LONGEST_NUMBER or byte >= 0x80:
            return None
        return PublishRequest([message], None, *seen, [raw >> 1 ^ -(raw & 1)])

    def see(self, request: PublishRequest, behind: bytes) -> None:
        """Cache the bytes after the only message of a request, if another request may have the same."""
        if request.producer is None or request.sequence_ids is None or len(request.sequence_ids) != 1:
            return
        fields = behind[: -len(_BEHIND_ID) - 1].rstrip(_GO_ON)
        if fields.endswith(_ONE_ID) and len(fields) <= _LONGEST_SEEN:
            if len(self._fields) >= _MOST_SEEN:
                self._fields.clear()
            self._fields[fields] = request.ttl_s, request.producer, request.producer_epoch, request.generation


class Avro2Codec:
    """Version 2, with producers and attributes. Polls are pages; a header says why a page ends."""

    content_type = "avro/binary; version=2"
    bounded = True

    def __init__(self) -> None:
        self._producers_seen = ProducersSeen()

    def decode_publish(self, body: bytes) -> PublishRequest:
        """The body of publish and store: every field, in the schema's order."""
        message, at = read_only_message(body)
        if message is not None:
            if body.endswith(_NO_OTHER_FIELDS) and at + len(_NO_OTHER_FIELDS) == len(body):
                return PublishRequest([message])
            request = self._producers_seen.request(message, body[at:])
            if request is not None:
                return request
        cursor = Cursor(body)
        null_or = cursor.null_or
        pointer = cursor.or_null(cursor.long)
        request = PublishRequest(cursor.payloads(), pointer)
        request.ttl_s = null_or(cursor.int32)
        request.producer = null_or(cursor.string)
        request.producer_epoch = null_or(cursor.long)
        request.generation = null_or(cursor.int32)
        request.sequence_ids = null_or(partial(read_longs, cursor))
        if body.endswith(_NONE_OF_THE_REST) and cursor.at + len(_NONE_OF_THE_REST) == len(body):
            if message is not None:
                self._producers_seen.see(request, body[at:])
            return request  # nearly always
        request.atomic = cursor.boolean()
        request.routing_key = null_or(cursor.string)
        request.segment = null_or(cursor.string)
        request.segments = null_or(lambda: cursor.array(cursor.string))
        request.message_ttls_s = null_or(lambda: cursor.array(lambda: null_or(cursor.int32)))
        request.attributes = null_or(lambda: cursor.array(cursor.strings))
        cursor.finish()
        return request

    def decode_poll(self, body: bytes) -> PollRequest:
        cursor = Cursor(body)
        request = read_poll(cursor)
        request.end_before = cursor.null_or(cursor.octets)
        request.wait_ms = cursor.null_or(cursor.int32)
        request.max_bytes = cursor.null_or(cursor.int32)
        request.isolation = cursor.null_or(lambda: _ISOLATIONS[cursor.branch(2)])
        cursor.finish()
        return request

    def decode_rollback(self, body: bytes) -> PublishResponse:
        """The body of rollback: the answer to a publish in version 2."""
        cursor = Cursor(body)
        response = read_publish_response(cursor)
        response.duplicate = cursor.boolean()
        cursor.finish()
        return response

    decode_publish_response = decode_rollback

    def decode_receipt(self, body: bytes) -> Receipt:
        """The answer to a publish without a write pointer."""
        cursor = Cursor(body)
        first_id, last_id = cursor.null_or(cursor.octets), cursor.null_or(cursor.octets)
        duplicate, deduplicated = cursor.boolean(), cursor.boolean()
        last_sequence_id = cursor.null_or(cursor.long)
        generation = cursor.int32()
        stored = cursor.null_or(lambda: cursor.array(cursor.long))
        dropped = cursor.null_or(lambda: cursor.array(cursor.long))
        cursor.finish()
        return Receipt(first_id, last_id, generation, duplicate, deduplicated, last_sequence_id, stored, dropped)

    def encode_publish(self, request: PublishRequest) -> bytes:
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
        return PUBLISH_REQUEST_2.written(record)

    def encode_poll(self, request: PollRequest) -> bytes:
        record = poll_fields(request)
        record |= {
            "endBefore": request.end_before,
            "waitMs": request.wait_ms,
            "maxBytes": request.max_bytes,
            "isolation": request.isolation,
        }
        return CONSUME_REQUEST_2.written(record)

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        return PUBLISH_RESPONSE_2.written(response_fields(response) | {"duplicate": response.duplicate})

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        return write_receipt(receipt)

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """A whole answer: every item unchanged, followed by its attributes."""
        return b"".join(self.page_pieces(page, options))

    def page_pieces(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> Iterator[bytes]:
        """See ``Codec.page_pieces``."""
        attributes = page.attributes
        out = [varint(page.count)] if page.count else []
        bytes_out = index = 0
        for part in page.parts:
            at, end = 0, len(part)
            while at < end:
                start = at
                size = part[at + ITEM_HEAD_BYTES]
                if size < 0x80:
                    at += ITEM_HEAD_BYTES + 1 + (size >> 1)
                else:
                    size, after_size = read_varint(part, at + ITEM_HEAD_BYTES)
                    at = after_size + size
                if at - start > PIECE_BYTES:
                    yield b"".join(out)
                    yield from cut(part[start:at])
                    out, bytes_out = [], 0
                else:
                    out.append(part[start:at])
                    bytes_out += at - start
                out.append(_string_map(attributes[index]) if index in attributes else AVRO_END)
                index += 1
                if bytes_out >= PIECE_BYTES:
                    yield b"".join(out)
                    out, bytes_out = [], 0
        out.append(AVRO_END)
        yield b"".join(out)


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
