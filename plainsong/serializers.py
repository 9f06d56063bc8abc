"""Serializers: pairs of functions that encode values as payloads and decode them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from plainsong.errors import NotEncodable
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Serializer:
    """``encode`` turns a value into bytes, ``decode`` bytes into a value. Both may raise anything."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """``message.value`` if the serializer failed: the bytes and the error, so that a loop can go on."""

    payload: bytes
    error: Exception


#: The forms of the ``serializer`` argument: a Serializer, a pair of functions, ``bytes``, ``str``, a dataclass, or None.
SerializerLike: TypeAlias = "Serializer | tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | type | None"


def _bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a {type(value).__name__} is no bytes; give a serializer")


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a {type(value).__name__} is no str")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


#: Payloads unchanged; refuses anything but bytes.
BYTES = Serializer(_bytes, bytes)
#: ``str`` as UTF-8.
TEXT = Serializer(_text, bytes.decode)
#: Any JSON value; no NaN, no infinities.
JSON = Serializer(_json, json.loads)


def dataclass_json(kind: type) -> Serializer:
    """Instances of a dataclass as JSON objects, nested ones included when writing.

    Reading makes ``kind(**object)``: unknown or missing fields do not decode, nested objects stay dicts.
    Raises InvalidParameter when ``kind`` is no dataclass.
    """
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InvalidParameter(f"{kind!r} is no dataclass", hint="decorate it with @dataclass, or give two functions")

    def encode(value: Any) -> bytes:
        if not isinstance(value, kind):
            raise TypeError(f"a {type(value).__name__} is no {kind.__name__}")
        return _json(dataclasses.asdict(value))

    def decode(payload: bytes) -> Any:
        fields = json.loads(payload)
        if not isinstance(fields, dict):
            raise TypeError(f"a {type(fields).__name__} is no object")
        return kind(**fields)

    return Serializer(encode, decode)


def serializer_for(given: SerializerLike) -> Serializer:
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
    raise InvalidParameter(f"{given!r} is no serializer", hint="use bytes, str, JSON, a dataclass, or (encode, decode)")


def encoded(serializer: Serializer, value: Any) -> bytes:
    """The payload of ``value``. Raises NotEncodable: nothing happened."""
    try:
        payload = serializer.encode(value)
    except Exception as error:
        raise NotEncodable(f"{type(error).__name__}: {error}", hint="choose another serializer") from error
    if not isinstance(payload, bytes):
        raise NotEncodable(f"the serializer made a {type(payload).__name__}", hint="it has to make bytes")
    return payload
