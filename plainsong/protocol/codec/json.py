"""The JSON codec: the same records as objects, in which every optional field may be left out.

The entries of a publish's list ``messages`` are payloads, or items with more fields:

    "text"   {"base64": …}   {"bytes": …}                                     a payload
    {"payload": …, "ttlSeconds": …, "sequenceId": …, "attributes": {…}}       an item, recognised by its ``payload``
"""

from __future__ import annotations

from binascii import b2a_base64
from codecs import getincrementaldecoder
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.base import (
    DEFAULT_OPTIONS,
    MAX_MESSAGES,
    PIECE_BYTES,
    PIECE_MESSAGES,
    PageOptions,
    cut,
    rollback_of_all,
)
from plainsong.protocol.codec.json_values import parse_position
from plainsong.protocol.errors import InvalidSequenceIds, MalformedBody, RequestTooLarge, UnknownField, nearest
from plainsong.protocol.ids import parse_id
from plainsong.protocol.page import messages_of
from plainsong.protocol.requests import PollRequest, PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from plainsong.protocol.page import Page

#: Three bytes are four characters.
_BASE64_PIECE = PIECE_BYTES // 3 * 3
_ITEM: Mapping[str, tuple[str, values.Kind]] = {
    "payload": ("payload", values.payload),
    "ttlSeconds": ("ttl_s", values.nullable(values.int32, "int")),
    "sequenceId": ("sequence_id", values.nullable(values.int64, "long")),
    "attributes": ("attributes", values.nullable(values.strings, "map")),
}
#: A field of items → the request's list with the same meaning, and that list's name in JSON.
_LISTS = {
    "ttl_s": ("message_ttls_s", "messageTtlsSeconds"),
    "sequence_id": ("sequence_ids", "sequenceIds"),
    "attributes": ("attributes", "attributes"),
}


def put_messages(request: dict[str, Any], given: Any) -> None:
    """Add ``messages`` to the request's fields, and lists of the other fields of its items.

    Raises:
      MalformedBody, UnknownField: an entry has neither form, or a field that the request also has as a list.
      InvalidSequenceIds: some items have a sequence id and some have none.
      RequestTooLarge: more than ``MAX_MESSAGES``.
    """
    if not isinstance(given, list):
        values.refuse("messages", given, "a list")
    if len(given) > MAX_MESSAGES:
        raise RequestTooLarge(f"{len(given)} messages", hint=f"send at most {MAX_MESSAGES} at a time")
    items: dict[int, dict[str, Any]] = {}
    request["messages"] = [
        _utf8(entry, index) if type(entry) is str else _message(entry, index, items)
        for index, entry in enumerate(given)
    ]
    if not items:
        return
    for key, (name, shown) in _LISTS.items():
        if any(item.get(key) is not None for item in items.values()):
            _put_list(request, name, shown, [items.get(index, {}).get(key) for index in range(len(given))])


def _utf8(entry: str, index: int) -> bytes:
    try:
        return entry.encode()
    except UnicodeEncodeError:
        return values.utf8(entry, f"messages[{index}]")


def _message(entry: Any, index: int, items: dict[int, dict[str, Any]]) -> bytes:
    """Return the payload of an entry that is not a string; add its other fields to ``items``."""
    where = f"messages[{index}]"
    if not isinstance(entry, dict) or "payload" not in entry:
        if isinstance(entry, dict) and not entry.keys() & {"base64", "bytes"}:
            _refuse_object(entry, where)
        return values.payload(entry, where)
    item = values.fields_of(entry, _ITEM, where + ".")
    items[index] = item
    payload: bytes = item["payload"]
    return payload


def _refuse_object(entry: dict[str, Any], where: str) -> None:
    known = (*_ITEM, "base64", "bytes")
    for key in entry:
        if key not in known:
            raise UnknownField(f"unknown field {where}.{key[:80]!r}", hint=nearest(key[:80], known))
    raise MalformedBody(f"{where} has no payload", hint='{"payload": …}, {"base64": …} or a string')


def _put_list(request: dict[str, Any], name: str, shown: str, column: list[Any]) -> None:
    if request.get(name) is not None:
        error = InvalidSequenceIds if name == "sequence_ids" else MalformedBody
        raise error(
            f"{shown} is given both as a list and in the items of messages", hint="give it in one of the two places"
        )
    if name == "sequence_ids" and None in column:
        raise InvalidSequenceIds(
            f"messages[{column.index(None)}] has no sequenceId, others have one", hint="give all of them one, or none"
        )
    request[name] = [entry or {} for entry in column] if name == "attributes" else column


# --- the codec -------------------------------------------------------------------------------------


if TYPE_CHECKING:
    Kinds = Mapping[str, tuple[str, values.Kind]]


_ISOLATIONS = ("uncommitted", "committed")


def _id(value: Any, name: str) -> bytes:
    """Return a message id, given as 40 hex digits or as its bytes in a tagged form."""
    return parse_id(value) if isinstance(value, str) else values.payload(value, name)


def _start(value: Any, name: str) -> bytes | int:
    if isinstance(value, dict):
        return values.payload(value, name)
    return parse_position(value, name)


def _isolation(value: Any, name: str) -> Any:
    return value if value in _ISOLATIONS else values.refuse(name, value, "uncommitted or committed")


_POINTER = ("write_pointer", values.nullable(values.pointer, "long"))
_NULL_INT = values.nullable(values.int32, "int")
_NULL_LONG = values.nullable(values.int64, "long")
_NULL_TEXT = values.nullable(values.text, "string")
_NULL_LONGS = values.nullable(values.list_of(values.int64), "array")
_NULL_ID = values.nullable(_id)
_PUBLISH: Kinds = {
    "transactionWritePointer": _POINTER,
    "messages": ("messages", lambda value, name: value),
    "ttlSeconds": ("ttl_s", _NULL_INT),
    "producer": ("producer", _NULL_TEXT),
    "producerEpoch": ("producer_epoch", _NULL_LONG),
    "generation": ("generation", _NULL_INT),
    "sequenceIds": ("sequence_ids", _NULL_LONGS),
    "atomic": ("atomic", values.boolean),
    "routingKey": ("routing_key", _NULL_TEXT),
    "segment": ("segment", _NULL_TEXT),
    "segments": ("segments", values.nullable(values.list_of(values.text), "array")),
    "messageTtlsSeconds": ("message_ttls_s", values.nullable(values.list_of(_NULL_INT), "array")),
    "attributes": ("attributes", values.nullable(values.list_of(values.strings), "array")),
}
_POLL: Kinds = {
    "startFrom": ("start_from", values.nullable(_start, "long")),
    "inclusive": ("inclusive", values.boolean),
    "limit": ("limit", _NULL_INT),
    "transaction": ("transaction", values.nullable(values.binary)),
    "endBefore": ("end_before", _NULL_ID),
    "waitMs": ("wait_ms", _NULL_INT),
    "maxBytes": ("max_bytes", _NULL_INT),
    "isolation": ("isolation", values.nullable(_isolation, "Isolation")),
    "asOfMs": ("as_of_ms", _NULL_LONG),
}
_RANGE: Kinds = {
    "startTimestamp": ("start_timestamp_ms", values.int64),
    "startSequenceId": ("start_sequence_id", values.int32),
    "endTimestamp": ("end_timestamp_ms", values.int64),
    "endSequenceId": ("end_sequence_id", values.int32),
}
_RESPONSE: Kinds = {"transactionWritePointer": _POINTER, **_RANGE, "duplicate": ("duplicate", values.boolean)}
#: The fields of a receipt, by their names in JSON.
_RECEIPT = {
    "firstId": "first_id",
    "lastId": "last_id",
    "duplicate": "duplicate",
    "deduplicated": "deduplicated",
    "lastSequenceId": "last_sequence_id",
    "generation": "generation",
    "stored": "stored",
    "dropped": "dropped",
}


class JsonCodec:
    """JSON: the daemon's side, and the polls of clients."""

    content_type = "application/json"
    bounded = True

    def decode_publish(self, body: bytes) -> PublishRequest:
        """Decode the body of publish and store; ``messages`` is empty by default."""
        request = values.fields_of(values.parse_object(body), _PUBLISH)
        put_messages(request, request.get("messages", []))
        return PublishRequest(**request)

    def decode_poll(self, body: bytes) -> PollRequest:
        """Decode the body of poll; an empty body requests all messages."""
        return PollRequest(**values.fields_of(values.parse_object(body), _POLL)) if body else PollRequest()

    def decode_rollback(self, body: bytes) -> PublishResponse:
        """Decode the body of rollback: the answer to a publish, or a pointer alone (``rollback_of_all``)."""
        given = values.parse_object(body)
        found = {"write_pointer": None} | values.fields_of(given, _RESPONSE)
        if not given.keys() & _RANGE.keys():
            return rollback_of_all(found["write_pointer"])
        for name in _RANGE:
            if name not in given:
                raise MalformedBody(f"{name} is missing")
        return PublishResponse(**found)

    def encode_poll(self, request: PollRequest) -> bytes:
        """Encode the body of poll, without fields that are not set."""
        found = ((key, getattr(request, name)) for key, (name, _) in _POLL.items())
        out = {key: value for key, value in found if value is not None}
        for key in ("startFrom", "endBefore"):
            if isinstance(out.get(key), bytes):
                out[key] = out[key].hex()
        if request.transaction is not None:
            out["transaction"] = _base64(request.transaction)
        return _dumped(out)

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        out = {key: getattr(response, name) for key, (name, _) in _RESPONSE.items()}
        if options.longs_as_strings and response.write_pointer is not None:
            out["transactionWritePointer"] = str(response.write_pointer)
        return _dumped(out)

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """Encode the answer to a publish without a pointer; only a partial duplicate has ``stored`` and ``dropped``."""
        out = {key: getattr(receipt, name) for key, name in _RECEIPT.items()}
        for key in ("firstId", "lastId"):
            out[key] = None if out[key] is None else out[key].hex()
        for key in ("stored", "dropped"):
            if out[key] is None:
                del out[key]
        return _dumped(out)

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """Encode a complete answer: a list of messages, each with its attributes if it has any."""
        return b"".join(self.page_pieces(page, options))

    def page_pieces(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> Iterator[bytes]:
        """See ``Codec.page_pieces``."""
        written = payload_writer(payload_base64=options.payload_base64)
        attributes = page.attributes
        before = "["
        out: list[str] = []
        bytes_out = 0
        for index, (message_id, payload) in enumerate(messages_of(page)):
            more = ""
            if attributes.get(index):
                more = ',"attributes":' + values.compact(dict(attributes[index]))
            if len(payload) > PIECE_BYTES:
                out.append(f'{before}{{"id":"{message_id.hex()}","payload":')
                yield "".join(out).encode()
                yield from payload_pieces(payload, payload_base64=options.payload_base64)
                out, bytes_out = [more + "}"], 0
            else:
                out.append(f'{before}{{"id":"{message_id.hex()}","payload":{written(payload)}{more}}}')
                bytes_out += len(payload)
                if bytes_out >= PIECE_BYTES or len(out) >= PIECE_MESSAGES:
                    yield "".join(out).encode()
                    out, bytes_out = [], 0
            before = ","
        yield ("".join(out) + ("[]" if before == "[" else "]")).encode()


def _dumped(record: Mapping[str, Any]) -> bytes:
    return values.compact(record).encode()


def _base64(raw: bytes) -> str:
    return b2a_base64(raw, newline=False).decode()


def payload_writer(*, payload_base64: bool) -> Callable[[bytes], str]:
    """Return a function that writes payloads in JSON: as text if they are UTF-8, or always in base64."""
    return _base64_object if payload_base64 else _text_or_base64


def payload_pieces(raw: bytes, *, payload_base64: bool) -> Iterator[bytes]:
    """Yield a long payload in pieces, encoded as by ``payload_writer``; empty pieces while it is checked for UTF-8."""
    texts: list[str] = []
    if not payload_base64:
        decoder = getincrementaldecoder("utf-8")()
        try:
            for piece in cut(raw):
                texts.append(decoder.decode(piece))
                yield b""
            decoder.decode(b"", True)
        except UnicodeDecodeError:
            texts.clear()
    if not texts:
        yield b'{"base64":"'
        # The length of each piece is a multiple of three bytes, so that only the last one is padded.
        yield from (b2a_base64(raw[at : at + _BASE64_PIECE], newline=False) for at in range(0, len(raw), _BASE64_PIECE))
        yield b'"}'
        return
    yield b'"'
    for text in texts:
        yield encode_basestring(text)[1:-1].encode()
    yield b'"'


def text_pieces(text: str) -> Iterator[bytes]:
    """Yield a JSON string; in several pieces if it is long."""
    if len(text) <= PIECE_BYTES:
        yield encode_basestring(text).encode()
        return
    yield b'"'
    for at in range(0, len(text), PIECE_BYTES):
        yield encode_basestring(text[at : at + PIECE_BYTES])[1:-1].encode()
    yield b'"'


def _text_or_base64(raw: bytes) -> str:
    try:
        return encode_basestring(raw.decode())
    except UnicodeDecodeError:
        return _base64_object(raw)


def _base64_object(raw: bytes) -> str:
    return f'{{"base64":"{_base64(raw)}"}}'
