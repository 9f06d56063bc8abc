"""Values as people write them on the command line and as they are shown: times, sizes, properties, patterns, isolation.

Times and lengths of time, as people write them on a command line and as they are shown.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.verb import CommandFailed, Exit
from plainsong.positions import NEWEST, OLDEST, parse_start
from plainsong.protocol.errors import InvalidProperty, PlainsongError, nearest
from plainsong.protocol.properties import KNOWN, parse_properties

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong.messages import Held

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LENGTH = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)?\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_ms() -> int:
    """This computer's time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Place(click.ParamType["str | bytes | int"]):
    """A place in a topic: oldest, now, an id, a time, or a time ago.

    Args:
      now: what ``now`` and ``newest`` stand for: the newest message as the daemon knows it, or, for ends,
        this computer's time.
    """

    name = "place"

    def __init__(self, *, now: str = NEWEST) -> None:
        self._now = now

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | bytes | int:
        """``oldest``, ``newest``, an id of 20 bytes, or milliseconds since 1970."""
        if not isinstance(value, str):
            return value  # type: ignore[return-value] # click converts defaults twice
        text = value.strip()
        if text in ("now", NEWEST):
            return NEWEST if self._now == NEWEST else now_ms()
        try:
            found = parse_start(text, now_ms())
        except PlainsongError as error:
            self.fail(f"{error.detail}; {error.hint or 'an id has 40 hex digits'}", param, ctx)
        return OLDEST if found is None else found


class Length(click.ParamType[int]):
    """A length of time, in whole seconds or milliseconds: ``30s``, ``10m``, ``7d``; a bare number is seconds.

    Args:
      unit_s: of the result: 1 for seconds, 0.001 for milliseconds.
    """

    name = "duration"

    def __init__(self, unit_s: float = 1) -> None:
        self._unit_s = unit_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of units; fails for less than one."""
        if isinstance(value, int):
            return value
        seconds = parse_length_s(str(value))
        if seconds is None or round(seconds / self._unit_s) < 1:
            self.fail(f"{str(value)[:40]!r} is no length of time; use for example 30s, 10m, 12h or 7d", param, ctx)
        return round(seconds / self._unit_s)


def parse_length_s(text: str) -> float | None:
    """``7d`` in seconds; None when it is no length of time."""
    found = _LENGTH.match(text.strip())
    return float(found[1]) * _UNITS_S[found[2] or "s"] if found else None


def show_time(timestamp_ms: int) -> str:
    """A time in UTC, to the millisecond, that ``--from`` reads again: 2026-01-31T12:00:00.000Z."""
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return f"{timestamp_ms} ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def show_length(milliseconds: float | None) -> str:
    """A length of time in two units at most: ``3d 4h``, ``12s``, ``250ms``; ``-`` for None."""
    if milliseconds is None:
        return "-"
    left = round(milliseconds)
    if left < 1000:
        return f"{left}ms"
    parts: list[str] = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0"))


def show_ttl(seconds: int) -> str:
    """Seconds as the shortest text that ``Length`` reads again: ``7d``, ``90m``, ``45s``."""
    for unit in ("d", "h", "m"):
        if seconds % int(_UNITS_S[unit]) == 0:
            return f"{seconds // int(_UNITS_S[unit])}{unit}"
    return f"{seconds}s"


# --- properties ------------------------------------------------------------------------------------
#
# Topic properties as people write them: ``ttl=7d``, ``max_bytes=1GiB``, ``deduplication=default``.


#: Stands for whatever the daemon takes when nobody says anything.
DEFAULT = "default"
_SIZE = re.compile(r"(\d{1,19})\s*(B|KiB|MiB|GiB|TiB)?\Z")
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` of a command line. Raises InvalidProperty."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperty(f"{text[:80]!r} has no value", hint="write NAME=VALUE, for example ttl=7d")
        found[name.strip()] = value.strip()
    return checked(found)


def checked(given: Mapping[str, object]) -> dict[str, str]:
    """Properties with their values as the daemon shows them; ``default`` stays.

    Raises:
      InvalidProperty: an unknown name, or a value that is not allowed; the daemon would say the same.
    """
    found = {}
    for name, value in given.items():
        if name not in KNOWN:
            raise InvalidProperty(f"unknown property {name[:80]!r}", hint=nearest(name, KNOWN))
        found[name] = DEFAULT if value == DEFAULT else _normal(name, value)
    parse_properties({name: value for name, value in found.items() if value != DEFAULT})
    return found


def _normal(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidProperty(f"{name} is {value!r}", hint="use a number or a string")
    text = str(value)
    if name == "ttl" and (seconds := parse_length_s(text)) is not None and seconds.is_integer():
        return str(int(seconds))
    if name == "max_bytes" and (size := _SIZE.match(text)):
        return str(int(size[1]) * _SIZES[size[2] or "B"])
    return text


def merged(current: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, Any]:
    """What to send so that only ``changes`` change: the daemon replaces all properties at once."""
    kept = {name: value for name, value in current.items() if name in KNOWN}
    return {name: value for name, value in {**kept, **changes}.items() if value != DEFAULT}


def differences(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
    """What ``wanted`` would change: name → (what it is, what it will be)."""
    found = {}
    for name, value in wanted.items():
        has = current.get(name)
        # The daemon's defaults are its own: only a property that is not shown is known to be at its default.
        if has != value and not (value == DEFAULT and has in (None, *_KNOWN_DEFAULTS.get(name, ()))):
            found[name] = (has, value)
    return found


_KNOWN_DEFAULTS = {"transactional": ("optional",), "deduplication": ("inherit",)}


def show_property(name: str, value: str | None) -> str:
    """A value for people: seconds and bytes in words."""
    if value is None:
        return "none"
    if value.isdigit() and name == "ttl":
        return show_ttl(int(value))
    if value.isdigit() and name == "max_bytes":
        return show_exact_size(int(value))
    return value


def show_exact_size(count: int) -> str:
    """Bytes as ``max_bytes`` reads them again: ``1GiB``, ``1500B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _SIZES[unit] == 0:
            return f"{count // _SIZES[unit]}{unit}"
    return f"{count}B"


# --- patterns --------------------------------------------------------------------------------------
#
# Names and patterns of topics: ``orders-*`` means all that look so.


_WILD = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Whether ``text`` can mean several topics."""
    return bool(_WILD & set(text))


def chosen(there: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those topics that are meant, in their own order; all of them when nothing is said.

    Raises:
      CommandFailed: a name that is no topic's, or a pattern that fits none.
    """
    if not wanted:
        return list(there)
    for each in wanted:
        if is_pattern(each):
            if not any(fnmatchcase(name, each) for name in there):
                raise CommandFailed(f"no topic looks like {each!r}", hint=_known(there), code=Exit.NOT_FOUND)
        elif each not in there:
            hint = nearest(each, there) if there else _known(there)
            raise CommandFailed(f"there is no topic {each!r}", hint=hint, code=Exit.NOT_FOUND)
    return [name for name in there if any(name == each or fnmatchcase(name, each) for each in wanted)]


def _known(there: Sequence[str]) -> str:
    return "plainsong topic list shows those there are" if there else "there are no topics yet: plainsong topic create"


# --- isolation -------------------------------------------------------------------------------------
#
# ``--isolation``: whether a reader gets everything, or only what is committed; and what it is told when it is held.


isolation_option = click.option(
    "--isolation",
    type=click.Choice(("uncommitted", "committed")),
    help="committed: only what is, up to the first that is undecided.",
)


def why_held(topic: str, held: Held | None) -> str:
    """What keeps a committed reader from going on, and how to look closer."""
    if held is None:
        return f"a transaction holds {topic} up: plainsong tx blame {topic}"
    since = "" if held.since_ms is None else f" since {show_length(max(0, now_ms() - held.since_ms))}"
    return f"transaction {held.write_pointer} holds {topic} up{since}: plainsong tx blame {topic}"
