"""Old logs under a schedule: commits hand over descriptors, LevelDB removes files, a thread shortens unlinked logs.

A thread of the schedule acts for LevelDB, whose own thread removes logs at moments that a seed cannot repeat.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from storage.leveldb.engine.old_logs import STEP_BYTES, OldLogs
from tests.schedules import scheduler as sched
from tests.schedules.scheduler import Scheduler
from tests.schedules.world import World, Wrong, patched

#: Three steps and a partial one.
_BYTES = 3 * STEP_BYTES + 100
_LOGS = 6


class OldLogsWorld(World):
    """A few logs, each handed over, read while it has a name, and removed."""

    def __init__(self, directory: Path, chosen: Scheduler, *, steps: int, faults: float = 0.0) -> None:
        super().__init__(directory, chosen, steps=steps, faults=0.0)
        self.random: Random = chosen.random
        self._descriptors: set[int] = set()

    def run(self) -> None:
        """Hand over and remove all logs; at the end no descriptor may be open."""
        self.old_logs = OldLogs(nap=sched.nap, meanwhile=sched.point)
        self.directory.mkdir(exist_ok=True)
        for number in range(_LOGS):
            self._path(number).touch()
            os.truncate(self._path(number), _BYTES)
        threads = [
            sched.Thread(target=self._commit, name="commit"),
            *(sched.Thread(target=each, name=each.__name__) for each in (self._open_again, self._remove)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sched.scheduler().wait_until(lambda: not self.old_logs.count)
        for descriptor in self._descriptors:
            try:
                os.fstat(descriptor)
            except OSError:
                self._used("closed")
            else:
                raise Wrong("a descriptor is still open")

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:06d}.log"

    def _commit(self) -> None:
        for number in range(_LOGS):
            try:
                descriptor = os.open(self._path(number), os.O_RDWR)
            except FileNotFoundError:
                continue
            self._descriptors.add(descriptor)
            self.old_logs.take(descriptor)
            self._used("given")

    def _open_again(self) -> None:
        """Read every log that has a name, as reopening the database does."""
        for number in range(_LOGS):
            sched.point()
            path = self._path(number)
            # stat() by name is one call: a file that has lost its name is not found.
            if path.exists() and os.stat(path).st_size != _BYTES:
                raise Wrong("a log that has a name was shortened")
            self._used("read")

    def _remove(self) -> None:
        for number in self.random.sample(range(_LOGS), _LOGS):
            sched.nap(self.random.random() / 10)
            os.unlink(self._path(number))  # unlink is a point


@contextmanager
def patched_logs(world: World) -> Iterator[None]:
    """Run ``old_logs`` under a schedule."""
    with patched(world):
        yield


#: Options for exploring schedules of old logs.
OLD_LOGS: dict[str, Any] = {
    "make": OldLogsWorld,
    "patches": patched_logs,
    "files": ("storage/leveldb/engine/old_logs.py",),
}
