"""The calls of Tephra's transaction service: methods, values, and messages of Thrift's binary protocol.

Clients of releases 0.4 to 0.16 are served: newer ones call the methods that take a client id and throw, older ones the
others. Arguments have the field ids 1, 2, …; a result has id 0, and the nth error that the method declares has id n.
"""

from __future__ import annotations

from struct import Struct, pack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.tephra.thrift import BOOL, I32, I64, SET, STOP, STRING, STRUCT, MalformedThrift, ThriftReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.transactions.transaction import Transaction


class Kind(NamedTuple):
    """The kind of an argument or a result."""

    wire: int
    """Its type on the wire."""
    read: Callable[[ThriftReader], Any]
    """Read a value. Raises MalformedThrift."""
    put: Callable[[Any], bytes]
    """Encode a value."""


def _put_octets(value: bytes) -> bytes:
    return pack(">i", len(value)) + value


def _put_text(value: str) -> bytes:
    return _put_octets(value.encode(errors="replace"))


def _put_bool(value: bool) -> bytes:
    return b"\1" if value else b"\0"


def _put_keys(keys: Sequence[bytes]) -> bytes:
    return pack(">Bi", STRING, len(keys)) + b"".join(map(_put_octets, keys))


def _read_boxed(reader: ThriftReader) -> bool:
    found: bool = read_fields(reader, {1: BOOLEAN}).get(1, False)
    return found


def _read_transaction(reader: ThriftReader) -> Transaction:
    start = reader.at
    reader.skip(STRUCT)
    try:
        return decode_transaction(reader.data[start : reader.at])
    except MalformedTransaction as error:
        raise MalformedThrift(error.detail) from None


_END = bytes([STOP])
BOOLEAN = Kind(BOOL, ThriftReader.boolean, _put_bool)
#: A struct around one bool, for clients that cannot distinguish false from a missing value.
BOXED_BOOLEAN = Kind(STRUCT, _read_boxed, lambda value: put_field(1, BOOLEAN, value) + _END)
INT = Kind(I32, ThriftReader.i32, Struct(">i").pack)
LONG = Kind(I64, ThriftReader.i64, Struct(">q").pack)
TEXT = Kind(STRING, ThriftReader.text, _put_text)
BINARY = Kind(STRING, ThriftReader.octets, _put_octets)
#: A set of byte strings: the keys that a transaction changed.
KEYS = Kind(SET, ThriftReader.binaries, _put_keys)
#: A set of 64-bit numbers.
POINTERS = Kind(SET, ThriftReader.longs, lambda value: pack(f">Bi{len(value)}q", I64, len(value), *value))
TRANSACTION = Kind(STRUCT, _read_transaction, encode_transaction)


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
    """Transaction id, the key, and the other transaction's client id or None."""

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
    result: Kind | None
    """None if it has none."""
    throws: tuple[type[TephraError], ...] = ()


METHODS: dict[str, Method] = {
    "startLong": Method((), TRANSACTION),
    "startLongClientId": Method((TEXT,), TRANSACTION, (TephraGeneric,)),
    "startShort": Method((), TRANSACTION),
    "startShortClientId": Method((TEXT,), TRANSACTION, (TephraGeneric,)),
    "startShortTimeout": Method((INT,), TRANSACTION),
    "startShortWithTimeout": Method((INT,), TRANSACTION, (TephraGeneric,)),
    "startShortWithClientIdAndTimeOut": Method((TEXT, INT), TRANSACTION, (TephraGeneric,)),
    "canCommitTx": Method((TRANSACTION, KEYS), BOXED_BOOLEAN, (TephraNotInProgress,)),
    "canCommitOrThrow": Method((LONG, KEYS), None, (TephraNotInProgress, TephraConflict, TephraGeneric)),
    "commitTx": Method((TRANSACTION,), BOXED_BOOLEAN, (TephraNotInProgress,)),
    "commitOrThrow": Method((LONG, LONG), None, (TephraNotInProgress, TephraConflict, TephraGeneric)),
    "abortTx": Method((TRANSACTION,), None),
    "invalidateTx": Method((LONG,), BOOLEAN),
    "checkpoint": Method((TRANSACTION,), TRANSACTION, (TephraNotInProgress,)),
    "getSnapshot": Method((), BINARY, (TephraCouldNotTakeSnapshot,)),
    "resetState": Method((), None),
    "status": Method((), TEXT),
    "invalidTxSize": Method((), INT),
    "truncateInvalidTx": Method((POINTERS,), BOXED_BOOLEAN),
    "truncateInvalidTxBefore": Method((LONG,), BOXED_BOOLEAN, (TephraInvalidTruncateTime,)),
    "pruneNow": Method((), None),
}

#: The kinds of each method's arguments, by field id.
_PLACES = {name: dict(enumerate(method.args, 1)) for name, method in METHODS.items()}


# --- arguments and results as fields of Thrift structs ---------------------------------------------


def read_fields(reader: ThriftReader, kinds: dict[int, Kind]) -> dict[int, Any]:
    """The fields of a struct by id. Skips fields not in ``kinds`` or of another type. Raises MalformedThrift."""
    found: dict[int, Any] = {}
    while (field := reader.field()) is not None:
        wire, place = field
        kind = kinds.get(place)
        if kind is None or wire != kind.wire:
            reader.skip(wire)
        else:
            found[place] = kind.read(reader)
    return found


def put_field(place: int, kind: Kind, value: Any) -> bytes:
    """A field with a value of a kind."""
    return pack(">Bh", kind.wire, place) + kind.put(value)


# --- messages of Thrift's strict binary protocol ----------------------------------------------------
#
#     version and type:i32   method   sequence id:i32   struct of arguments, or of one result
#
# The version is 80 01; types are 1 call, 2 reply, 3 exception. A reply's struct has the result in field 0, or the nth
# declared error in field n; an exception's struct has a text and a number. ``ThriftFrames`` handles the length that
# precedes each message.


_VERSION = 0x8001
_CALL, _REPLY, _EXCEPTION = 1, 2, 3
_MAX_NAME_BYTES = 256
#: Numbers of the exceptions that methods do not declare.
UNKNOWN_METHOD, INTERNAL_ERROR, PROTOCOL_ERROR = 1, 6, 7


class Call(NamedTuple):
    """A client's call: its arguments in order, None for a text that the client left out."""

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
      MalformedThrift: the message is not a call; the connection has to end.
    """
    reader = ThriftReader(message)
    name, sequence_id = _begin(reader, _CALL)
    places = _PLACES.get(name)
    if places is None:
        raise RefusedCall(Call(name, sequence_id, ()), UNKNOWN_METHOD, f"Invalid method name: '{name}'")
    try:
        found = read_fields(reader, places)
    except MalformedThrift as error:
        raise RefusedCall(Call(name, sequence_id, ()), PROTOCOL_ERROR, f"{name}: {error}") from None
    args = []
    for place, kind in places.items():
        value = found.get(place)
        if value is None and kind is not TEXT:
            raise RefusedCall(Call(name, sequence_id, ()), PROTOCOL_ERROR, f"{name}: argument {place} is missing")
        args.append(value)
    return Call(name, sequence_id, tuple(args))


def encode_result(call: Call, value: Any) -> bytes:
    """The reply with a result; ``value`` is of the method's kind, None for void."""
    kind = METHODS[call.method].result
    field = b"" if kind is None else put_field(0, kind, value)
    return _head(_REPLY, call.method, call.sequence_id) + field + _END


def encode_error(call: Call, error: TephraError) -> bytes:
    """The reply with an error that the method declares; another error becomes an exception, as in Tephra."""
    throws = METHODS[call.method].throws
    if type(error) not in throws:
        return encode_failure(call, INTERNAL_ERROR, f"Internal error processing {call.method}: {error.message}")
    place = throws.index(type(error)) + 1
    values = b"".join(
        put_field(number, LONG if isinstance(value, int) else TEXT, value)
        for number, value in enumerate(error.args, 1)
        if value is not None
    )
    return _head(_REPLY, call.method, call.sequence_id) + pack(">Bh", STRUCT, place) + values + _END + _END


def encode_failure(call: Call, number: int, message: str) -> bytes:
    """The exception that answers a call which was refused, or failed with an undeclared error."""
    fields = put_field(1, TEXT, message) + put_field(2, INT, number)
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
        raise MalformedThrift(f"an answer to {name} {found_id}, expected {method} {sequence_id}")
    if message[3] == _EXCEPTION:
        found = read_fields(reader, {1: TEXT, 2: INT})
        raise ApplicationError(found.get(2, 0), found.get(1, ""))
    spec = METHODS[method]
    while (field := reader.field()) is not None:
        kind, place = field
        if place == 0 and spec.result is not None and kind == spec.result.wire:
            return spec.result.read(reader)
        if kind == STRUCT and 1 <= place <= len(spec.throws):
            raise spec.throws[place - 1](*_error_values(reader))
        reader.skip(kind)
    if spec.result is not None:
        raise MalformedThrift(f"the answer to {method} has no result")
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


_START = Struct(">HHi")


def _head(kind: int, name: str, sequence_id: int) -> bytes:
    raw = name.encode()
    return _START.pack(_VERSION, kind, len(raw)) + raw + INT.put(sequence_id)


def _begin(reader: ThriftReader, *kinds: int) -> tuple[str, int]:
    if len(reader.data) < _START.size:
        raise MalformedThrift(f"a message of {len(reader.data)} bytes")
    version, kind, size = _START.unpack_from(reader.data)
    if version != _VERSION or kind not in kinds:
        raise MalformedThrift(f"the message begins with {version:04x}{kind:04x}")
    if not 0 <= size <= _MAX_NAME_BYTES:
        raise MalformedThrift(f"a method name of {size} bytes")
    reader.at = _START.size + size
    sequence_id = reader.i32()
    try:
        return reader.data[_START.size : _START.size + size].decode(), sequence_id
    except UnicodeDecodeError:
        raise MalformedThrift("a method name in invalid UTF-8") from None
