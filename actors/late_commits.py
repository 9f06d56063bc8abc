"""Refuses requests while commits do not count in the object store: ``replication.mode = "sync"``.

From the start until the first base is complete, and whenever the object store does not answer in time, requests that
change something end with ``replication_unavailable``, those whose commit is under way with ``outcome_unknown``. The
commits themselves continue: an actor completes its turn once the commit counts. Until then polls are answered from the
state before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from plainsong.protocol.errors import PlainsongError, ReplicationUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.mailbox import RunQueue
    from storage.replication.counted_store import CountingOutbox

#: Interval between checks of the outbox; while it is unavailable, each check ends the requests of turns under way.
EVERY_S = 0.1


class LateCommits:
    """Watches the commits of one store. From its creation it refuses requests until all commits count."""

    def __init__(
        self,
        outbox: CountingOutbox,
        run_queue: RunQueue,
        end_late: Callable[[Callable[[], PlainsongError]], object],
    ) -> None:
        """Args:
        run_queue: the run queue of all actors.
        end_late: calls ``Actor.end_late`` of every actor.
        """
        self._outbox = outbox
        self._run_queue = run_queue
        self._end_late = end_late
        outbox.on_progress = self._progressed
        self._look()

    async def run(self) -> None:
        """Watch until cancelled; after that, actors no longer wait for commits, so that they can end."""
        try:
            while True:
                self._look()
                await trio.sleep(EVERY_S)
        finally:
            self._outbox.on_progress = lambda: None
            self._run_queue.refusal = None
            self._outbox.close("the daemon is shutting down")

    def _progressed(self) -> None:
        if self._run_queue.refusal is not None:
            self._look()

    def _look(self) -> None:
        self._run_queue.refusal = self._refusal if self._outbox.unavailable else None
        if self._run_queue.refusal is not None:
            self._end_late(self._refusal)

    def _refusal(self) -> PlainsongError:
        why = self._outbox.unavailable or "the object store has not answered in time"
        return ReplicationUnavailable(why, hint="nothing happened; retry")
