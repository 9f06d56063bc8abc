"""Values as people write them on the command line and as they are shown: times, sizes, properties, patterns, isolation."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.command import CommandFailed, Exit
from plainsong.positions import NEWEST, OLDEST, now_ms, parse_start
from plainsong.protocol.errors import InvalidProperty, PlainsongError, nearest
from plainsong.protocol.properties import KNOWN, parse_properties, shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong.protocol.page import Held

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LENGTH = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)?\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Place(click.ParamType["str | bytes | int"]):
    """A place in a topic: oldest, now, an id, a time, or a time ago.

    Args:
      now: what ``now`` and ``newest`` mean: by default the daemon's newest message; otherwise this computer's
        time, for the end of a range.
    """

    name = "place"

    def __init__(self, *, now: str = NEWEST) -> None:
        self._now = now

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | bytes | int:
        """Return ``oldest``, ``newest``, an id of 20 bytes, or milliseconds since 1970."""
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
    """A duration such as ``30s``, ``10m`` or ``7d``, converted to an integer; a bare number is seconds.

    Args:
      unit_s: unit of the result: 1 for seconds, 0.001 for milliseconds.
    """

    name = "duration"

    def __init__(self, unit_s: float = 1) -> None:
        self._unit_s = unit_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        seconds = parse_length_s(str(value))
        if seconds is None or round(seconds / self._unit_s) < 1:
            self.fail(f"invalid duration {str(value)[:40]!r}; use for example 30s, 10m, 12h or 7d", param, ctx)
        return round(seconds / self._unit_s)


def parse_length_s(text: str) -> float | None:
    """Parse a duration such as ``7d`` to seconds; return None if it is malformed."""
    found = _LENGTH.match(text.strip())
    return float(found[1]) * _UNITS_S[found[2] or "s"] if found else None


def show_time(timestamp_ms: int) -> str:
    """Format a time in UTC, to the millisecond, as ``--from`` accepts it: 2026-01-31T12:00:00.000Z."""
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return f"{timestamp_ms} ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def show_length(milliseconds: float | None) -> str:
    """Format a duration in at most two units: ``3d 4h``, ``12s``, ``250ms``; ``-`` for None."""
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
    """Format seconds in the largest unit up to days that divides them: ``7d``, ``90m``, ``45s``."""
    for unit in ("d", "h", "m"):
        if seconds % int(_UNITS_S[unit]) == 0:
            return f"{seconds // int(_UNITS_S[unit])}{unit}"
    return f"{seconds}s"


# --- properties ------------------------------------------------------------------------------------
#
# ``ttl=7d``, ``max_bytes=1GiB``, ``deduplication=default``.


#: The value that restores the daemon's default.
DEFAULT = "default"
#: Examples of values that people often get wrong.
_EXAMPLES = {
    "ttl": "write for example ttl=7d, ttl=12h or ttl=90s",
    "max_bytes": "write for example max_bytes=10GiB or 500MiB",
}
_SIZE = re.compile(r"(\d{1,19})\s*(B|KiB|MiB|GiB|TiB)?\Z")
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``. Raises InvalidProperty."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperty(f"{text[:80]!r} has no value", hint="write NAME=VALUE, for example ttl=7d")
        found[name.strip()] = value.strip()
    return checked(found)


def checked(given: Mapping[str, object]) -> dict[str, str]:
    """Convert values to the daemon's form; ``default`` stays.

    Raises:
      InvalidProperty: an unknown name, or a value that the daemon would refuse too.
    """
    found = {}
    for name, value in given.items():
        if name not in KNOWN:
            raise InvalidProperty(f"unknown property {name[:80]!r}", hint=nearest(name, KNOWN))
        found[name] = DEFAULT if value == DEFAULT else _normal(name, value)
    for name, value in found.items():
        if value == DEFAULT:
            continue
        try:
            parse_properties({name: value})
        except InvalidProperty as error:
            error.hint = _EXAMPLES.get(name, error.hint)
            raise
    return found


def _normal(name: str, value: object) -> str:
    is_too_long = isinstance(value, int) and value.bit_length() > 64
    if isinstance(value, bool) or not isinstance(value, int | str) or is_too_long:
        raise InvalidProperty(
            f"invalid value {shown_value(value)} of {name}", hint=_EXAMPLES.get(name, "use a number or a string")
        )
    text = str(value)
    if name == "ttl" and (seconds := parse_length_s(text)) is not None and seconds.is_integer():
        return str(int(seconds))
    if name == "max_bytes" and (size := _SIZE.match(text)):
        return str(int(size[1]) * _SIZES[size[2] or "B"])
    return text


def merged(current: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, Any]:
    """Return all properties to send, since the daemon replaces all at once."""
    kept = {name: value for name, value in current.items() if name in KNOWN}
    return {name: value for name, value in {**kept, **changes}.items() if value != DEFAULT}


def differences(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
    """Return what ``wanted`` would change: name → (current value, new value)."""
    found = {}
    for name, value in wanted.items():
        has = current.get(name)
        # The daemon's other defaults are unknown here: only a property that is not shown is certain to have its default.
        if has is None and value in _NOT_SHOWN.get(name, ()):
            continue
        if has != value and not (value == DEFAULT and has in (None, *_KNOWN_DEFAULTS.get(name, ()))):
            found[name] = (has, value)
    return found


#: Values that the daemon does not show.
_NOT_SHOWN = {"chain": ("none",)}
_KNOWN_DEFAULTS = {"transactional": ("optional",), "deduplication": ("inherit",), "chain": ("none",)}


def show_property(name: str, value: str | None) -> str:
    """Format a value with units: seconds as a duration, bytes as a size."""
    if value is None:
        return "none"
    if value.isdigit() and name == "ttl":
        return show_ttl(int(value))
    if value.isdigit() and name == "max_bytes":
        return show_exact_size(int(value))
    return value


def show_exact_size(count: int) -> str:
    """Format bytes as ``max_bytes`` accepts them: ``1GiB``, ``1500B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _SIZES[unit] == 0:
            return f"{count // _SIZES[unit]}{unit}"
    return f"{count}B"


# --- patterns --------------------------------------------------------------------------------------


_WILD = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """True if ``text`` has wildcards, so that it may match several topics."""
    return bool(_WILD & set(text))


def chosen(existing: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the topics that names and patterns match, in the order of ``existing``; all if ``wanted`` is empty.

    Raises:
      CommandFailed: a name or a pattern matches no topic.
    """
    if not wanted:
        return list(existing)
    for each in wanted:
        if is_pattern(each):
            if not any(fnmatchcase(name, each) for name in existing):
                raise CommandFailed(f"no topic matches {each!r}", hint=_known(existing), code=Exit.NOT_FOUND)
        elif each not in existing:
            hint = nearest(each, existing) if existing else _known(existing)
            raise CommandFailed(f"there is no topic {each!r}", hint=hint, code=Exit.NOT_FOUND)
    return [name for name in existing if any(name == each or fnmatchcase(name, each) for each in wanted)]


def _known(existing: Sequence[str]) -> str:
    return (
        "plainsong topic list shows the topics"
        if existing
        else "there are no topics yet; plainsong topic create creates one"
    )


# --- isolation -------------------------------------------------------------------------------------


isolation_option = click.option(
    "--isolation",
    type=click.Choice(("uncommitted", "committed")),
    help="committed (the default): up to the first undecided message. uncommitted: also undecided and rolled-back "
    "messages.",
)


class Time(click.ParamType[int]):
    """A moment: a time, or a time ago; converted to milliseconds since 1970."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            found = parse_start(str(value).strip(), now_ms())
        except PlainsongError:
            found = None
        if not isinstance(found, int):
            self.fail(f"invalid time {str(value)[:40]!r}; use for example -10m or 2026-01-31T12:00Z", param, ctx)
        return found


as_of_option = click.option(
    "--as-of",
    "as_of_ms",
    type=Time(),
    metavar="TIME",
    help="Read exactly what had been committed by this time: 2026-01-31T12:00Z, milliseconds since 1970, or -10m.",
)


def why_held(topic: str, held: Held | None) -> str:
    """Return which transaction holds a committed reader, and the command that shows more."""
    if held is None:
        return f"a transaction holds readers of {topic}: plainsong tx blame {topic}"
    since = "" if held.since_ms is None else f" since {show_length(max(0, now_ms() - held.since_ms))}"
    return f"transaction {held.write_pointer} holds readers of {topic}{since}: plainsong tx blame {topic}"
