"""Logs, from time to time, that another daemon works on the store of one that is configured as the only one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
#: Pause between two log lines: many topics may be taken every few seconds.
PAUSE_S = 300.0


class Contention:
    """Counts topics claimed by other daemons, for a daemon configured as the only one; call it for each topic."""

    def __init__(self, place: str, clock: Callable[[], float] = trio.current_time) -> None:
        self._place = place
        self._clock = clock
        self._again_s = 0.0
        self._taken = 0

    def __call__(self) -> None:
        """Record that another daemon has claimed a topic."""
        self._taken += 1
        now_s = self._clock()
        if now_s < self._again_s:
            return
        log.warning(
            "another daemon uses this store",
            extra={
                "store": self._place,
                "topics_taken": self._taken,
                "hint": "nothing is lost, but the daemons keep taking topics from each other: set the same "
                "cluster.zookeeper for all daemons of this store, give each deployment a "
                "storage.hbase.table_prefix of its own, or stop one",
            },
        )
        self._again_s = now_s + PAUSE_S
        self._taken = 0
