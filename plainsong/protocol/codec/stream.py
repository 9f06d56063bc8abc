"""The codec of publish streams: requests and answers are msgpack arrays, any number of them in one message.

    request   [n, {"messages": [bin, …], …}]     a publish, with the fields and names of version 2
    answer    [n, status, {"firstId": bin, …}]   its receipt, its PublishResponse, or the problem

``n`` is the sender's number for a request, 0 to 2^63-1; the answer repeats it. A request never continues in the next
message. Most requests are *singles*: one payload and nothing else. They are decoded in runs: a run of singles is stored
as one request, but each single gets its own answer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.base import MAX_MESSAGES
from plainsong.protocol.errors import MalformedBody, PlainsongError
from plainsong.protocol.ids import consecutive_ids
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong.protocol.requests import PublishResponse, Receipt

MAX_NUMBER = (1 << 63) - 1
#: The most requests in one run, which a topic receives together.
MAX_RUN = 1 << 14
#: Messages up to this size share one decoder and its buffer.
_SMALL_BYTES = 1 << 17
_END = msgpack.packb(None)
_CUT = object()
#: The largest map, far above what clients send: fields, or attributes of one message.
_MAX_MAP = 1 << 12


class Singles(NamedTuple):
    """Requests of one message and no other field, in order."""

    numbers: list[int]
    payloads: list[bytes]


class Whole(NamedTuple):
    """A request of any other kind."""

    number: int
    request: PublishRequest


class Refused(NamedTuple):
    """A request with invalid fields: it does not happen, and reading continues with the next one."""

    number: int
    error: PlainsongError


Part = Singles | Whole | Refused


def _binary(value: Any, name: str) -> bytes:
    return value if type(value) is bytes else values.refuse(name, value, "bytes")


_NULL_INT = values.nullable(values.int32)
_NULL_LONG = values.nullable(values.int64)
_NULL_TEXT = values.nullable(values.text)
_FIELDS: Mapping[str, tuple[str, values.Kind]] = {
    "transactionWritePointer": ("write_pointer", _NULL_LONG),
    "messages": ("messages", values.list_of(_binary)),
    "ttlSeconds": ("ttl_s", _NULL_INT),
    "producer": ("producer", _NULL_TEXT),
    "producerEpoch": ("producer_epoch", _NULL_LONG),
    "generation": ("generation", _NULL_INT),
    "sequenceIds": ("sequence_ids", values.nullable(values.list_of(values.int64))),
    "atomic": ("atomic", values.boolean),
    "routingKey": ("routing_key", _NULL_TEXT),
    "segment": ("segment", _NULL_TEXT),
    "segments": ("segments", values.nullable(values.list_of(values.text))),
    "messageTtlsSeconds": ("message_ttls_s", values.nullable(values.list_of(_NULL_INT))),
    "attributes": ("attributes", values.nullable(values.list_of(values.strings))),
}


class RequestReader:
    """Reads the requests of one stream, message by message.

    A key must not occur twice in a map, although msgpack allows it. Checking the keys takes a tenth of the total time of
    a single, so the checks begin with the first map of more than one key; a stream of singles has no such map.
    """

    __slots__ = ("_plain", "_shared")

    def __init__(self) -> None:
        self._plain = True
        self._shared = _unpacker(_SMALL_BYTES, max_map_len=1)

    def read(self, message: bytes) -> tuple[list[Part], MalformedBody | None]:
        """Decode the requests of a message. After an error, the rest of the stream must not be read.

        Returns:
          the requests before the error, and the error; None without an error.
        """
        if self._plain:
            shared = len(message) <= _SMALL_BYTES
            found = self._read(message, self._shared if shared else _unpacker(len(message), max_map_len=1))
            if found is not None:
                return found
            self._plain = False
            self._shared = _unpacker(_SMALL_BYTES, object_pairs_hook=_without_doubles)
        shared = len(message) <= _SMALL_BYTES
        unpacker = self._shared if shared else _unpacker(len(message), object_pairs_hook=_without_doubles)
        found = self._read(message, unpacker)
        assert found is not None  # None is returned only while keys are not checked
        return found

    def _read(self, message: bytes, unpacker: Any) -> tuple[list[Part], MalformedBody | None] | None:
        """Like ``read``; None if keys are not checked yet, and a map has more than one key or msgpack is invalid."""
        parts: list[Part] = []
        numbers: list[int] = []
        payloads: list[bytes] = []
        try:
            unpacker.feed(message)
            for entry in unpacker:
                if type(entry) is not list or len(entry) != 2:
                    raise MalformedBody("a request is an array of its number and a map of fields")
                number, fields = entry
                if type(number) is not int or not 0 <= number <= MAX_NUMBER or type(fields) is not dict:
                    raise MalformedBody("a request is an array of its number (0 to 2^63-1) and a map of fields")
                if len(fields) == 1 and len(numbers) < MAX_RUN:
                    given = fields.get("messages")
                    if type(given) is list and len(given) == 1 and type(given[0]) is bytes:
                        if not numbers:
                            parts.append(Singles(numbers, payloads))
                        numbers.append(number)
                        payloads.append(given[0])
                        continue
                numbers, payloads = [], []
                parts.append(_whole(number, fields))
            if not _is_whole(unpacker):
                raise MalformedBody("the message ends within a request")
        except MalformedBody as fault:
            return parts, fault
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as broken:
            if self._plain:
                return None
            # Only the name of the error: the library's message may quote the request.
            return parts, MalformedBody(
                f"invalid msgpack after request {_count(parts)} of the message", hint=_said(broken)
            )
        return parts, None


def _is_whole(unpacker: Any) -> bool:
    """True if the message ended between two values: only then is the next value fed decoded as a separate value."""
    unpacker.feed(_END)
    return next(unpacker, _CUT) is None


def _unpacker(size: int, *, max_map_len: int = _MAX_MAP, **more: Any) -> Any:
    return msgpack.Unpacker(
        max_buffer_size=size + 2 * len(_END),
        max_array_len=min(MAX_MESSAGES, max(size, 16)),
        max_map_len=max_map_len,
        max_ext_len=0,
        **more,
    )


def _without_doubles(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a map. Raises MalformedBody: a key occurs twice, and two readers could use different values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MalformedBody("a key of a map occurs twice")
    return found


def _whole(number: int, fields: dict[str, Any]) -> Part:
    try:
        found = values.fields_of(fields, _FIELDS)
        found.setdefault("messages", [])
        request = PublishRequest(**found)
    except PlainsongError as error:
        return Refused(number, error)
    if len(fields) == 1 and len(request.messages) == 1:  # the run before it was full
        return Singles([number], list(request.messages))
    return Whole(number, request)


def _count(parts: Iterable[Part]) -> int:
    return sum(len(part.numbers) if isinstance(part, Singles) else 1 for part in parts)


def _said(broken: Exception) -> str:
    return type(broken).__name__


# --- answers ---------------------------------------------------------------------------------------

_packed = msgpack.Packer().pack


def encode_receipts(numbers: Sequence[int], receipt: Receipt) -> bytes:
    """Encode the answers to singles that were stored as one request, from the receipt of that request."""
    assert receipt.first_id is not None  # singles have no producer, so no duplicates
    tail = b"\xaageneration" + _packed(receipt.generation)
    ids = consecutive_ids(receipt.first_id, len(numbers))
    return b"".join(
        [
            b"\x93%b\xcc\xc8\x82\xa7firstId\xc4\x14%b%b" % (_packed(number), message_id, tail)
            for number, message_id in zip(numbers, ids, strict=True)
        ]
    )


def encode_receipt(number: int, receipt: Receipt) -> bytes:
    """Encode an answer without a write pointer. Default values are left out; ``lastId`` defaults to ``firstId``."""
    fields: dict[str, Any] = {"firstId": receipt.first_id}
    if receipt.last_id != receipt.first_id:
        fields["lastId"] = receipt.last_id
    fields["generation"] = receipt.generation
    more = {
        "duplicate": receipt.duplicate or None,
        "deduplicated": receipt.deduplicated or None,
        "lastSequenceId": receipt.last_sequence_id,
        "stored": receipt.stored,
        "dropped": receipt.dropped,
    }
    fields.update((key, value) for key, value in more.items() if value is not None)
    return _answer(number, 200, fields)


def encode_response(number: int, response: PublishResponse) -> bytes:
    """Encode an answer to a request with a write pointer."""
    fields: dict[str, Any] = {
        "transactionWritePointer": response.write_pointer,
        "startTimestamp": response.start_timestamp_ms,
        "startSequenceId": response.start_sequence_id,
        "endTimestamp": response.end_timestamp_ms,
        "endSequenceId": response.end_sequence_id,
    }
    if response.duplicate:
        fields["duplicate"] = True
    return _answer(number, 200, fields)


def encode_problem(number: int, status: int, problem: Mapping[str, Any]) -> bytes:
    """Encode an answer to a request that was refused or failed; ``problem`` has the fields of its problem+json."""
    return _answer(number, status, problem)


def _answer(number: int, status: int, fields: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb([number, status, fields], unicode_errors="replace")
    return packed


# --- the sender's side -----------------------------------------------------------------------------

_SINGLE = b"\x81\xa8messages\x91"
_SHORT = [_SINGLE + struct.pack(">BB", 0xC4, size) for size in range(256)]
_SET = [(key, name) for key, (name, _) in _FIELDS.items() if name != "messages"]


def encode_single(number: int, payload: bytes) -> bytes:
    """Encode a request of one message and no other field."""
    size = len(payload)
    if size < 256:
        return b"\x92%b%b%b" % (_packed(number), _SHORT[size], payload)
    head = struct.pack(">BH", 0xC5, size) if size < 65536 else struct.pack(">BI", 0xC6, size)
    return b"".join((b"\x92", _packed(number), _SINGLE, head, payload))


def encode_request(number: int, request: PublishRequest) -> bytes:
    """Encode any request, without fields that are not set."""
    fields: dict[str, Any] = {"messages": list(request.messages)}
    for key, name in _SET:
        value = getattr(request, name)
        if value is not None and value is not False:
            fields[key] = value
    packed: bytes = msgpack.packb([number, fields])
    return packed


def decode_answers(message: bytes) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the number, status and fields of each answer in a message. Raises MalformedBody."""
    unpacker = _unpacker(len(message))
    try:
        unpacker.feed(message)
        answers = [(number, status, fields) for number, status, fields in unpacker]
        whole = _is_whole(unpacker)
    except (TypeError, ValueError, RecursionError, msgpack.exceptions.UnpackException) as broken:
        raise MalformedBody("the answers of a stream cannot be read", hint=_said(broken)) from None
    if not whole:
        raise MalformedBody("a message of a stream ends within an answer")
    return answers
