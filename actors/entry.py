"""One open topic: its mailbox, its cache, and the supervision of its actor, which is started again whatever it met.

opened ──► loaded ──► serves ──► let go: idle, changing hands, or the daemon leaves
   ▲                    │
   └── fallen: at once, then with growing pauses; deposed by another owner: the end
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from actors.failing import changed_hands
from actors.mailbox import Mailbox
from actors.ownership import Alone
from actors.scan_cache import TopicCache
from actors.supervision import RESTART_PAUSES_S
from actors.topic import TopicActor
from protocol.errors import NoOwner, PlainsongError, Recovering, ShuttingDown, StorageFailed
from storage.base import Deposed

if TYPE_CHECKING:
    from actors.directory import Directory
    from protocol.names import TopicName

log = logging.getLogger(__name__)


class Entry:
    """One open topic."""

    def __init__(self, name: TopicName, directory: Directory, predecessor: trio.Event | None) -> None:
        self.name = name
        self.mailbox = Mailbox(directory.mailbox_requests, directory.mailbox_bytes)
        self.cache = TopicCache(directory.budget)
        self.actor = TopicActor(name, directory.around, self.mailbox, self.cache)
        self.done = trio.Event()
        #: Set once it was loaded, or could not be.
        self.tried = trio.Event()
        self.used_s = trio.current_time()
        #: The store has said that another instance claimed it.
        self.deposed = False
        self._around = directory.around
        self._predecessor = predecessor
        self._closing = trio.Event()
        self._given_away = False
        self._failures = 0
        self._begun_s = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.name} waiting={len(self.mailbox)} {self.actor!r}>"

    def close(self, *, given_away: bool = False) -> None:
        """Take no more; what is in is served, then the actor ends.

        Args:
          given_away: another instance is to have it: what cannot be served any more hears that, and it is not claimed
            for them.
        """
        self._closing.set()
        self._given_away = given_away
        if given_away:
            self.mailbox.closed_for = self._gone
        self.mailbox.close()

    async def run(self) -> None:
        """Keep the actor running until the mailbox is closed and empty. Never raises."""
        try:
            if self._predecessor is not None:
                await self._predecessor.wait()
            await self._supervise()
        finally:
            self.mailbox.close()
            self.mailbox.drain(self._gone)
            self.tried.set()
            self.done.set()

    def _gone(self) -> PlainsongError:
        if self.deposed or self._given_away:
            return changed_hands(self.name)
        return ShuttingDown("the daemon is shutting down")

    async def _supervise(self) -> None:
        while not self._given_away:
            self._begun_s = trio.current_time()
            try:
                await self.actor.run(self._is_loaded)
                return
            except Deposed as error:
                self._was_deposed(error)
                return
            except NoOwner:
                self._given_away = True
                return
            except Exception as error:  # noqa: BLE001  # whatever made it fall, it is started again from disk
                self._fell(error)
            if self._closing.is_set() and (self._failures > 1 or not len(self.mailbox)):
                return  # nobody waits: a mark that cannot be written costs the next load some time, no more
            if self._failures > 1:
                await self._pause(RESTART_PAUSES_S[min(self._failures - 1, len(RESTART_PAUSES_S)) - 1])

    def _is_loaded(self) -> None:
        self._failures = 0
        self.tried.set()
        if not self._given_away:
            self.mailbox.closed_for = None
        self._around.observer.loaded(self.name, trio.current_time() - self._begun_s)

    def _was_deposed(self, error: Deposed) -> None:
        """Its state may be old: it is neither used nor loaded again here, unless somebody asks and it is ours still."""
        self.deposed = True
        self.mailbox.closed_for = self._gone
        if not self._given_away:
            # Who knows of no others has topics taken from it for ever: that is said once, elsewhere, not for each.
            level = logging.DEBUG if isinstance(self._around.ownership, Alone) else logging.WARNING
            log.log(level, "topic taken over", extra={"topic": str(self.name), "why": str(error)})
        self._around.observer.deposed(self.name)

    def _fell(self, error: BaseException) -> None:
        self._failures += 1
        known = isinstance(error, PlainsongError)
        log.error(
            "topic fell, loading it again",
            extra={"topic": str(self.name), "why": str(error), "failures": self._failures},
            exc_info=None if known else error,
        )
        self._around.observer.fell(self.name, error)
        self.tried.set()
        if self._failures > 1:  # it could not even be loaded: nobody should wait for it
            detail = error.detail if isinstance(error, PlainsongError) else "the topic cannot be loaded"
            self.mailbox.closed_for = lambda: Recovering(detail, hint="the daemon keeps trying")
            self.mailbox.drain(lambda: StorageFailed(detail, hint="the daemon keeps trying"))

    async def _pause(self, pause_s: float) -> None:
        with trio.move_on_after(pause_s):
            await self._closing.wait()
