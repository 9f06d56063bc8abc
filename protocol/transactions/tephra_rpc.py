"""Calls of Tephra's transaction service and their replies, as messages of Thrift's strict binary protocol.

    version and type:i32   method   sequence id:i32   struct of arguments, or of one result

The version is 80 01; types are 1 call, 2 reply, 3 exception. The struct of a reply holds the result in field 0, or
a declared error in the field of its place; that of an exception a text and a number. Lengths before messages are
``thrift_frames``' business.
"""

from __future__ import annotations

from struct import pack
from typing import Any, NamedTuple

from protocol.transactions.tephra_idl import METHODS, Declared, Kind
from protocol.transactions.tephra_values import WIRE, put_field, read_fields, read_value
from protocol.transactions.thrift import I64, STOP, STRING, STRUCT, MalformedThrift, Reader

_VERSION = 0x8001
_CALL, _REPLY, _EXCEPTION = 1, 2, 3
_MAX_NAME_BYTES = 256

#: Numbers of exceptions that are no method's own.
UNKNOWN_METHOD, INTERNAL_ERROR, PROTOCOL_ERROR = 1, 6, 7

_END = bytes([STOP])


class Call(NamedTuple):
    """What a client asks: arguments in order, a text that it left out as None."""

    method: str
    sequence_id: int
    args: tuple[Any, ...]


class ApplicationError(Exception):
    """An exception that is no method's own: its number and a text."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.message = message


class RefusedCall(ApplicationError):
    """A call that is understood well enough to be refused: whose it was."""

    def __init__(self, call: Call, number: int, message: str) -> None:
        super().__init__(number, message)
        self.call = call


# --- the server's side ---------------------------------------------------------------------------


def decode_call(message: bytes) -> Call:
    """What a message asks for.

    Raises:
      RefusedCall: the method is unknown, or its arguments are malformed; ``encode_failure`` answers it.
      MalformedThrift: this is no call; the connection is not worth keeping.
    """
    reader = Reader(message)
    name, sequence_id = _begin(reader, _CALL)
    method = METHODS.get(name)
    call = Call(name, sequence_id, ())
    if method is None:
        raise RefusedCall(call, UNKNOWN_METHOD, f"Invalid method name: '{name}'")
    try:
        found = read_fields(reader, dict(enumerate(method.args, 1)))
    except MalformedThrift as error:
        raise RefusedCall(call, PROTOCOL_ERROR, f"{name}: {error}") from None
    for place, kind in enumerate(method.args, 1):
        if place not in found and kind is not Kind.TEXT:
            raise RefusedCall(call, PROTOCOL_ERROR, f"{name}: argument {place} is missing")
    return call._replace(args=tuple(found.get(place) for place in range(1, len(method.args) + 1)))


def encode_result(call: Call, value: Any) -> bytes:
    """The reply with a result; ``value`` is what the method's kind says, None for void."""
    kind = METHODS[call.method].result
    field = b"" if kind is Kind.VOID else put_field(0, kind, value)
    return _head(_REPLY, call.method, call.sequence_id) + field + _END


def encode_error(call: Call, error: Declared) -> bytes:
    """The reply with an error that the method declares; one that it does not is an exception, as in Tephra."""
    throws = METHODS[call.method].throws
    if type(error) not in throws:
        return encode_failure(call, INTERNAL_ERROR, f"Internal error processing {call.method}: {error.message}")
    place = throws.index(type(error)) + 1
    values = b"".join(
        put_field(number, Kind.I64 if isinstance(value, int) else Kind.TEXT, value)
        for number, value in enumerate(error.args, 1)
        if value is not None
    )
    return _head(_REPLY, call.method, call.sequence_id) + pack(">Bh", STRUCT, place) + values + _END + _END


def encode_failure(call: Call, number: int, message: str) -> bytes:
    """The exception that answers a call which was refused, or failed for a reason the method does not declare."""
    fields = put_field(1, Kind.TEXT, message) + put_field(2, Kind.I32, number)
    return _head(_EXCEPTION, call.method, call.sequence_id) + fields + _END


# --- the client's side ---------------------------------------------------------------------------


def encode_call(method: str, sequence_id: int, *args: Any) -> bytes:
    """The message that asks for a method; an argument that is None is left out."""
    kinds = METHODS[method].args
    fields = (
        put_field(place, kind, value)
        for place, (kind, value) in enumerate(zip(kinds, args, strict=True), 1)
        if value is not None
    )
    return _head(_CALL, method, sequence_id) + b"".join(fields) + _END


def decode_reply(message: bytes, method: str, sequence_id: int) -> Any:
    """The result of a call; None for void.

    Raises:
      Declared, ApplicationError: the server's answer is an error.
      MalformedThrift: this is no answer to that call.
    """
    reader = Reader(message)
    name, found_id = _begin(reader, _REPLY, _EXCEPTION)
    if (name, found_id) != (method, sequence_id):
        raise MalformedThrift(f"an answer to {name} {found_id}, where {method} {sequence_id} is due")
    if message[3] == _EXCEPTION:
        found = read_fields(reader, {1: Kind.TEXT, 2: Kind.I32})
        raise ApplicationError(found.get(2, 0), found.get(1, ""))
    spec = METHODS[method]
    while (field := reader.field()) is not None:
        kind, place = field
        if place == 0 and kind == WIRE.get(spec.result):
            return read_value(reader, spec.result)
        if kind == STRUCT and 1 <= place <= len(spec.throws):
            raise spec.throws[place - 1](*_error_values(reader))
        reader.skip(kind)
    if spec.result is not Kind.VOID:
        raise MalformedThrift(f"{method} answers nothing")
    return None


def _error_values(reader: Reader) -> list[int | str]:
    values: list[int | str] = []
    while (field := reader.field()) is not None:
        if field[0] == I64:
            values.append(reader.i64())
        elif field[0] == STRING:
            values.append(reader.text())
        else:
            reader.skip(field[0])
    return values


# --- messages --------------------------------------------------------------------------------------


def _head(kind: int, name: str, sequence_id: int) -> bytes:
    raw = name.encode()
    return pack(f">HHi{len(raw)}si", _VERSION, kind, len(raw), raw, sequence_id)


def _begin(reader: Reader, *kinds: int) -> tuple[str, int]:
    word = reader.i32() & 0xFFFFFFFF
    if word >> 16 != _VERSION or word & 0xFFFF not in kinds:
        raise MalformedThrift(f"a message that begins {word:08x}")
    name = reader.text()
    if len(name) > _MAX_NAME_BYTES:
        raise MalformedThrift(f"a method name of {len(name)} characters")
    return name, reader.i32()
