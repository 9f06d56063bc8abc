"""JSON as docs/http.md defines it: parsing, values checked by kind, and positions in a topic.

A *kind* is a function from a decoded value and its name to the value's meaning. A table of kinds describes a record,
and ``fields_of`` reads one. Routes with other bodies use the same kinds.
"""

from __future__ import annotations

import binascii
import json
import re
from codecs import getincrementaldecoder
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from plainsong.protocol.codec.base import MAX_VALUES
from plainsong.protocol.errors import (
    InvalidMessageId,
    InvalidParameter,
    MalformedBody,
    RequestTooLarge,
    UnknownField,
    nearest,
)
from plainsong.protocol.ids import MAX_TIMESTAMP_MS, parse_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Kind = Callable[[Any, str], Any]


#: A large body is scanned and parsed in pieces of this size.
_PIECE_BYTES = 1 << 16
#: Longer bodies are parsed in pieces, which is a little slower.
_AT_ONCE_BYTES = 1 << 20


def _go_on() -> None:
    """Do nothing: no event loop to yield to."""


#: Called between the pieces of a large body. A thread that parses sets it to let the event loop run: the standard
#: library's parser is one call that holds the GIL, for a quarter of a second with a body of 64 MiB.
between_pieces: ContextVar[Callable[[], object]] = ContextVar("between_pieces", default=_go_on)
_SPACE = re.compile(r"[ \t\n\r]*").match
_SPACES = (" ", "\t", "\n", "\r")
#: A list or object that ends within this many characters is parsed in one call.
_WINDOW = 4096
#: First character of a list's entry → its end and the comma after it.
_ENDS = {'"': '",', "{": "},"}
_DIGITS = re.compile(r"-?[0-9]{1,19}\Z")
_NAMES = {
    bool: "a boolean",
    int: "a number",
    float: "a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
}


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is one JSON object.

    Raises:
      MalformedBody: not UTF-8, not JSON, a duplicate key, NaN or Infinity, nested too deeply, or not an object.
      RequestTooLarge: more than ``MAX_VALUES`` values, which would exhaust the memory.
    """
    return as_object(parse_json(body))


def as_object(value: Any) -> dict[str, Any]:
    """Return ``value``, a whole body, if it is an object. Raises MalformedBody."""
    if not isinstance(value, dict):
        raise MalformedBody(f"the body is {kind_of(value)}, not an object", hint='it starts with "{"')
    return value


def parse_json(body: bytes) -> Any:
    """Parse a body that is one JSON value. Raises the same as ``parse_object``."""
    if len(body) > MAX_VALUES and _structure(body) > MAX_VALUES and _values(body) > MAX_VALUES:
        raise RequestTooLarge(f"more than {MAX_VALUES} values", hint="send less at a time")
    text = _decoded(body)
    try:
        if text.startswith("\ufeff"):
            raise json.JSONDecodeError("Unexpected byte order mark", text, 0)
        if len(body) > _AT_ONCE_BYTES:
            return _Parser(text).whole()
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        at = sum(len(text[start : min(start + _PIECE_BYTES, error.pos)].encode()) for start in _starts(error.pos))
        raise MalformedBody(f"invalid JSON at byte {at}: {error.msg}") from None
    except RecursionError:
        raise MalformedBody("the body is nested too deeply") from None
    except ValueError:  # a number with thousands of digits
        raise MalformedBody("a number has too many digits") from None


def _starts(size: int) -> Iterator[int]:
    """Yield the start of each piece of ``size`` bytes, and call ``between_pieces`` in between."""
    between = between_pieces.get()
    for start in range(0, size, _PIECE_BYTES):
        if start:
            between()
        yield start


def _decoded(body: bytes) -> str:
    """Raises MalformedBody."""
    if len(body) <= _AT_ONCE_BYTES:
        with suppress(UnicodeDecodeError):  # the loop below finds the position
            return body.decode()
    decoder = getincrementaldecoder("utf-8")()
    pieces = []
    for start in _starts(len(body)):
        before = len(decoder.getstate()[0])  # bytes of a character that began in the previous piece
        end = start + _PIECE_BYTES
        try:
            pieces.append(decoder.decode(body[start:end], end >= len(body)))
        except UnicodeDecodeError as error:
            at = start - before + error.start
            raise MalformedBody(f"invalid UTF-8 at byte {at}", hint="JSON is sent in UTF-8") from None
    return "".join(pieces)


class _Parser:
    """Parses as ``json.loads`` does, in pieces: each call of the standard library's parser covers no more than a string,
    or a small list or object, and ``between_pieces`` is called regularly.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._scan: Callable[[str, int], tuple[Any, int]] = _DECODER.scan_once  # type: ignore[attr-defined] # as json.decoder uses it
        self._between = between_pieces.get()
        self._pause_at = _PIECE_BYTES
        self._window_at = 0

    def whole(self) -> Any:
        """Raises what ``json.loads`` does."""
        value, at = self._value(self._behind_space(0))
        at = self._behind_space(at)
        if at < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _pause(self, at: int) -> None:
        if at >= self._pause_at:
            self._between()
            self._pause_at = at + _PIECE_BYTES

    def _behind_space(self, at: int) -> int:
        if self._text[at : at + 1] not in _SPACES:
            return at
        end = _SPACE(self._text, at)
        return at if end is None else end.end()

    def _value(self, at: int) -> tuple[Any, int]:
        """Parse the value at ``at``; return it and its end."""
        self._pause(at)
        first = self._text[at : at + 1]
        if first in ("[", "{"):
            # Try the standard library on the window. Failure may only mean that the value does not end in it; then try
            # nothing else that begins in the same window, or nested lists would be parsed once per level.
            if at >= self._window_at:
                with suppress(StopIteration, json.JSONDecodeError):
                    value, size = self._scan(self._text[at : at + _WINDOW], 0)
                    return value, at + size
                self._window_at = at + _WINDOW
            return self._array(at + 1) if first == "[" else self._object(at + 1)
        try:
            return self._scan(self._text, at)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", self._text, stop.value) from None

    def _array(self, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._behind_space(at)
        if self._text[at : at + 1] == "]":
            return found, at + 1
        while True:
            at = self._behind_run(at, found)
            value, at = self._value(at)
            found.append(value)
            at, is_end = self._behind_comma(at, "]")
            if is_end:
                return found, at

    def _behind_run(self, at: int, found: list[Any]) -> int:
        """Parse the entries of a list that end in the window, in one call; return where the next entry begins.

        A part of the text that parses as entries is those entries, since the end of a value does not depend on the text
        after it.
        """
        end = _ENDS.get(self._text[at : at + 1])
        while end is not None and at >= self._window_at:
            self._pause(at)
            last = self._text.rfind(end, at, at + _WINDOW)
            if last < 0:
                break
            run = f"[{self._text[at : last + 1]}]"
            with suppress(StopIteration, json.JSONDecodeError):
                some, size = self._scan(run, 0)
                if size == len(run):
                    found += some
                    at = self._behind_space(last + 2)
                    continue
            self._window_at = at + _WINDOW
        return at

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        found: list[tuple[str, Any]] = []
        at = self._behind_space(at)
        if self._text[at : at + 1] == "}":
            return {}, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._scan(self._text, at)
            at = self._behind_space(at)
            if self._text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            value, at = self._value(self._behind_space(at + 1))
            found.append((key, value))
            at, is_end = self._behind_comma(at, "}")
            if is_end:
                return _without_doubles(found), at

    def _behind_comma(self, at: int, end: str) -> tuple[int, bool]:
        """Return where the next entry begins and False, or where the list or object ends and True."""
        at = self._behind_space(at)
        mark = self._text[at : at + 1]
        if mark == end:
            return at + 1, True
        if mark != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self._behind_space(at + 1), False


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedBody(f"the field {key[:80]!r} occurs twice")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedBody(f"{name} is not JSON", hint="numbers must be whole")


#: Shared: ``json.loads`` makes a decoder per call, which takes longer than decoding a small body.
_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)
#: Encodes without spaces. Shared: ``json.dumps`` makes an encoder per call, half of its time for a small answer.
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _structure(raw: bytes) -> int:
    """Count the bytes that separate or open values."""
    return sum(raw.count(each, at, at + _PIECE_BYTES) for at in _starts(len(raw)) for each in (b",", b"[", b"{"))


def _values(body: bytes) -> int:
    """Return roughly the number of values in a body, or a number above the limit; the content of strings is ignored.

    Small values take at least ten times their text in memory, so those of a large body are counted before it is
    parsed. Without escapes every second piece between quotes is a string, so one pass in little memory is enough.
    """
    found = 0
    in_string = 0
    begins_escaped = False
    for at in _starts(len(body)):
        piece = body[at + begins_escaped : at + _PIECE_BYTES]
        begins_escaped = bool((len(piece) - len(piece.rstrip(b"\\"))) & 1)
        pieces = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        found += _structure(b"".join(pieces[in_string::2]))
        in_string ^= (len(pieces) - 1) & 1
        if found > MAX_VALUES:
            break
    return found


def fields_of(given: Mapping[str, Any], kinds: Mapping[str, tuple[str, Kind]], where: str = "") -> dict[str, Any]:
    """Return the fields of a record in ``given``: our name → value. Missing fields are left out.

    Args:
      kinds: the field's name in JSON → our name, and the kind that reads it.
      where: the prefix of a field's name in errors.
    Raises:
      UnknownField: the nearest known one is named.
      MalformedBody: a value of the wrong kind.
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        known = kinds.get(key)
        if known is None:
            raise UnknownField(f"unknown field {where}{key[:80]!r}", hint=nearest(key[:80], kinds))
        name, kind = known
        found[name] = kind(value, where + key)
    return found


def kind_of(value: Any) -> str:
    """Return the name of a value's type, for errors."""
    return _NAMES.get(type(value), "null")


def refuse(name: str, value: Any, wanted: str) -> NoReturn:
    """Raise the error for a value of the wrong kind."""
    shown = f" {value}" if type(value) is int and abs(value) < 1 << 70 else ""
    raise MalformedBody(f"{name} is {kind_of(value)}{shown}, not {wanted}")


def boolean(value: Any, name: str) -> bool:
    """``true`` or ``false``."""
    return value if isinstance(value, bool) else refuse(name, value, "true or false")


def int32(value: Any, name: str) -> int:
    """A whole number of 32 bits."""
    if type(value) is int and -0x80000000 <= value <= 0x7FFFFFFF:
        return value
    refuse(name, value, "a whole number of 32 bits")


def int64(value: Any, name: str) -> int:
    """A whole number of 64 bits."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    refuse(name, value, "a whole number of 64 bits")


def pointer(value: Any, name: str) -> int:
    """A write pointer: a whole number of 64 bits, or its digits as a string."""
    return int64(int(value) if isinstance(value, str) and _DIGITS.match(value) else value, name)


def text(value: Any, name: str) -> str:
    """A string that has a UTF-8 form."""
    if not isinstance(value, str):
        refuse(name, value, "a string")
    utf8(value, name)
    return value


def utf8(value: str, name: str) -> bytes:
    """Return the UTF-8 form of a string. Raises MalformedBody: it has half a surrogate pair."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise MalformedBody(f"{name} has half a surrogate pair at character {error.start}") from None


def payload(value: Any, name: str) -> bytes:
    """Bytes: a string's UTF-8, ``{"base64": …}``, or Avro's own ``{"bytes": …}`` in ISO-8859-1."""
    return utf8(value, name) if isinstance(value, str) else _tagged_bytes(value, name)


def binary(value: Any, name: str) -> bytes:
    """Bytes that are never text: a string is base64; the tagged forms are as for ``payload``."""
    return _base64(value, name) if isinstance(value, str) else _tagged_bytes(value, name)


def _tagged_bytes(value: Any, name: str) -> bytes:
    if isinstance(value, dict) and len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in ("base64", "bytes"):
            if not isinstance(inner, str):
                refuse(f"{name}.{tag}", inner, "a string")
            return _base64(inner, name) if tag == "base64" else _latin1(inner, name)
    refuse(name, value, 'a string, {"base64": …} or {"bytes": …}')


def _base64(value: str, name: str) -> bytes:
    if len(value) % 4:  # the library accepts some superfluous padding
        raise MalformedBody(f"{name} is not base64: {len(value)} characters", hint="a multiple of 4, padded with =")
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except ValueError as error:
        raise MalformedBody(f"{name} is not base64: {str(error).lower()}", hint="A-Z a-z 0-9 + / and =") from None


def _latin1(value: str, name: str) -> bytes:
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError as error:
        raise MalformedBody(
            f"{name}: character {error.start} is not a byte",
            hint='{"bytes": …} is ISO-8859-1; {"base64": …} is any bytes',
        ) from None


def nullable(kind: Kind, *tags: str) -> Kind:
    """``kind`` or null, bare or under one of Avro's union ``tags``: ``5`` or ``{"long": 5}``."""

    def read(value: Any, name: str) -> Any:
        if isinstance(value, dict) and len(value) == 1:
            ((tag, inner),) = value.items()
            if tag in tags:
                return kind(inner, name)
        return None if value is None else kind(value, name)

    return read


def list_of(kind: Kind) -> Kind:
    """Return the kind of lists with entries of ``kind``."""

    def read(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            refuse(name, value, "a list")
        return [kind(entry, f"{name}[{index}]") for index, entry in enumerate(value)]

    return read


def strings(value: Any, name: str) -> dict[str, str]:
    """An object with strings as values."""
    if not isinstance(value, dict):
        refuse(name, value, "an object of strings")
    return {text(key, f"{name}: a key"): text(entry, f"{name}.{key[:80]!r}") for key, entry in value.items()}


# --- positions in a topic: a message id or a time, in JSON and in a query string --------------------


def parse_position(value: object, name: str = "startFrom") -> bytes | int:
    """Parse a position in JSON: 40 hex digits are an id (20 bytes), a whole number a timestamp in milliseconds.

    Raises:
      InvalidMessageId: a string that is not an id.
      InvalidParameter: a time below 0.
      MalformedBody: neither a string nor a whole number of 64 bits.
    """
    if isinstance(value, str):
        if _DIGITS.match(value):
            raise InvalidMessageId(f"{name}: {value!r} is no id", hint="a time is written as a number, without quotes")
        return parse_id(value)
    if type(value) is int and value <= MAX_TIMESTAMP_MS:
        return _checked_time(value, name)
    raise MalformedBody(f"{name} is not a position", hint="40 hex digits for an id, or a number of milliseconds")


def parse_query_position(text: str, name: str = "from") -> bytes | int:
    """Parse a position in a query string: up to 19 digits are a timestamp in milliseconds, 40 hex digits an id.

    Raises:
      InvalidMessageId: neither.
      InvalidParameter: a time below 0.
    """
    if _DIGITS.match(text):
        return _checked_time(int(text), name)
    try:
        return parse_id(text)
    except InvalidMessageId as error:
        error.hint = "use an id of 40 hex digits, or a time in milliseconds; 0 is the oldest message"
        raise


def _checked_time(timestamp_ms: int, name: str) -> int:
    if timestamp_ms < 0:
        raise InvalidParameter(f"{name}: the time {timestamp_ms} is below 0", hint="use milliseconds since 1970")
    return timestamp_ms
