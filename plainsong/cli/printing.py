"""Prints messages to standard output: format strings, JSON lines, and escapes for terminal control characters."""

from __future__ import annotations

import json
import re
import sys
from binascii import b2a_base64
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from plainsong.cli.options import show_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from plainsong.messages import MessageId

F = TypeVar("F", bound="Callable[..., Any]")


# --- format strings --------------------------------------------------------------------------------
#
# %p payload %t topic %s size in bytes %T publish time (UTC) \n \t \r \0 \\ and \xHH %i id %m publish time in
# milliseconds %a attributes (JSON) %% a percent sign


class Shape:
    """A parsed format string: ``shape(message)`` formats a message as a line without its terminator.

    Raises:
      ValueError: unknown field or escape.
    """

    def __init__(self, text: str = "%p") -> None:
        self._parts: list[bytes | Callable[[Printable], bytes]] = []
        end = 0
        for found in _PART.finditer(text):
            self._parts += [text[end : found.start()].encode("utf-8", "surrogateescape"), _part(found)]
            end = found.end()
        self._parts.append(text[end:].encode("utf-8", "surrogateescape"))

    def __call__(self, message: Printable) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part(message) for part in self._parts])


class ShapeType(click.ParamType[Shape]):
    name = "format"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Shape:
        if isinstance(value, Shape):
            return value
        try:
            return Shape(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


_OPTIONS = (
    click.option(
        "-f",
        "--format",
        "shape",
        type=ShapeType(),
        metavar="FORMAT",
        help="Format of a message: %p payload, %t topic, %i id, %T time, %m the same in ms, %s size, %a attributes, %%, \\n \\t \\x00.",
    ),
    click.option("-0", "--null", is_flag=True, help="End messages with NUL instead of newline, for xargs -0."),
)


class GrepType(click.ParamType["re.Pattern[bytes]"]):
    name = "pattern"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[bytes]:
        if isinstance(value, re.Pattern):
            return value
        try:
            return re.compile(str(value).encode("utf-8", "surrogateescape"))
        except re.error as error:
            self.fail(f"invalid regular expression: {error}; write for example 'error|failed'", param, ctx)


grep_option = click.option(
    "--grep",
    type=GrepType(),
    metavar="PATTERN",
    help="Print only messages whose payload matches this regular expression; --limit counts those.",
)


def printing_options(command: F) -> F:
    """Adds ``--format`` and ``--null``, passed as ``shape`` and ``null``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Printer:
    """Writes messages to standard output.

    Args:
      shape: the format; None means JSON if ``as_json``, otherwise ``default``.
      null: end each message with NUL.
      grep: write only messages whose payload contains a match.
      limit: the maximum number of messages to write.
    """

    def __init__(
        self,
        shape: Shape | None,
        *,
        null: bool,
        as_json: bool,
        default: str = "%p",
        grep: re.Pattern[bytes] | None = None,
        limit: int | None = None,
    ) -> None:
        if shape is not None and as_json:
            raise click.UsageError("--format and --json exclude each other")
        self._line: Callable[[Printable], bytes] = json_line
        if not as_json:
            self._line = shape or Shape(default)
        self._end = b"\0" if null else b"\n"
        self._escapes = sys.stdout.isatty() and not null
        self._out = sys.stdout.buffer
        self._grep = grep
        self._limit = limit
        self.count = 0

    @property
    def is_full(self) -> bool:
        """True if it has written ``limit`` messages."""
        return self._limit is not None and self.count >= self._limit

    def write(self, messages: Iterable[Printable]) -> None:
        """Writes the messages and flushes, so that the reader of a pipe gets them immediately."""
        wanted: Iterable[Printable] = messages
        if self._grep is not None:
            wanted = (message for message in messages if self._grep.search(message.payload))
        if self._limit is not None:
            wanted = islice(wanted, self._limit - self.count)
        lines = [self._line(message) for message in wanted]
        if not lines:
            return
        if self._escapes:
            lines = [escaped_bytes(line) for line in lines]
        left = memoryview(self._end.join(lines) + self._end)
        while left:  # with PYTHONUNBUFFERED a write to a pipe may be partial
            left = left[self._out.write(left) :]
        self._out.flush()
        self.count += len(lines)


class Printable(Protocol):
    """The part of a message that formats use."""

    @property
    def topic(self) -> str: ...
    @property
    def id(self) -> MessageId: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def attributes(self) -> Mapping[str, str]: ...


_FIELDS: dict[str, Callable[[Printable], bytes]] = {
    "p": lambda message: message.payload,
    "t": lambda message: message.topic.encode(),
    "i": lambda message: str(message.id).encode(),
    "s": lambda message: b"%d" % len(message.payload),
    "T": lambda message: show_time(message.id.publish_time_ms).encode(),
    "m": lambda message: b"%d" % message.id.publish_time_ms,
    "a": lambda message: _dumped(dict(message.attributes)),
}
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_PART = re.compile(r"%(?P<field>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)", re.DOTALL)


def _part(found: re.Match[str]) -> bytes | Callable[[Printable], bytes]:
    field, code, escape = found["field"], found["hex"], found["escape"]
    if code is not None:
        return bytes.fromhex(code)
    if field is not None:
        if field == "%":
            return b"%"
        if field in _FIELDS:
            return _FIELDS[field]
        raise ValueError(f"unknown field %{field}; use %p %t %i %s %T %m %a or %%")
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    raise ValueError(f"unknown escape \\{escape}; use \\n \\t \\r \\0 \\xHH or \\\\")


def payload_json(payload: bytes) -> str | dict[str, str]:
    """A payload in the daemon's JSON: a string, or ``{"base64": …}`` when it is not UTF-8."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return {"base64": b2a_base64(payload, newline=False).decode()}


def json_line(message: Printable) -> bytes:
    """A message as one line of JSON, which ``publish --ndjson`` accepts."""
    fields: dict[str, Any] = {
        "topic": message.topic,
        "id": str(message.id),
        "publishTimeMs": message.id.publish_time_ms,
        "payload": payload_json(message.payload),
    }
    if message.attributes:
        fields["attributes"] = dict(message.attributes)
    return _dumped(fields)


def _dumped(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def escaped_bytes(line: bytes) -> bytes:
    """Escapes control characters, except tabs, and bytes that are not UTF-8, as ``\\xHH``."""
    text = line.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() or char in "\t\n" else _visible(char) for char in text).encode()


def _visible(char: str) -> str:
    return char.encode("unicode_escape").decode()
