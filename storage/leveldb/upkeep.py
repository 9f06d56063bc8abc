"""What the store does beside commits, in one thread: making and sealing volumes, writing the metadata."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from storage.base import StoreError
from storage.leveldb.errors import without_folders

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class UpkeepThread:
    """A thread that does one job after the other, and ends with ``close``."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self.failed: StoreError | None = None
        """The first failure: what it wrote to must be opened again."""
        self._thread = threading.Thread(target=self._run, name="store upkeep", daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], None]) -> None:
        """Have a job done, unless one of the same name waits already."""
        with self._lock:
            if name in self._names:
                return
            self._names.add(name)

        def run() -> None:
            with self._lock:
                self._names.discard(name)
            if self.failed is None:
                job()

        self._jobs.put(run)

    def settle(self) -> None:
        """Wait until the jobs that wait now are done."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def close(self) -> None:
        """Do the jobs that wait, and end the thread. Idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def fail(self, error: StoreError) -> None:
        """Do no more jobs, since one failed, or something else that is done beside commits."""
        if self.failed is None:
            # Not the object that was raised: its traceback keeps what its frames hold, such as an open database.
            self.failed = StoreError(error.detail, hint=error.hint)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except StoreError as error:
                self.fail(error)
            except Exception as error:
                log.exception("the store's upkeep failed")
                self.fail(StoreError(f"upkeep: {without_folders(repr(error))}"))
