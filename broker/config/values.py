"""Kinds of settings with their units and bounds, and how a value is read from text and shown.

Each function below declares one field of a section's class. For the type checker it returns the default; for the class
it returns a dataclass field that carries a ``Meaning``. So the sentence stands beside the value, and the example file,
the checks and the command line all read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
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


# --- values ----------------------------------------------------------------------------------------


_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_SIZE = re.compile(r"(\d+(?:_\d+)*)\s*([A-Za-z]*)\Z")
_WHOLE = re.compile(r"[+-]?\d+(?:_\d+)*\Z")
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address written as ``host:port`` or ``[host]:port``.

    Raises:
      ValueError: it is not written so, or the port is not in 0..65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is not an address; write {Kind.ADDRESS}")
    if re.search(r"[\s/@\[\]]", host):
        raise ValueError(f"{text!r} is not an address; write {Kind.ADDRESS}")
    if int(port) > 65_535:
        raise ValueError(f"port {port} is over 65535")
    return Address(host, int(port))


def parse_addresses(text: str) -> list[Address]:
    """The addresses written as ``host:port,host:port``, in their order. Raises ValueError."""
    return [parse_address(part.strip()) for part in text.split(",")]


class UnixPath(NamedTuple):
    """The path of a Unix socket to listen on."""

    path: str

    def __str__(self) -> str:
        return f"{UNIX}{self.path}"


#: A place to listen on.
Bind: TypeAlias = Address | UnixPath
#: What the path of a Unix socket begins with where an address may stand.
UNIX = "unix:"
#: The longest path of a Unix socket on Linux.
MAX_UNIX_PATH_BYTES = 107


def parse_bind(text: str) -> Bind:
    """The place written as ``host:port``, ``[host]:port`` or ``unix:/path``. Raises ValueError."""
    if not text.startswith(UNIX):
        return parse_address(text)
    path = text.removeprefix(UNIX)
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"{text!r} is not an absolute path of a socket; write it like {UNIX}/run/plainsong.sock")
    if len(path.encode()) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a socket may have {MAX_UNIX_PATH_BYTES} bytes, and {text!r} has more")
    return UnixPath(path)


def parse_binds(text: str) -> list[Bind]:
    """The places written one after the other, separated by commas, each of them once. Raises ValueError."""
    found = [parse_bind(part.strip()) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names an address twice")
    return found


def is_loopback(bind: Bind) -> bool:
    """Whether nobody but this machine can connect there."""
    if isinstance(bind, UnixPath):
        return True
    try:
        return ip_address(bind.host).is_loopback
    except ValueError:
        return bind.host.lower().rstrip(".") == "localhost"


def read_value(meaning: Meaning, raw: object, *, text: bool) -> Any:
    """The value of a setting.

    Args:
      meaning: of the setting.
      raw: a TOML value, or text.
      text: whether it came from the environment or the command line, where everything is text.
    Raises:
      ValueError: it is of a wrong type or out of bounds; the text says what is expected.
    """
    value = _typed(meaning, _from_text(meaning.kind, raw) if text and isinstance(raw, str) else raw)
    if meaning.choices and value not in meaning.choices:
        raise ValueError(f"{value!r} is none of " + ", ".join(meaning.choices))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if meaning.low is not None and not value >= meaning.low:  # a NaN is not in bounds either
            raise ValueError(f"{raw} is too small; the minimum is {show_value(meaning, meaning.low)}")
        if meaning.high is not None and value > meaning.high:
            raise ValueError(f"{raw} is too large; the maximum is {show_value(meaning, meaning.high)}")
    return value


def show_value(meaning: Meaning, value: Any) -> str:
    """A value as it is written in the TOML file, sizes in the largest unit that divides them."""
    if isinstance(value, bool):
        return str(value).lower()
    if meaning.kind is Kind.BYTES:
        return _show_size(int(value))
    if isinstance(value, int | float):
        return str(int(value)) if value == int(value) else repr(value)
    # A TOML basic string: what needs escaping in it is what needs escaping here.
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _from_text(kind: Kind, raw: str) -> object:
    raw = raw.strip()
    if kind is Kind.SWITCH:
        return _SWITCHES.get(raw.lower(), raw)
    if kind in (Kind.COUNT, Kind.WHOLE_SECONDS, Kind.MILLISECONDS):
        return int(raw) if _WHOLE.match(raw) else raw
    if kind is Kind.SECONDS:
        try:
            return float(raw)
        except ValueError:
            return raw
    return raw


def _typed(meaning: Meaning, raw: object) -> Any:
    """``raw`` if it is of the kind; ``true`` is no number here."""
    match meaning.kind:
        case Kind.SWITCH if isinstance(raw, bool):
            return raw
        case Kind.COUNT | Kind.WHOLE_SECONDS | Kind.MILLISECONDS if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        case Kind.SECONDS if isinstance(raw, int | float) and not isinstance(raw, bool):
            return float(raw)
        case Kind.BYTES if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        case Kind.BYTES if isinstance(raw, str):
            return _read_size(raw)
        case Kind.CHOICE if isinstance(raw, str):
            return raw
        case Kind.ADDRESS if isinstance(raw, str):
            return "" if meaning.optional and not raw.strip() else str(parse_address(raw))
        case Kind.BINDS if isinstance(raw, str):
            return ",".join(map(str, parse_binds(raw)))
        case Kind.ADDRESSES if isinstance(raw, str):
            return ",".join(map(str, parse_addresses(raw)))
        case Kind.TEXT if isinstance(raw, str) and not re.search(r"[\x00-\x1f\x7f]", raw):
            return _matching(meaning, raw.strip())
        case Kind.PATH if isinstance(raw, str | Path) and str(raw).strip() and "\0" not in str(raw):
            return Path(raw)
    raise ValueError(f"{raw!r} is not {meaning.kind}")


def _matching(meaning: Meaning, text: str) -> str:
    if meaning.pattern and not re.fullmatch(meaning.pattern, text, re.ASCII):
        raise ValueError(f"{text[:60]!r} is not {meaning.expected}")
    return text


def _read_size(text: str) -> int:
    found = _SIZE.match(text.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not {Kind.BYTES}; the units are B, KiB, MiB, GiB and TiB")
    return int(found[1]) * _UNITS[found[2].upper()]


def _show_size(number: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if number and number % _UNITS[unit.upper()] == 0:
            return f'"{number // _UNITS[unit.upper()]} {unit}"'
    return str(number)
