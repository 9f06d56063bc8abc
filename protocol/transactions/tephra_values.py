"""Arguments and results of Tephra's methods as fields of Thrift structs, and back, by their kind."""

from __future__ import annotations

from struct import pack
from typing import Any

from protocol.errors import MalformedTransaction
from protocol.transactions.codec import decode_transaction, encode_transaction
from protocol.transactions.tephra_idl import Kind
from protocol.transactions.thrift import BOOL, I32, I64, SET, STOP, STRING, STRUCT, MalformedThrift, Reader

#: The types on the wire; void has none.
WIRE = {
    Kind.BOOL: BOOL,
    Kind.BOXED_BOOL: STRUCT,
    Kind.I32: I32,
    Kind.I64: I64,
    Kind.TEXT: STRING,
    Kind.BINARY: STRING,
    Kind.KEYS: SET,
    Kind.POINTERS: SET,
    Kind.TRANSACTION: STRUCT,
}


def read_fields(reader: Reader, kinds: dict[int, Kind]) -> dict[int, Any]:
    """The fields of a struct by id; those not in ``kinds``, or of another type, are left out. Raises MalformedThrift."""
    found: dict[int, Any] = {}
    while (field := reader.field()) is not None:
        wire, place = field
        kind = kinds.get(place)
        if kind is None or wire != WIRE[kind]:
            reader.skip(wire)
        else:
            found[place] = read_value(reader, kind)
    return found


def read_value(reader: Reader, kind: Kind) -> Any:
    """One value: bool, int, str, bytes, a tuple of bytes or ints, or a ``Transaction``. Raises MalformedThrift."""
    match kind:
        case Kind.BOOL:
            return reader.boolean()
        case Kind.BOXED_BOOL:
            return read_fields(reader, {1: Kind.BOOL}).get(1, False)
        case Kind.I32:
            return reader.i32()
        case Kind.I64:
            return reader.i64()
        case Kind.TEXT:
            return reader.text()
        case Kind.BINARY:
            return reader.octets()
        case Kind.KEYS:
            return reader.binaries()
        case Kind.POINTERS:
            return reader.longs()
        case Kind.TRANSACTION:
            return _transaction(reader)
    raise AssertionError(f"no value of kind {kind}")


def _transaction(reader: Reader) -> Any:
    start = reader.at
    reader.skip(STRUCT)
    try:
        return decode_transaction(reader.data[start : reader.at])
    except MalformedTransaction as error:
        raise MalformedThrift(error.detail) from None


def put_field(place: int, kind: Kind, value: Any) -> bytes:
    """A field with what ``read_value`` would read."""
    return pack(">Bh", WIRE[kind], place) + put_value(kind, value)


def put_value(kind: Kind, value: Any) -> bytes:
    """The value alone."""
    match kind:
        case Kind.BOOL:
            return b"\1" if value else b"\0"
        case Kind.BOXED_BOOL:
            return put_field(1, Kind.BOOL, value) + bytes([STOP])
        case Kind.I32:
            return pack(">i", value)
        case Kind.I64:
            return pack(">q", value)
        case Kind.TEXT:
            raw: bytes = value.encode(errors="replace")
            return pack(">i", len(raw)) + raw
        case Kind.BINARY:
            return pack(f">i{len(value)}s", len(value), value)
        case Kind.KEYS:
            return pack(">Bi", STRING, len(value)) + b"".join(put_value(Kind.BINARY, key) for key in value)
        case Kind.POINTERS:
            return pack(f">Bi{len(value)}q", I64, len(value), *value)
        case Kind.TRANSACTION:
            return encode_transaction(value)
    raise AssertionError(f"no value of kind {kind}")
