"""Declares settings: a field of a section's class, with its unit, its bounds and what it means.

Each function below declares one field. For the type checker it returns the default; for the class it returns a
dataclass field that carries a ``Meaning``. So the sentence stands next to the value, and the example file, the checks
and the command line all read it. A section's class is defined where its settings take effect, and is passed unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
CENTURY_S = 100 * 365 * 86_400
#: The key under which a field's metadata holds its ``Meaning``.
MEANING = "meaning"
T = TypeVar("T")


class Kind(StrEnum):
    """The kind of a setting; its value is the error's text for what is expected."""

    SWITCH = "true or false"
    COUNT = "a whole number"
    BYTES = 'a number of bytes, or text like "64 MiB"'
    SECONDS = "a number of seconds"
    WHOLE_SECONDS = "a whole number of seconds"
    MILLISECONDS = "a whole number of milliseconds"
    CHOICE = "one of a few words"
    ADDRESS = 'text like "127.0.0.1:7420" or "[::1]:7420"'
    BINDS = 'text like "127.0.0.1:7420" or "unix:/run/plainsong.sock", or several, comma-separated'
    ADDRESSES = 'text like "127.0.0.1:9090", or several, comma-separated'
    PATH = "a path, as text"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Meaning:
    """A setting in words and bounds. ``low`` and ``high`` are allowed values."""

    kind: Kind
    says: str
    """The description, in one sentence."""
    small: str = ""
    """The effect of a value that is too small; empty if there is no such value."""
    large: str = ""
    """The effect of a value that is too large."""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    """True if the text may be empty, which means none."""
    pattern: str = ""
    """A pattern that the whole text must match; empty: any text without control characters."""
    expected: str = ""
    """The pattern in words."""
    is_file: bool = False
    """True if it names a file: in a settings file, a relative one starts at that file's folder."""


def switch(default: bool, says: str) -> bool:
    """Declare a field that is true or false."""
    return _declare(default, Meaning(Kind.SWITCH, says))


def count(default: int, says: str, *, small: str, large: str, low: int = 1, high: int = 10_000_000) -> int:
    """Declare a count."""
    return _declare(default, Meaning(Kind.COUNT, says, small, large, low, high))


def size(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """Declare a size in bytes."""
    return _declare(default, Meaning(Kind.BYTES, says, small, large, low, high))


def seconds(default: float, says: str, *, small: str, large: str, low: float, high: float) -> float:
    """Declare a time in seconds, with fractions."""
    return _declare(default, Meaning(Kind.SECONDS, says, small, large, low, high))


def whole_seconds(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """Declare a time in whole seconds."""
    return _declare(default, Meaning(Kind.WHOLE_SECONDS, says, small, large, low, high))


def milliseconds(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """Declare a time in whole milliseconds."""
    return _declare(default, Meaning(Kind.MILLISECONDS, says, small, large, low, high))


def choice(default: str, says: str, *choices: str) -> str:
    """Declare a field that is one of a few words."""
    return _declare(default, Meaning(Kind.CHOICE, says, choices=choices))


def optional_address(says: str) -> str:
    """Declare a host and a port, or an empty text for none."""
    return _declare("", Meaning(Kind.ADDRESS, says, optional=True))


def addresses(default: str, says: str) -> str:
    """Declare one or more addresses, each a host and a port, separated by commas."""
    return _declare(default, Meaning(Kind.ADDRESSES, says))


def binds(default: str, says: str) -> str:
    """Declare one or more addresses to listen on: a host and a port, or the path of a Unix socket."""
    return _declare(default, Meaning(Kind.BINDS, says))


def text(default: str, says: str, *, pattern: str = "", expected: str = "") -> str:
    """Declare a text, which may be empty only if ``pattern`` matches an empty text."""
    return _declare(default, Meaning(Kind.TEXT, says, pattern=pattern, expected=expected))


def file_name(says: str, *, pattern: str = "", expected: str = "") -> str:
    """Declare the name of a file, or empty for none; in a settings file it is relative to that file's folder."""
    return _declare("", Meaning(Kind.TEXT, says, pattern=pattern, expected=expected, is_file=True))


def path(default: str, says: str) -> Path:
    """Declare a path, relative to the working directory."""
    return _declare(Path(default), Meaning(Kind.PATH, says))


def _declare(default: T, meaning: Meaning) -> T:
    return cast("T", cast("Any", field(default=default, metadata={MEANING: meaning})))
