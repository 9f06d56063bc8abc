"""Parses and formats the values of settings, from text or TOML."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from storage.settings import GIB, KIB, MIB, TIB, Kind, Meaning

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
    """Parse an address written as ``host:port`` or ``[host]:port``.

    Raises:
      ValueError: it is malformed, or the port is not in 0..65535.
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
    """Parse addresses written as ``host:port,host:port``, and keep their order. Raises ValueError."""
    return [parse_address(part.strip()) for part in text.split(",")]


class UnixPath(NamedTuple):
    """The path of a Unix socket to listen on."""

    path: str

    def __str__(self) -> str:
        return f"{UNIX}{self.path}"


#: A place to listen on.
Bind: TypeAlias = Address | UnixPath
#: Prefix that distinguishes a Unix socket's path from an address.
UNIX = "unix:"
#: Maximum length of a Unix socket's path on Linux.
MAX_UNIX_PATH_BYTES = 107


def parse_bind(text: str) -> Bind:
    """Parse ``host:port``, ``[host]:port`` or ``unix:/path``. Raises ValueError."""
    if not text.startswith(UNIX):
        return parse_address(text)
    path = text.removeprefix(UNIX)
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"{text!r} is not an absolute socket path; write it like {UNIX}/run/plainsong.sock")
    if len(path.encode()) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"a socket path may have at most {MAX_UNIX_PATH_BYTES} bytes, and {text!r} has more")
    return UnixPath(path)


def parse_binds(text: str) -> list[Bind]:
    """Parse places separated by commas, which must all differ. Raises ValueError."""
    found = [parse_bind(part.strip()) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names an address twice")
    return found


def is_loopback(bind: Bind) -> bool:
    """True if only this machine can connect there."""
    if isinstance(bind, UnixPath):
        return True
    try:
        return ip_address(bind.host).is_loopback
    except ValueError:
        return bind.host.lower().rstrip(".") == "localhost"


def read_value(meaning: Meaning, raw: object, *, text: bool) -> Any:
    """Check and convert the value of a setting.

    Args:
      meaning: the setting's description.
      raw: a TOML value, or text.
      text: True if it came from the environment or the command line, where everything is text.
    Raises:
      ValueError: it has the wrong type or is out of bounds; the message says what is expected.
    """
    value = _typed(meaning, _from_text(meaning.kind, raw) if text and isinstance(raw, str) else raw)
    if meaning.choices and value not in meaning.choices:
        raise ValueError(f"{value!r} is not one of " + ", ".join(meaning.choices))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if meaning.low is not None and not value >= meaning.low:  # a NaN is not in bounds either
            raise ValueError(f"{raw} is too small; the minimum is {show_value(meaning, meaning.low)}")
        if meaning.high is not None and value > meaning.high:
            raise ValueError(f"{raw} is too large; the maximum is {show_value(meaning, meaning.high)}")
    return value


def show_value(meaning: Meaning, value: Any) -> str:
    """Return a value as it is written in the TOML file; a size in the largest unit that divides it."""
    if isinstance(value, bool):
        return str(value).lower()
    if meaning.kind is Kind.BYTES:
        return _show_size(int(value))
    if isinstance(value, int | float):
        return str(int(value)) if value == int(value) else repr(value)
    # The escapes of a JSON string mean the same in a TOML basic string, which also needs one for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


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
    """Return ``raw`` if it is of the setting's kind; ``true`` does not count as a number."""
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
