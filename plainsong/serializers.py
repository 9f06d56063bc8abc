"""Serializers: pairs of functions that encode values as payloads and decode them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from plainsong.errors import NotEncodable
from plainsong.loading import load
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable


if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    #: The type of values; bare ``Message`` means ``Message[Any]``.
    V = DefaultTypeVar("V", default=Any)
else:
    V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Serializer(Generic[V]):
    """``encode`` turns a value into bytes, ``decode`` bytes into a value. Both may raise anything."""

    encode: Callable[[V], bytes]
    decode: Callable[[bytes], V]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """``message.value`` if the serializer failed: the bytes and the error, so that a loop can continue."""

    payload: bytes
    error: Exception


#: The forms of the ``serializer`` argument: a Serializer, a pair of functions, ``bytes``, ``str``, a dataclass, or None.
SerializerLike: TypeAlias = "Serializer[Any] | tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | type | None"
#: The same for values of one type.
SerializerOf: TypeAlias = "Serializer[V] | tuple[Callable[[Any], bytes], Callable[[bytes], V]] | type[V]"


def _bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"payload must be bytes, got {type(value).__name__}")


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"payload must be str, got {type(value).__name__}")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


#: Payloads unchanged; refuses anything but bytes.
BYTES: Serializer[bytes] = Serializer(_bytes, bytes)
#: ``str`` as UTF-8.
TEXT: Serializer[str] = Serializer(_text, bytes.decode)
#: Any JSON value, without NaN and infinities.
JSON: Serializer[Any] = Serializer(_json, json.loads)


def dataclass_json(kind: type[V]) -> Serializer[V]:
    """Instances of a dataclass as JSON objects, encoded with the library msgspec (``plainsong-client[dataclasses]``).

    Fields may be nested dataclasses, lists, dicts, datetimes, Enums, UUIDs, Decimals and any other type that msgspec
    supports. Encoding refuses a value with a field that does not match its declared type; decoding also refuses unknown
    and missing fields.
    Raises InvalidParameter when ``kind`` is not a dataclass, or msgspec is not installed.
    """
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InvalidParameter(
            f"{kind!r} is not a dataclass", hint="decorate it with @dataclass, or give two functions"
        )
    try:
        load("msgspec")
        import msgspec  # here, since most programs need none
    except ImportError as error:
        raise InvalidParameter(
            "dataclasses need the package msgspec", hint="pip install 'plainsong-client[dataclasses]'"
        ) from error
    names = {field.name for field in dataclasses.fields(kind)}

    def checked(fields: Any) -> V:
        if not isinstance(fields, dict):
            raise TypeError(f"expected an object, got {type(fields).__name__}")
        if unknown := fields.keys() - names:
            raise TypeError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
        value: V = msgspec.convert(fields, kind)
        return value

    def encode(value: V) -> bytes:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        payload = msgspec.json.encode(value)
        checked(msgspec.json.decode(payload))  # msgspec does not check types when it encodes
        return payload

    def decode(payload: bytes) -> V:
        return checked(msgspec.json.decode(payload))

    return Serializer(encode, decode)


def serializer_for(given: SerializerLike) -> Serializer[Any]:
    """The serializer that ``given`` stands for; None: bytes. Raises InvalidParameter for anything else."""
    if given is None or given is bytes:
        return BYTES
    if isinstance(given, Serializer):
        return given
    if given is str:
        return TEXT
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return Serializer(*given)
    if isinstance(given, type):
        return dataclass_json(given)
    raise InvalidParameter(
        f"{given!r} is not a serializer", hint="use bytes, str, JSON, a dataclass, or (encode, decode)"
    )


def encoded(serializer: Serializer[Any], value: Any) -> bytes:
    """The payload of ``value``. Raises NotEncodable: nothing happened."""
    try:
        payload = serializer.encode(value)
    except Exception as error:
        detail = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        raise NotEncodable(
            detail, hint="give another serializer=: bytes, str, JSON, a dataclass, or two functions"
        ) from error
    if not isinstance(payload, bytes):
        raise NotEncodable(
            f"the serializer returned {type(payload).__name__}, not bytes", hint="its first function must return bytes"
        )
    return payload
