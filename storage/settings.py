"""Declares settings: a field of a section's class, with its unit, its bounds and what it means.

Each function below declares one field. For the type checker it returns the default; for the class it returns a dataclass
field that carries a ``Meaning``. So the sentence stands next to the value, and the example file, the checks and the
command line all read it. A section's class stands where its settings take effect, and is passed as it is.
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
    """The kind of a setting; its value says in an error what to write."""

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
    """What it sets, in one sentence."""
    small: str = ""
    """What happens when it is too small; empty where that means nothing."""
    large: str = ""
    """What happens when it is too large."""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    """Whether an empty text, for none, is allowed."""
    pattern: str = ""
    """What all of a text must match; empty: any text without control characters."""
    expected: str = ""
    """That pattern in words."""
    is_file: bool = False
    """True if it names a file: in a settings file, a relative one starts at that file's folder."""


def switch(default: bool, says: str) -> bool:
    """A field that is true or false."""
    return _declare(default, Meaning(Kind.SWITCH, says))


def count(default: int, says: str, *, small: str, large: str, low: int = 1, high: int = 10_000_000) -> int:
    """A field that counts things."""
    return _declare(default, Meaning(Kind.COUNT, says, small, large, low, high))


def size(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """A field in bytes."""
    return _declare(default, Meaning(Kind.BYTES, says, small, large, low, high))


def seconds(default: float, says: str, *, small: str, large: str, low: float, high: float) -> float:
    """A field in seconds, fractions allowed."""
    return _declare(default, Meaning(Kind.SECONDS, says, small, large, low, high))


def whole_seconds(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """A field in whole seconds."""
    return _declare(default, Meaning(Kind.WHOLE_SECONDS, says, small, large, low, high))


def milliseconds(default: int, says: str, *, small: str, large: str, low: int, high: int) -> int:
    """A field in whole milliseconds."""
    return _declare(default, Meaning(Kind.MILLISECONDS, says, small, large, low, high))


def choice(default: str, says: str, *choices: str) -> str:
    """A field that is one of a few words."""
    return _declare(default, Meaning(Kind.CHOICE, says, choices=choices))


def address(default: str, says: str) -> str:
    """A field that is a host and a port."""
    return _declare(default, Meaning(Kind.ADDRESS, says, low=0, high=65_535))


def optional_address(says: str) -> str:
    """A field that is a host and a port, or empty for none."""
    return _declare("", Meaning(Kind.ADDRESS, says, optional=True))


def addresses(default: str, says: str) -> str:
    """A field that is one or more of a host and a port, separated by commas."""
    return _declare(default, Meaning(Kind.ADDRESSES, says))


def binds(default: str, says: str) -> str:
    """A field that is one or more places to listen on: a host and a port, or the path of a Unix socket."""
    return _declare(default, Meaning(Kind.BINDS, says))


def text(default: str, says: str, *, pattern: str = "", expected: str = "") -> str:
    """A field that is text, empty only where ``pattern`` takes that."""
    return _declare(default, Meaning(Kind.TEXT, says, pattern=pattern, expected=expected))


def file_name(says: str, *, pattern: str = "", expected: str = "") -> str:
    """A field that names a file, empty for none; in a settings file, a relative one starts at that file's folder."""
    return _declare("", Meaning(Kind.TEXT, says, pattern=pattern, expected=expected, is_file=True))


def path(default: str, says: str) -> Path:
    """A field that is a path; a relative one starts at the working directory."""
    return _declare(Path(default), Meaning(Kind.PATH, says))


def _declare(default: T, meaning: Meaning) -> T:
    return cast("T", cast("Any", field(default=default, metadata={MEANING: meaning})))
