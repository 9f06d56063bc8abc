"""Where to start reading, in every form people write it, brought to what a poll understands.

"oldest"  "newest"          the first message there is; only what comes from now on
MessageId, 20 bytes, 40 hex digits     just after that message (or at it, where a call says inclusive)
datetime (with a zone), an int         publish time, inclusive; an int is milliseconds since 1970
timedelta, "-10m"                      that long before now, by this computer's clock: s, m, h, d, w
"2026-01-31T12:00:00Z"                 ISO 8601; without a zone it is local time
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter

#: What ``start`` and ``until`` take; None is the same as "oldest".
Start: TypeAlias = "str | bytes | int | datetime | timedelta | None"

NEWEST: Final = "newest"
OLDEST: Final = "oldest"

_RELATIVE = re.compile(r"-\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)\Z")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HINT = "use oldest, newest, an id of 40 hex digits, a time such as 2026-01-31T12:00:00Z, or -10m"


def parse_start(given: Start, now_ms: int) -> bytes | int | None:
    """``given`` as an id (20 bytes), a timestamp in milliseconds, or None for the oldest.

    Args:
      given: anything but "newest", which only the daemon can tell.
      now_ms: this computer's time.
    Raises:
      InvalidParameter, InvalidMessageId: it is none of the forms above; nothing happened.
    """
    if given is None or given == OLDEST:
        return None
    if isinstance(given, str):
        return _parse_text(given.strip(), now_ms)
    if isinstance(given, bytes):
        return bytes(ids.checked_id(given))
    if isinstance(given, timedelta):
        return max(0, now_ms - abs(given) // timedelta(milliseconds=1))
    if isinstance(given, datetime):
        return _timestamp_ms(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return _checked_ms(given)
    raise InvalidParameter(f"{given!r} is no place to start at", hint=_HINT)


def _parse_text(text: str, now_ms: int) -> bytes | int | None:
    relative = _RELATIVE.match(text)
    if relative:
        return max(0, now_ms - int(float(relative[1]) * _SECONDS[relative[2]] * 1000))
    if text.isascii() and text.isdigit() and len(text) < 20:
        return _checked_ms(int(text))
    if len(text) == 2 * ids.ID_BYTES and not any(mark in text for mark in ":-+. "):
        return ids.parse_id(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidParameter(f"{text[:80]!r} is no place to start at", hint=_HINT) from None
    return _timestamp_ms(moment if moment.tzinfo else moment.astimezone())


def _timestamp_ms(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise InvalidParameter(f"{moment} has no zone", hint="use datetime.now(UTC) or moment.astimezone()")
    return _checked_ms((moment - _EPOCH) // timedelta(milliseconds=1))


def _checked_ms(timestamp_ms: int) -> int:
    if not 0 <= timestamp_ms <= ids.MAX_TIMESTAMP_MS:
        raise InvalidParameter(f"the time {timestamp_ms} ms is out of range", hint="use milliseconds since 1970")
    return timestamp_ms


def as_bound(position: bytes | int) -> bytes:
    """A position as the bound before it: what ``until`` (exclusive) is sent as."""
    return position if isinstance(position, bytes) else ids.bound_at(position)
