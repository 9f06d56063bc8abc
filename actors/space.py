"""Watching the disk: LevelDB needs room to delete, so publishes stop while there still is some."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from storage.base import Store

log = logging.getLogger(__name__)

#: Seconds between looks at the disk; a gigabyte a second would need a gibibyte of ``min_free_bytes``.
LOOK_INTERVAL_S = 1.0


class SpaceGuard:
    """Whether the disk is nearly full; everybody may ask, one task looks."""

    def __init__(self, store: Store, min_free_bytes: int) -> None:
        self._store = store
        self._min_free_bytes = min_free_bytes
        self.low = False
        self.free_bytes: int | None = None
        self.look()

    def look(self) -> bool:
        """Look now; says so in the log when it changes."""
        self.free_bytes = self._store.statistics().free_bytes
        low = self.free_bytes is not None and self.free_bytes < self._min_free_bytes
        if low != self.low:
            text = "disk nearly full: publishes are refused" if low else "disk has room again: publishes are taken"
            log.warning(text, extra={"free_bytes": self.free_bytes, "min_free_bytes": self._min_free_bytes})
        self.low = low
        return low

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            self.look()
