"""The calls of Tephra's transaction service: methods, values, and messages of Thrift's binary protocol.

Clients of releases 0.4 to 0.16 are served: newer ones call the methods that take a client id and throw, older ones
the others. Arguments have the field ids 1, 2, …; a result has id 0, a declared error its place among the method's
errors.
"""

from __future__ import annotations

from enum import Enum, auto
from struct import pack
from typing import Any, ClassVar, NamedTuple

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.tephra.thrift import BOOL, I32, I64, SET, STOP, STRING, STRUCT, MalformedThrift, ThriftReader


class Kind(Enum):
    """The kind of an argument or a result."""

    VOID = auto()
    BOOL = auto()
    #: A struct around one bool, for clients that cannot distinguish false from a missing value.
    BOXED_BOOL = auto()
    I32 = auto()
    I64 = auto()
    TEXT = auto()
    BINARY = auto()
    #: A set of byte strings: the keys that a transaction changed.
    KEYS = auto()
    #: A set of 64-bit numbers.
    POINTERS = auto()
    TRANSACTION = auto()


class TephraError(Exception):
    """An error of Tephra's interface; its arguments are the fields of the struct, ids 1, 2, …, in order."""

    name: ClassVar[str]

    @property
    def message(self) -> str:
        """The text of the error."""
        return " ".join(str(value) for value in self.args if value is not None)


class TephraNotInProgress(TephraError):
    """Text: the transaction is not, or no longer, in progress."""

    name = "TTransactionNotInProgressException"


class TephraConflict(TephraError):
    """Transaction id, the key, the other's client id or None."""

    name = "TTransactionConflictException"


class TephraGeneric(TephraError):
    """Text, and the name of the Java class that clients throw."""

    name = "TGenericException"


class TephraCouldNotTakeSnapshot(TephraError):
    """Text."""

    name = "TTransactionCouldNotTakeSnapshotException"


class TephraInvalidTruncateTime(TephraError):
    """Text: a transaction that began before the time is in progress."""

    name = "TInvalidTruncateTimeException"


ILLEGAL_ARGUMENT = "java.lang.IllegalArgumentException"
TOO_LARGE = "org.apache.tephra.TransactionSizeException"


class Method(NamedTuple):
    """One method: kinds of its arguments and its result, and the errors it declares."""

    args: tuple[Kind, ...]
    result: Kind
    throws: tuple[type[TephraError], ...] = ()


_TX = Kind.TRANSACTION
METHODS: dict[str, Method] = {
    "startLong": Method((), _TX),
    "startLongClientId": Method((Kind.TEXT,), _TX, (TephraGeneric,)),
    "startShort": Method((), _TX),
    "startShortClientId": Method((Kind.TEXT,), _TX, (TephraGeneric,)),
    "startShortTimeout": Method((Kind.I32,), _TX),
    "startShortWithTimeout": Method((Kind.I32,), _TX, (TephraGeneric,)),
    "startShortWithClientIdAndTimeOut": Method((Kind.TEXT, Kind.I32), _TX, (TephraGeneric,)),
    "canCommitTx": Method((_TX, Kind.KEYS), Kind.BOXED_BOOL, (TephraNotInProgress,)),
    "canCommitOrThrow": Method((Kind.I64, Kind.KEYS), Kind.VOID, (TephraNotInProgress, TephraConflict, TephraGeneric)),
    "commitTx": Method((_TX,), Kind.BOXED_BOOL, (TephraNotInProgress,)),
    "commitOrThrow": Method((Kind.I64, Kind.I64), Kind.VOID, (TephraNotInProgress, TephraConflict, TephraGeneric)),
    "abortTx": Method((_TX,), Kind.VOID),
    "invalidateTx": Method((Kind.I64,), Kind.BOOL),
    "checkpoint": Method((_TX,), _TX, (TephraNotInProgress,)),
    "getSnapshot": Method((), Kind.BINARY, (TephraCouldNotTakeSnapshot,)),
    "resetState": Method((), Kind.VOID),
    "status": Method((), Kind.TEXT),
    "invalidTxSize": Method((), Kind.I32),
    "truncateInvalidTx": Method((Kind.POINTERS,), Kind.BOXED_BOOL),
    "truncateInvalidTxBefore": Method((Kind.I64,), Kind.BOXED_BOOL, (TephraInvalidTruncateTime,)),
    "pruneNow": Method((), Kind.VOID),
}

#: The kinds of each method's arguments, by field id.
_PLACES = {name: dict(enumerate(method.args, 1)) for name, method in METHODS.items()}


# --- values: arguments and results as fields of Thrift structs --------------------------------------


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


def read_fields(reader: ThriftReader, kinds: dict[int, Kind]) -> dict[int, Any]:
    """The fields of a struct by id, without those not in ``kinds`` or of another type. Raises MalformedThrift."""
    found: dict[int, Any] = {}
    while (field := reader.field()) is not None:
        wire, place = field
        kind = kinds.get(place)
        if kind is None or wire != WIRE[kind]:
            reader.skip(wire)
        else:
            found[place] = read_value(reader, kind)
    return found


def read_value(reader: ThriftReader, kind: Kind) -> Any:
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
    raise AssertionError(f"a value of unknown kind {kind}")


def _transaction(reader: ThriftReader) -> Any:
    start = reader.at
    reader.skip(STRUCT)
    try:
        return decode_transaction(reader.data[start : reader.at])
    except MalformedTransaction as error:
        raise MalformedThrift(error.detail) from None


def put_field(place: int, kind: Kind, value: Any) -> bytes:
    """A field with a value of a kind."""
    return pack(">Bh", WIRE[kind], place) + put_value(kind, value)


def put_value(kind: Kind, value: Any) -> bytes:
    """The value of a field, as ``read_value`` reads it."""
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
    raise AssertionError(f"a value of unknown kind {kind}")


# --- messages of Thrift's strict binary protocol ----------------------------------------------------
#
#     version and type:i32   method   sequence id:i32   struct of arguments, or of one result
#
# The version is 80 01; types are 1 call, 2 reply, 3 exception. The struct of a reply has the result in field 0, or a
# declared error in the field of its place; that of an exception has a text and a number. ``ThriftFrames`` handles the
# lengths before messages.


_VERSION = 0x8001
_CALL, _REPLY, _EXCEPTION = 1, 2, 3
_MAX_NAME_BYTES = 256
#: Numbers of exceptions that a method does not declare.
UNKNOWN_METHOD, INTERNAL_ERROR, PROTOCOL_ERROR = 1, 6, 7
_END = bytes([STOP])


class Call(NamedTuple):
    """A client's call: arguments in order; None for a text that it left out."""

    method: str
    sequence_id: int
    args: tuple[Any, ...]


class ApplicationError(Exception):
    """An exception that the method does not declare: its number and a text."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.message = message


class RefusedCall(ApplicationError):
    """A call that is refused with an answer; ``call`` has the fields that could be decoded."""

    def __init__(self, call: Call, number: int, message: str) -> None:
        super().__init__(number, message)
        self.call = call


# --- the server's side ---------------------------------------------------------------------------


def decode_call(message: bytes) -> Call:
    """The call in a message.

    Raises:
      RefusedCall: the method is unknown, or its arguments are malformed; ``encode_failure`` answers it.
      MalformedThrift: the message is no call; the connection has to end.
    """
    reader = ThriftReader(message)
    name, sequence_id = _begin(reader, _CALL)
    method = METHODS.get(name)
    call = Call(name, sequence_id, ())
    if method is None:
        raise RefusedCall(call, UNKNOWN_METHOD, f"Invalid method name: '{name}'")
    try:
        found = read_fields(reader, _PLACES[name])
    except MalformedThrift as error:
        raise RefusedCall(call, PROTOCOL_ERROR, f"{name}: {error}") from None
    for place, kind in enumerate(method.args, 1):
        if place not in found and kind is not Kind.TEXT:
            raise RefusedCall(call, PROTOCOL_ERROR, f"{name}: argument {place} is missing")
    return call._replace(args=tuple(found.get(place) for place in range(1, len(method.args) + 1)))


def encode_result(call: Call, value: Any) -> bytes:
    """The reply with a result; ``value`` is of the method's kind, None for void."""
    kind = METHODS[call.method].result
    field = b"" if kind is Kind.VOID else put_field(0, kind, value)
    return _head(_REPLY, call.method, call.sequence_id) + field + _END


def encode_error(call: Call, error: TephraError) -> bytes:
    """The reply with an error that the method declares; another error becomes an exception, as in Tephra."""
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
    """The exception that answers a call which was refused, or failed with an undeclared error."""
    fields = put_field(1, Kind.TEXT, message) + put_field(2, Kind.I32, number)
    return _head(_EXCEPTION, call.method, call.sequence_id) + fields + _END


# --- the client's side ---------------------------------------------------------------------------


def encode_call(method: str, sequence_id: int, *args: Any) -> bytes:
    """The message of a call; an argument that is None is left out."""
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
      TephraError, ApplicationError: the server answered with an error.
      MalformedThrift: the message is not an answer to that call.
    """
    reader = ThriftReader(message)
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


def _error_values(reader: ThriftReader) -> list[int | str]:
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


def _begin(reader: ThriftReader, *kinds: int) -> tuple[str, int]:
    word = reader.i32() & 0xFFFFFFFF
    if word >> 16 != _VERSION or word & 0xFFFF not in kinds:
        raise MalformedThrift(f"a message that begins {word:08x}")
    name = reader.text()
    if len(name) > _MAX_NAME_BYTES:
        raise MalformedThrift(f"a method name of {len(name)} characters")
    return name, reader.i32()
