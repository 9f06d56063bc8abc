"""Media types: what ``Content-Type`` and ``Accept`` say, without a word about what follows from it."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Splits at commas or semicolons outside of quotes.
_RANGES = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*+"?)+')
_PARTS = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*+"?)+')


class MediaType(NamedTuple):
    """One media type."""

    name: str
    """``type/subtype``, lower case."""
    parameters: dict[str, str]
    """Names in lower case, values without quotes; of a parameter given twice the last."""


def parse_media_type(header: str) -> MediaType:
    """A media type with its parameters; what is no parameter is passed over."""
    name, *parts = _PARTS.findall(header) or [""]
    parameters = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals:
            parameters[key.strip().lower()] = _unquoted(value.strip())
    return MediaType(name.strip().lower(), parameters)


def parse_accept(header: str) -> list[MediaType]:
    """The types of an ``Accept`` list that are not refused (``q=0``), in the order given."""
    accepted = [parse_media_type(each) for each in _RANGES.findall(header)]
    return [each for each in accepted if not _refused(each.parameters.pop("q", "1"))]


def _refused(quality: str) -> bool:
    try:
        return float(quality) <= 0
    except ValueError:
        return False


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
