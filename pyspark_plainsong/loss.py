"""Messages that are gone before they were read: told apart by why, and told in words."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

log = logging.getLogger("pyspark_plainsong")

_WAY_OUT = "failOnDataLoss=false goes on with what there is"


class DataLoss(RuntimeError):
    """Messages are gone, or may be, before they were read."""


class Losses:
    """What is done about them: raise (failOnDataLoss), or say so and go on."""

    def __init__(self, namespace: str, *, fail: bool) -> None:
        self._namespace = namespace
        self._fail = fail
        self._told: set[str] = set()

    def expired(self, topic: str, start: bytes, earliest: bytes) -> None:
        """Messages from ``start`` on may have expired, if any were published then. Raises DataLoss."""
        self._lost(
            f"messages of topic {self._namespace}:{topic} published between {_when(start)} and {_when(earliest)} have "
            f"expired by its time to live, and may not have been read"
        )

    def recreated(self, topic: str, known: int, found: int) -> None:
        """The topic is another one by the same name. Raises DataLoss."""
        self._lost(
            f"topic {self._namespace}:{topic} was deleted and created anew (generation {known} before, {found} now): "
            "what was not read of the former one is gone"
        )

    def deleted(self, topic: str) -> None:
        """There is no such topic any more. Raises DataLoss."""
        self._lost(
            f"topic {self._namespace}:{topic} was deleted: what was not read of it is gone, unless it is undeleted"
        )

    def _lost(self, what: str) -> None:
        if self._fail:
            raise DataLoss(f"{what}; {_WAY_OUT}")
        if what not in self._told and len(self._told) < 1_000:
            self._told.add(what)
            log.warning("%s", what)


def _when(position: bytes) -> str:
    """The time in an id, for people."""
    milliseconds = int.from_bytes(position[:8], "big")
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
