"""Another daemon on the store of one that believes itself alone: said once in a while, with what to do about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

#: Between two lines about it: each of many topics may be taken every few seconds.
PAUSE_S = 300.0


class Contention:
    """Counts the topics that were taken from this daemon, which knows of no others; call it for each."""

    def __init__(self, place: str, clock: Callable[[], float] = trio.current_time) -> None:
        self._place = place
        self._clock = clock
        self._again_s = 0.0
        self._taken = 0

    def __call__(self) -> None:
        """Another daemon has claimed a topic."""
        self._taken += 1
        now_s = self._clock()
        if now_s < self._again_s:
            return
        log.warning(
            "another daemon is at work on this store",
            extra={
                "store": self._place,
                "topics_taken": self._taken,
                "hint": "nothing is lost, but they take topics from each other for ever: set the same cluster.zookeeper "
                "for all daemons of this store, give each deployment a storage.hbase.table_prefix of its own, or end one",
            },
        )
        self._again_s = now_s + PAUSE_S
        self._taken = 0
