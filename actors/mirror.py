"""The transaction service as an instance knows it that does not own it: its state, kept up to date by asking.

One question is always waiting at the service for the next change, so that decisions reach topics and held polls here
at once. Whoever is about to read what is committed asks once more: then every commit that was acknowledged before is
seen. What was learnt stays true while the service cannot be reached; it only becomes less.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from actors.together import Together
from protocol.errors import NoOwner, PlainsongError, TransactionsUnavailable
from protocol.transactions.mirrored import UNKNOWN, Mirrored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actors.pointer_index import PointerIndex
    from protocol.names import TopicName
    from protocol.transactions.authority import Standing
    from protocol.transactions.mirrored import Synced, Version
    from protocol.transactions.view import View

log = logging.getLogger(__name__)

#: How long a question waits at the service for a change.
WAIT_MS = 20_000
#: Pauses after a question that was not answered; the last one repeats.
PAUSES_S = (0.02, 0.1, 0.3, 1.0)
#: How long somebody who is about to read waits for a service that is moving.
PATIENCE_S = 2.0


class Peer(Protocol):
    """The transaction service where it is now; over a link, or the object itself.

    Every call raises TransactionsUnavailable while it cannot be reached, and NoOwner while nobody owns it.
    """

    async def sync(self, known: Version, wait_ms: int = 0) -> Synced:
        """See ``TransactionService.sync``."""
        ...

    async def enlist(self, pointer: int, name: TopicName) -> bool:
        """See ``TransactionService.enlist``; asked again, it changes nothing."""
        ...


class Mirror:
    """Implements ``Authority`` and ``Transactions`` from what the service said."""

    def __init__(self, peer: Peer, pointers: PointerIndex) -> None:
        self._peer = peer
        self._pointers = pointers
        self._state = Mirrored()
        self._asking = Together(self._ask_now)
        self._why = "it has not answered yet"
        self._failures = 0
        self._questions: set[trio.CancelScope] = set()

    def __repr__(self) -> str:
        return f"<Mirror {self._state!r}>"

    @property
    def version(self) -> Version:
        """How far the service is known."""
        return self._state.version

    @property
    def is_reached(self) -> bool:
        """Whether the last question was answered."""
        return self._failures == 0 and self._state.version != UNKNOWN

    def forget(self) -> None:
        """What is known will be old when it is asked for again."""
        self._state = Mirrored()

    def learn(self, known: Synced) -> None:
        """Begin with what the service knew that was here a moment ago: it stays true, and only becomes less."""
        self._state = Mirrored()
        self._state.apply(known)

    def ask_again(self) -> None:
        """The service may be somewhere else now: nobody waits any longer for who had it, and may never answer."""
        for question in self._questions:
            question.cancel()

    async def _asked(self, wait_ms: int = 0) -> bool:
        """Whether there was an answer, and not another owner sooner. Raises as ``Peer.sync``."""
        question = trio.CancelScope()
        self._questions.add(question)
        try:
            with question:
                self._take(await self._peer.sync(self._state.version, wait_ms))
                return True
        finally:
            self._questions.discard(question)
        return False

    async def run(self) -> None:
        """Ask for ever. Never raises."""
        while True:
            try:
                await self._asked(WAIT_MS)
            except PlainsongError as error:
                self._failed(error)
                await trio.sleep(PAUSES_S[min(self._failures, len(PAUSES_S)) - 1])

    def _failed(self, error: PlainsongError) -> None:
        self._why = error.detail
        self._failures += 1
        if self._failures == len(PAUSES_S):  # else it is only moving
            log.warning("transaction service not reached", extra={"why": error.detail})

    def _take(self, given: Synced) -> None:
        if self._failures >= len(PAUSES_S):
            log.info("transaction service reached again", extra={"term": given.version.term})
        self._failures = 0
        if self._state.apply(given):
            told = (each for found in given.pointers.values() for each in found)
            pass_on(self._pointers, self._pointers.watched() if given.complete else told, self._state.standing)

    async def fresh(self) -> None:
        """Afterwards ``view`` shows every transaction whose commit was acknowledged before this was called.

        Raises:
          TransactionsUnavailable: the service cannot be reached, or has no owner for a while.
        """
        await self._asking()

    async def _ask_now(self) -> None:
        patience_s = trio.current_time() + PATIENCE_S
        failures = 0
        while True:
            try:
                if await self._asked():
                    return
                patience_s = trio.current_time() + PATIENCE_S  # it has only just moved
                continue
            except (NoOwner, TransactionsUnavailable) as error:
                self._why = error.detail
            pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            if trio.current_time() + pause_s >= patience_s:
                raise self._unreached()
            await trio.sleep(pause_s)
            failures += 1

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer, as far as is known here. Raises TransactionsUnavailable before the first answer."""
        return self._known().standing(pointer)

    def view(self) -> View:
        """What readers of committed messages see; ``fresh`` first. Raises TransactionsUnavailable."""
        return self._known().view()

    def _known(self) -> Mirrored:
        if self._state.version == UNKNOWN:
            raise self._unreached()
        return self._state

    def _unreached(self) -> TransactionsUnavailable:
        return TransactionsUnavailable(
            f"the transaction service cannot be reached: {self._why}", hint="plain work goes on meanwhile"
        )


def pass_on(index: PointerIndex, pointers: Iterable[int], standing: Callable[[int], Standing]) -> None:
    """Tell topics and held readers of this instance what has become of pointers."""
    decided = []
    for pointer in pointers:
        found = standing(pointer)
        if found in ("committed", "aborted"):
            decided.append(pointer)
        elif found == "invalid":
            index.wake(pointer)
    index.decided(decided)
