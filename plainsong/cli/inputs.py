"""Input of `publish`: messages from arguments, lines, NDJSON and files, in pieces as they arrive."""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from plainsong.cli.verb import CommandFailed, Exit
from plainsong.protocol.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

#: Read at once, and about what one request carries.
PIECE_BYTES = 1 << 20
#: Messages of one request.
PIECE_MESSAGES = 10_000
#: A longer line or file is not even read: the daemon's own bound is 8 MiB unless it was raised.
MAX_MESSAGE_BYTES = 64 << 20
#: What an object of NDJSON may have; what ``poll --json`` prints besides is passed over.
_FIELDS = ("payload", "ttlSeconds", "attributes")
_PASSED_OVER = frozenset({"topic", "id", "publishTimeMs"})


class InputMessage(NamedTuple):
    """A message to publish."""

    payload: bytes
    ttl_s: int | None = None
    attributes: Mapping[str, str] = {}


class Source(Protocol):
    """Where lines come from: ``read1`` returns what there is, and waits only when there is nothing."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class InputPiece:
    """Messages that are published together, and what is known of where they stood."""

    items: list[InputMessage]
    first: int
    """Number of the first one, from 1."""
    read_bytes: int
    """Of the input, up to the end of this piece."""


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
            raise CommandFailed(f"{name} is larger than {MAX_MESSAGE_BYTES >> 20} MiB, too large for a message")
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
    """Each line is a message, without its end; what has come is handed on without waiting for more.

    Raises:
      CommandFailed: a line cannot be understood, after those before it were handed on.
    """
    rest, number, read = b"", 1, 0
    while chunk := source.read1(PIECE_BYTES):
        read += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_MESSAGE_BYTES:
            raise CommandFailed(f"line {number + len(lines)} is longer than {MAX_MESSAGE_BYTES >> 20} MiB")
        for start in range(0, len(lines), PIECE_MESSAGES):
            yield from _lines(lines[start : start + PIECE_MESSAGES], parse, number + start, read)
        number += len(lines)
    if rest:
        yield from _lines([rest], parse, number, read)


def _lines(lines: list[bytes], parse: Callable[[bytes], InputMessage], first: int, read: int) -> Iterator[InputPiece]:
    """One piece; when a line is wrong, those before it, and then the error."""
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


# --- what one of them means --------------------------------------------------------------------------


def as_is(text: bytes) -> InputMessage:
    """The bytes themselves."""
    return InputMessage(text)


def from_base64(text: bytes) -> InputMessage:
    """Base64 of the payload. Raises ValueError."""
    return InputMessage(_base64(text))


def from_json(text: bytes) -> InputMessage:
    """An item of the daemon's JSON: a string, ``{"base64": …}``, or ``{"payload": …, "ttlSeconds": …, "attributes": {…}}``.

    Raises:
      ValueError: it is none of them.
    """
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("this is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(told, dict) or set(told) == {"base64"}:
        return InputMessage(_payload(told))
    for key in told:
        if key not in _FIELDS and key not in _PASSED_OVER:
            raise ValueError(f"unknown field {key[:80]!r}; {nearest(key, _FIELDS)}")
    if "payload" not in told:
        raise ValueError('there is no "payload"')
    ttl_s = told.get("ttlSeconds")
    if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool) or ttl_s < 1):
        raise ValueError(f"ttlSeconds is {ttl_s!r}, not a number of seconds above 0")
    attributes = told.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise ValueError("attributes is no object of strings")
    return InputMessage(_payload(told["payload"]), ttl_s, attributes)


def _payload(told: Any) -> bytes:
    if isinstance(told, str):
        try:
            return told.encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair is no text") from None
    if isinstance(told, dict) and set(told) == {"base64"} and isinstance(told["base64"], str):
        return _base64(told["base64"].encode())
    raise ValueError('a payload is a string or {"base64": "…"}; to publish JSON itself, leave out --ndjson')


def _base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("this is no base64") from None
