"""A standby's attempts to take over, and the clients that ask for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from plainsong.protocol.errors import OutcomeUnknown
from storage.replication.notices import LEASE
from storage.replication.protocol import Create, Exchange, TakeOverLost, Verdict

if TYPE_CHECKING:
    from actors.last_error import LastError
    from storage.replication.protocol import Place, Steps


class TakeOver:
    """The request for a take-over by hand, which may have several clients, and the attempt under way."""

    def __init__(self) -> None:
        self.run = b""
        """The run of the attempt under way, or of the one that has succeeded; empty if there is none."""
        self.is_wanted = False
        """True while a client asks for a take-over by hand."""
        self._clients = 0
        #: True if the attempt by hand, or the last one, has sent a seal.
        self._has_sealed = False
        #: False once the attempt has sent a seal that may have taken effect.
        self._is_undone = True
        self._refused = ""
        self._decided = trio.Event()
        self._wake = trio.Event()

    async def ask(self, max_wait_s: float, error: LastError) -> None:
        """Have the standby take over; return once it has.

        Args:
          error: of the standby's requests.
        Raises:
          TakeOverLost, OutcomeUnknown: see ``Standby.take_over``.
        """
        if not self._clients:
            self.is_wanted, self._refused, self._decided = True, "", trio.Event()
            # An attempt whose clients have left may have sent its seal, and continues.
            self._has_sealed = self._has_sealed and bool(self.run)
            self._wake.set()
        self._clients += 1
        try:
            with trio.move_on_after(max_wait_s) as waiting:
                await self._decided.wait()
        finally:
            self._clients -= 1
            if not self._clients:
                self.is_wanted = False  # clients that have given up must not depose the primary later
        if waiting.cancelled_caught:
            why = error.why or "it has not read the log to its end yet"
            if self._has_sealed:
                raise OutcomeUnknown(f"the log may be sealed: {why}", hint="ask the standby for its role")
            raise TakeOverLost(f"the standby cannot take over now: {why}", hint="nothing is taken over; try again")
        if self._refused and not self._is_undone:
            raise OutcomeUnknown(f"the log may be sealed: {self._refused}", hint="ask the standby for its role")
        if self._refused:
            raise TakeOverLost(self._refused, hint="plainsong replica status shows how far the standby is")

    async def pause(self, seconds: float) -> None:
        """Sleep, but not while a client begins to ask."""
        with trio.move_on_after(seconds):
            await self._wake.wait()
        self._wake = trio.Event()

    def refuse(self, why: str) -> None:
        """Answer the clients, if there are any, that the standby cannot take over."""
        if self.is_wanted:
            self.is_wanted, self._refused = False, why
            self._decided.set()

    def lost(self, why: str) -> None:
        """Note that the attempt has ended without effect."""
        self._is_undone = True
        self.refuse(why)

    def succeeded(self) -> None:
        """Answer the clients that the directory is a primary's."""
        self._decided.set()

    def noting_seal(self, attempt: Steps[Place], *, needs_client: bool) -> Steps[Place]:
        """Make an attempt; one by hand stops before its first seal if no client waits for it any more.

        The object store may have been unavailable for hours since the last client gave up.

        Raises:
          TakeOverLost: no client waits.
        """
        answer: object = None
        self._has_sealed, self._is_undone = False, True
        while True:
            try:
                request = attempt.send(answer)
            except StopIteration as done:
                place: Place = done.value
                return place
            if isinstance(request, Create | Exchange) and not self._has_sealed:
                if needs_client and not self._clients:
                    raise TakeOverLost("the client stopped waiting for the take-over")
                self._has_sealed = request.name != LEASE
            answer = yield request
            if self._has_sealed and answer in (Verdict.DONE, Verdict.UNKNOWN):
                self._is_undone = False
