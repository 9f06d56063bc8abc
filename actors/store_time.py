"""Compares the clock with the newest time that the topics in the store have assigned.

    behind   publish times do not advance until the clock has caught up, and nothing expires
    ahead    messages expire at once: correct after a long stop, wrong if the clock is set wrong

The two causes of "ahead" cannot be distinguished here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import HIGH_WATER, SYSTEM, DamagedRow, stop_after
from plainsong.protocol.plurals import counted
from plainsong.protocol.records import HighWater
from storage.base import StoreUnusable, read_rows

if TYPE_CHECKING:
    from typing import NoReturn

    from actors.directory import Directory
    from actors.observe import Clock
    from storage.base import Store

log = logging.getLogger(__name__)
#: Differences up to this are normal between two clocks, and not reported.
SLACK_MS = 60_000
#: Topics whose times are read at startup; a sample of this size is enough to find the newest time.
MAX_TOPICS = 10_000
#: The same, for a store with a round trip for each read.
MAX_TOPICS_SHARED = 500
#: Seconds between two comparisons of the clock with the open topics.
LOOK_S = 5.0
_DAY_MS = 86_400_000


class StoreTime:
    """The newest time in the store."""

    def __init__(self, clock: Clock, directory: Directory) -> None:
        self._clock = clock
        self._directory = directory
        self._started_ms = 0
        #: True once the log says that the clock is behind.
        self._is_reported = False

    async def load(self, store: Store, max_ahead_s: int = 0) -> None:
        """Read the times of topics, and log if the clock disagrees with them.

        Args:
          max_ahead_s: the clock may be ahead by this much; 0: by any amount.
        Raises:
          StoreError: the store could not be read.
          StoreUnusable: the clock is too far ahead; nothing was changed.
        """
        start = SYSTEM + HIGH_WATER
        limit = MAX_TOPICS_SHARED if store.traits.shared else MAX_TOPICS
        for _, value in await read_rows(store, Table.METADATA, start, stop_after(start), limit=limit):
            try:
                mark = HighWater.decode(value)
            except DamagedRow:
                continue  # the topic's own load reports it
            self._started_ms = max(self._started_ms, mark.time_ms, mark.last_ts_ms)
        if not self._started_ms:
            return
        ahead_ms = self._clock.now_ms() - self._started_ms
        if 0 < max_ahead_s * 1000 < ahead_ms:
            raise StoreUnusable(
                f"the clock is {shown_ms(ahead_ms)} ahead of the newest time in the store, and expired messages "
                "cannot be restored",
                hint="correct the clock; or, if the store was unused for that long, start once with --set "
                "storage.max_clock_ahead_s=0",
            )
        self._report(-ahead_ms)
        if self._is_reported:
            return
        if ahead_ms > _DAY_MS:
            log.warning(
                "the clock is far ahead of the store: the daemon was stopped for that long, or the clock is wrong",
                extra={"ahead_s": ahead_ms // 1000},
            )
        elif ahead_ms > SLACK_MS:
            log.info("the clock is ahead of the store", extra={"ahead_s": ahead_ms // 1000})

    async def watch(self) -> NoReturn:
        """Log when the clock falls behind. After a crash, a topic's newest time is known only once it is open."""
        while True:
            await trio.sleep(LOOK_S)
            self._report(self.behind_ms())

    def behind_ms(self) -> int:
        """Return how far the clock is behind the newest time of the store and of the open topics, 0 if it is not."""
        newest_ms = self._started_ms
        for entry in self._directory:
            core = entry.actor.core
            if core is not None:
                newest_ms = max(newest_ms, core.state.time_ms)
        return max(0, newest_ms - self._clock.now_ms())

    def _report(self, behind_ms: int) -> None:
        """Log once that the clock is behind, until it has caught up."""
        was_reported, self._is_reported = self._is_reported, behind_ms > SLACK_MS
        if self._is_reported and not was_reported:
            log.warning(
                "the clock is behind the store: publish times do not advance until it has caught up",
                extra={"behind_s": behind_ms // 1000},
            )


def shown_ms(duration_ms: int) -> str:
    """Format a duration for people, such as ``3 minutes`` or ``2 days``, rounded down."""
    seconds = duration_ms // 1000
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            return counted(seconds // size, unit)
    return f"{seconds} s"
