"""Positions in a topic as clients write them: a message id or a time, in JSON and in a query string."""

from __future__ import annotations

import re

from protocol.errors import InvalidMessageId, InvalidParameter, MalformedBody
from protocol.ids import MAX_TIMESTAMP_MS, parse_id

_DIGITS = re.compile(r"-?[0-9]{1,19}\Z")


def parse_position(value: object, name: str = "startFrom") -> bytes | int:
    """A position in JSON: 40 hex digits are an id (20 bytes), a whole number a timestamp in milliseconds.

    Raises:
      InvalidMessageId: a string that is no id.
      InvalidParameter: a time below 0.
      MalformedBody: neither a string nor a whole number of 64 bits.
    """
    if isinstance(value, str):
        if _DIGITS.match(value):
            raise InvalidMessageId(f"{name}: {value!r} is no id", hint="a time is written as a number, without quotes")
        return parse_id(value)
    if type(value) is int and value <= MAX_TIMESTAMP_MS:
        return _checked_time(value, name)
    raise MalformedBody(f"{name} is no position", hint="40 hex digits for an id, or a number of milliseconds")


def parse_query_position(text: str, name: str = "from") -> bytes | int:
    """A position in a query string: up to 19 digits are a timestamp in milliseconds, 40 hex digits an id.

    Raises:
      InvalidMessageId: neither.
      InvalidParameter: a time below 0.
    """
    if _DIGITS.match(text):
        return _checked_time(int(text), name)
    return parse_id(text)


def _checked_time(timestamp_ms: int, name: str) -> int:
    if timestamp_ms < 0:
        raise InvalidParameter(f"{name}: the time {timestamp_ms} is below 0", hint="use milliseconds since 1970")
    return timestamp_ms
