"""Intercepts batches between our code and plyvel, to record them, delay them, or make them fail."""

from __future__ import annotations

import threading

import trio

from storage.leveldb import LevelDBStore


class Spy:
    """Wraps the newest volume's database and records its batches; it can make the next one fail."""

    def __init__(self, store: LevelDBStore) -> None:
        self.batches: list[dict[str, bool]] = []
        self.fail: Exception | None = None
        self.hold: threading.Event | None = None
        self._entered = threading.Event()
        database = store._db.committer._database
        self._real = database._db
        database._db = self

    def write_batch(self, **options: bool) -> object:
        self.batches.append(options)
        self._entered.set()
        if self.hold is not None:
            self.hold.wait()
        if self.fail is not None:
            raise self.fail
        return self._real.write_batch(**options)

    async def entered(self) -> None:
        """Wait until the commit thread has reached a batch."""
        await trio.to_thread.run_sync(self._entered.wait)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)
