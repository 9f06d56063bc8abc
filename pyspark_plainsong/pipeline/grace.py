"""Tells a quiet topic from one whose messages expired before a job read them.

If a position is older than the topic's time to live, the connector must assume that later messages have expired. A run
that read everything records the time: all later messages are younger than that. So the next run cannot have lost any of
them if it begins and ends soon enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from plainsong.cli.command import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

#: A run is trusted to lose nothing if it begins within this fraction of the ttl after everything was read.
SAFE_PART: Final = 0.5


class Grace:
    """The time within which a run loses no message, although the connector is not asked to detect losses."""

    def __init__(self) -> None:
        self._until_ms: float | None = None

    def begin(self, complete: Iterable[tuple[float, float]], at_ms: float) -> bool:
        """Begin a run; return True if it cannot have lost anything yet, in which case ``check`` bounds its duration.

        Args:
          complete: for each topic, the time when everything had been read, and the ttl, both in milliseconds.
        """
        topics = list(complete)
        is_safe = all(at_ms - since_ms <= SAFE_PART * ttl_ms for since_ms, ttl_ms in topics)
        self._until_ms = min((since_ms + ttl_ms for since_ms, ttl_ms in topics), default=None) if is_safe else None
        return is_safe

    def check(self, at_ms: float, what: str, hint: str) -> None:
        """Check the duration of a run. Raises CommandFailed: messages may have expired unread."""
        if self._until_ms is not None and at_ms > self._until_ms:
            raise CommandFailed(f"{what} took longer than messages live; some may have expired unread", hint=hint)
