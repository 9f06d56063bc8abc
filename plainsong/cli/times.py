"""Times and lengths of time, as people write them on a command line and as they are shown."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

import click

from plainsong.starts import NEWEST, OLDEST, parse_start
from protocol.errors import PlainsongError

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
