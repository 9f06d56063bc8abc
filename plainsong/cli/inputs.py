"""Input of `publish`: messages from arguments, lines, NDJSON and files, in pieces as they arrive."""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from plainsong.cli.command import CommandFailed, Exit
from plainsong.messages import attributes_of, check_ttl
from plainsong.protocol.errors import InvalidParameter, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

#: Bytes read at once, and about the size of one request.
PIECE_BYTES = 1 << 20
#: Messages in one request.
PIECE_MESSAGES = 10_000
#: A longer line or file is not read: the daemon's bound is 8 MiB by default.
MAX_MESSAGE_BYTES = 64 << 20
#: Fields of an NDJSON object; further ones that ``poll --json`` prints are ignored.
_FIELDS = ("payload", "ttlSeconds", "attributes")
_PASSED_OVER = frozenset({"topic", "id", "publishTimeMs"})


class InputMessage(NamedTuple):
    payload: bytes
    ttl_s: int | None = None
    attributes: Mapping[str, str] = {}


class Source(Protocol):
    """A binary file: ``read1`` returns what is available, and waits only when nothing is."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class InputPiece:
    """Messages published together, with their place in the input."""

    items: list[InputMessage]
    first: int
    """Number of the first message, from 1."""
    read_bytes: int
    """Bytes of the input up to the end of this piece."""


def from_arguments(texts: Iterable[str], parse: Callable[[bytes], InputMessage]) -> Iterator[InputPiece]:
    """Each argument is a message."""
    return _pieces((os.fsencode(text) for text in texts), parse, "argument")


def from_files(paths: Iterable[str], stdin: Source, parse: Callable[[bytes], InputMessage]) -> Iterator[InputPiece]:
    """Each file is one message, whole; ``-`` is standard input. Raises CommandFailed."""
    return _pieces((_whole(path, stdin) for path in paths), parse, "file")


def _whole(path: str, stdin: Source) -> bytes:
    try:
        if path == "-":
            return _bounded(stdin, "standard input")
        with Path(path).open("rb") as file:
            return _bounded(file, path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}", code=Exit.USAGE) from error


def _bounded(source: Source, name: str) -> bytes:
    chunks, size = [], 0
    while chunk := source.read1(PIECE_BYTES):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_MESSAGE_BYTES:
            raise CommandFailed(f"{name} is larger than {MAX_MESSAGE_BYTES >> 20} MiB, the limit for a message")
    return b"".join(chunks)


def _pieces(payloads: Iterable[bytes], parse: Callable[[bytes], InputMessage], kind: str) -> Iterator[InputPiece]:
    items: list[InputMessage] = []
    first, size, read = 1, 0, 0
    for number, payload in enumerate(payloads, 1):
        if items and (size + len(payload) > PIECE_BYTES or len(items) == PIECE_MESSAGES):
            yield InputPiece(items, first, read)
            items, first, size = [], number, 0
        items.append(_parsed(parse, payload, kind, number))
        size += len(payload)
        read += len(payload)
    if items:
        yield InputPiece(items, first, read)


def from_lines(source: Source, parse: Callable[[bytes], InputMessage]) -> Iterator[InputPiece]:
    """Each line is a message, without its newline; yields the available lines without waiting for more.

    Raises:
      CommandFailed: a line is malformed; the lines before it have been yielded.
    """
    rest, number, read = b"", 1, 0
    while chunk := _read(source):
        read += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_MESSAGE_BYTES:
            raise CommandFailed(f"line {number + len(lines)} is longer than {MAX_MESSAGE_BYTES >> 20} MiB")
        for start in range(0, len(lines), PIECE_MESSAGES):
            yield from _lines(lines[start : start + PIECE_MESSAGES], parse, number + start, read)
        number += len(lines)
    if rest:
        yield from _lines([rest], parse, number, read)


def _read(source: Source) -> bytes:
    try:
        return source.read1(PIECE_BYTES)
    except OSError as error:
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        raise CommandFailed(f"standard input cannot be read: {why}", code=Exit.USAGE) from error


def _lines(lines: list[bytes], parse: Callable[[bytes], InputMessage], first: int, read: int) -> Iterator[InputPiece]:
    """Yields one piece; when a line is malformed, the lines before it, and then raises."""
    items: list[InputMessage] = []
    try:
        for offset, line in enumerate(lines):
            items.append(_parsed(parse, line, "line", first + offset))
    except CommandFailed:
        if items:
            yield InputPiece(items, first, read)
        raise
    if items:
        yield InputPiece(items, first, read)


def _parsed(parse: Callable[[bytes], InputMessage], text: bytes, kind: str, number: int) -> InputMessage:
    try:
        return parse(text)
    except ValueError as error:
        raise CommandFailed(f"{kind} {number}: {error}", code=Exit.USAGE) from error


# --- one message -----------------------------------------------------------------------------------


def as_is(text: bytes) -> InputMessage:
    return InputMessage(text)


def from_base64(text: bytes) -> InputMessage:
    """Base64 of the payload. Raises ValueError."""
    return InputMessage(_base64(text))


def from_json(text: bytes) -> InputMessage:
    """Parses a string, ``{"base64": …}``, or ``{"payload": …, "ttlSeconds": …, "attributes": {…}}``. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(value, dict) or set(value) == {"base64"}:
        return InputMessage(_payload(value))
    for key in value:
        if key not in _FIELDS and key not in _PASSED_OVER:
            raise ValueError(f"unknown field {key[:80]!r}; {nearest(key, _FIELDS)}")
    if "payload" not in value:
        raise ValueError('"payload" is missing')
    ttl_s = value.get("ttlSeconds")
    if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool) or ttl_s < 1):
        raise ValueError(f"ttlSeconds must be a whole number of seconds above 0, got {ttl_s!r}")
    attributes = value.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise ValueError("attributes must be an object of strings")
    try:
        if ttl_s is not None:
            check_ttl(ttl_s)
        attributes_of(attributes, None)
    except InvalidParameter as error:
        raise ValueError(error) from None
    return InputMessage(_payload(value["payload"]), ttl_s, attributes)


def _payload(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise ValueError("invalid text: half of a surrogate pair") from None
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        return _base64(value["base64"].encode())
    raise ValueError('a payload must be a string or {"base64": "…"}; to publish JSON itself, omit --ndjson')


def _base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("invalid base64") from None
