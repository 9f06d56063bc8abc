"""A view of the whole store between two commits: snapshots of what is written, and of a sealed volume once it changes."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong.protocol.effects import Table
    from storage.leveldb.database import Snapshot
    from storage.leveldb.index import DeadRanges
    from storage.leveldb.volume import Volume


class PinnedView:
    """What was there. No volume of it is dropped or rewritten before ``close``."""

    def __init__(
        self,
        metadata: Snapshot,
        volumes: Mapping[Volume, Snapshot | None],
        dead: Mapping[Table, DeadRanges],
        max_s: float,
    ) -> None:
        self.metadata = metadata
        #: Its volumes; with a snapshot where rows were written or changed since.
        self.volumes = dict(volumes)
        self.dead = dead
        self._ends_at_s = time.monotonic() + max_s
        self._lock = threading.Lock()
        self._reading = 0
        self.ended = False

    @property
    def is_over(self) -> bool:
        """Whether its time is."""
        return self.ended or time.monotonic() >= self._ends_at_s

    def renew(self, max_s: float) -> None:
        """Let it last for ``max_s`` from now on, unless it is over."""
        with self._lock:
            if not self.is_over:
                self._ends_at_s = time.monotonic() + max_s

    @contextmanager
    def reading(self) -> Iterator[None]:
        """It does not end before the block does. Raises StoreError: it has ended."""
        with self._lock:
            if self.is_over:
                raise StoreError("the view of the store has ended")
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1

    def end(self) -> bool:
        """Let no more reads begin; whether none is under way, so that it can be closed."""
        with self._lock:
            self.ended = True
            return self._reading == 0
