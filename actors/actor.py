"""Keeping the transaction service's actor running: it is started again from disk whatever made it fall.

Whoever asks while it is loaded for the first time waits for that, as for a topic that is opened: it has only just come
here. Once it has fallen, or could not be loaded, everybody is refused at once until it is there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.errors import NoOwner, PlainsongError, ShuttingDown, TransactionsUnavailable
from storage.base import Deposed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.mailbox import Mailbox
    from actors.observe import TransactionObserver

log = logging.getLogger(__name__)
#: Pauses before the second, third … attempt to load; the last one repeats.
RESTART_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
#: How long its first load is waited for: less than instances wait for each other's answers.
PATIENCE_S = 3.0


class Supervision:
    """Runs the actor behind a mailbox until that is closed; nothing is taken while the actor is not there."""

    def __init__(self, mailbox: Mailbox, observer: TransactionObserver) -> None:
        self._mailbox = mailbox
        self._observer = observer
        self._closing = trio.Event()
        self._failures = 0
        self._begun_s = 0.0
        #: Another instance has, or is to have, the service.
        self.elsewhere = False
        self._tried = trio.Event()
        mailbox.closed_for = service_not_loaded

    async def tried(self) -> None:
        """Waits, for a while, until the first load has come to its end, or nobody is to load it any more."""
        if not self._tried.is_set():
            with trio.move_on_after(PATIENCE_S):
                await self._tried.wait()

    async def run(self, actor: Callable[[Callable[[], None]], Awaitable[None]], on_loaded: Callable[[], None]) -> None:
        """Run ``actor``, which calls what it is given once it is loaded, again and again until it returns."""

        def loaded() -> None:
            self._failures = 0
            if not self._closing.is_set():
                self._mailbox.closed_for = None
            self._tried.set()
            self._observer.loaded(trio.current_time() - self._begun_s)
            on_loaded()

        try:
            while True:
                self._begun_s = trio.current_time()
                try:
                    await actor(loaded)
                    return
                except Deposed as error:
                    self.elsewhere = True
                    log.warning("transaction service taken over", extra={"why": str(error)})
                    return
                except Exception as error:  # noqa: BLE001  # whatever made it fall, it is started again from disk
                    self._fell(error)
                if self._failures > 1:
                    with trio.move_on_after(RESTART_PAUSES_S[min(self._failures, len(RESTART_PAUSES_S)) - 1]):
                        await self._closing.wait()
                if self._closing.is_set():
                    return
        finally:
            self._mailbox.closed_for = self._gone
            self._tried.set()
            self._mailbox.close()
            self._mailbox.drain(self._gone)

    def close(self, *, elsewhere: bool = False) -> None:
        """Take no more; the actor serves what is in, and ends. ``elsewhere``: another instance is to have the service."""
        self.elsewhere |= elsewhere
        self._closing.set()
        self._mailbox.closed_for = self._gone
        self._tried.set()
        self._mailbox.close()

    def _gone(self) -> PlainsongError:
        return service_moved() if self.elsewhere else ShuttingDown("the daemon is shutting down")

    def _fell(self, error: Exception) -> None:
        self._failures += 1
        self._mailbox.closed_for = service_not_loaded
        self._tried.set()
        self._mailbox.drain(service_not_loaded)
        log.error(
            "transaction service fell, loading it again",
            extra={"why": str(error), "failures": self._failures},
            exc_info=None if isinstance(error, PlainsongError) else error,
        )
        self._observer.fell(error)


def service_moved() -> NoOwner:
    """What everybody hears once another instance has it."""
    return NoOwner("another instance owns the transaction service", hint="nothing happened; ask again")


def service_not_loaded() -> TransactionsUnavailable:
    """What everybody hears while the actor is not there."""
    return TransactionsUnavailable("the transaction service is being loaded", hint="plain work goes on meanwhile")
