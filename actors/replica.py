"""The transaction service on every instance: a replica that follows the owner, and routing to the owner.

An instance that does not own the service has a replica of its state. The replica long-polls the service, so that
decisions reach topics and held polls here at once. Before a read of committed messages it syncs again, so that the
reader sees every commit that was acknowledged before. While the service is unreachable the replica's state stays
correct, and only misses later decisions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from actors.mailbox import SingleFlight
from actors.ownership import ClaimPauses
from actors.transaction_actor import service_moved
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, TransactionsUnavailable
from plainsong.protocol.transactions.replica import UNKNOWN_VERSION, ReplicaState
from storage.base import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from actors.ownership import Ownership
    from actors.pointers import PointerIndex
    from actors.transactions import TransactionService
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
    from plainsong.protocol.transactions.transaction import Standing
    from plainsong.protocol.transactions.view import Moment, View

A = TypeVar("A")
log = logging.getLogger(__name__)
#: Duration of a long poll of the service.
WAIT_MS = 20_000
#: Pauses after a request that was not answered; the last one repeats.
PAUSES_S = (0.02, 0.1, 0.3, 1.0)
#: How long a caller waits while the service moves to another owner.
PATIENCE_S = 2.0


class Peer(Protocol):
    """The transaction service at its owner, over a link or in this process.

    Every call raises TransactionsUnavailable while it is unreachable, and NoOwner while no instance owns it.
    """

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """See ``TransactionService.sync``."""
        ...

    async def enlist(self, pointer: int, name: TopicName) -> tuple[int, ...]:
        """See ``TransactionService.enlist``; idempotent."""
        ...

    async def as_of(self, at_ms: int) -> Moment:
        """See ``TransactionService.as_of``; idempotent."""
        ...


class Replica:
    """Answers ``standing`` and ``view`` from the updates of the service."""

    def __init__(self, peer: Peer, pointers: PointerIndex) -> None:
        self._peer = peer
        self._pointers = pointers
        self._state = ReplicaState()
        self._syncing = SingleFlight(self._sync_until_answered)
        self._why = "no answer yet"
        self._backoff = Backoff(PAUSES_S)
        self._requests: set[trio.CancelScope] = set()

    def __repr__(self) -> str:
        return f"<Replica {self._state!r}>"

    @property
    def version(self) -> ReplicaVersion:
        """The version of the replica's state."""
        return self._state.version

    def forget(self) -> None:
        """Drop the state, which will be outdated when this replica is needed again."""
        self._state = ReplicaState()

    def start_from(self, known: ReplicaUpdate) -> None:
        """Start from the last state of the service that ran here; it stays correct, and only misses later changes."""
        self._state = ReplicaState()
        self._state.apply(known)

    def restart_requests(self) -> None:
        """Cancel the requests in flight: the service may have moved, and its previous owner may never answer."""
        for request in self._requests:
            request.cancel()

    async def _sync_once(self, wait_ms: int = 0) -> bool:
        """Ask once; return False if ``restart_requests`` cancelled it. Raises what ``Peer.sync`` raises."""
        request = trio.CancelScope()
        self._requests.add(request)
        try:
            with request:
                self._take(await self._peer.sync(self._state.version, wait_ms))
                return True
        finally:
            self._requests.discard(request)
        return False

    async def run(self) -> None:
        """Follow the service until cancelled. Never raises."""
        while True:
            try:
                await self._sync_once(WAIT_MS)
            except PlainsongError as error:
                await trio.sleep(self._failed(error))

    def _failed(self, error: PlainsongError) -> float:
        """Record a failure; return the pause before the next request, in seconds."""
        self._why = error.detail
        pause_s = self._backoff.failed()
        if self._backoff.failures == len(PAUSES_S):  # fewer failures are normal while the service moves
            log.warning("transaction service not reached", extra={"why": error.detail})
        return pause_s

    def _take(self, given: ReplicaUpdate) -> None:
        if self._backoff.failures >= len(PAUSES_S):
            log.info("transaction service reached again", extra={"term": given.version.term})
        self._backoff.reset()
        if self._state.apply(given):
            named = (each for found in given.pointers.values() for each in found)
            notify_topics(self._pointers, self._pointers.watched() if given.complete else named, self._state.standing)

    async def fresh(self) -> None:
        """Sync, so that ``view`` shows every transaction whose commit was acknowledged before this call.

        Raises:
          TransactionsUnavailable: the service could not be reached, or had no owner, for ``PATIENCE_S``.
        """
        await self._syncing()

    async def _sync_until_answered(self) -> None:
        until_s = trio.current_time() + PATIENCE_S
        backoff = Backoff(PAUSES_S)
        while True:
            try:
                if await self._sync_once():
                    return
                until_s = trio.current_time() + PATIENCE_S  # the service has only just moved
                continue
            except (NoOwner, TransactionsUnavailable) as error:
                self._why = error.detail
            pause_s = backoff.failed()
            if trio.current_time() + pause_s >= until_s:
                raise self._unreached()
            await trio.sleep(pause_s)

    def standing(self, pointer: int) -> Standing:
        """Return a pointer's standing, as of the last sync. Raises TransactionsUnavailable before the first answer."""
        return self._known().standing(pointer)

    def view(self) -> View:
        """Return the view of readers of committed messages; call ``fresh`` first. Raises TransactionsUnavailable."""
        return self._known().view()

    def _known(self) -> ReplicaState:
        if self._state.version == UNKNOWN_VERSION:
            raise self._unreached()
        return self._state

    def _unreached(self) -> TransactionsUnavailable:
        return TransactionsUnavailable(
            f"the transaction service cannot be reached: {self._why}",
            hint=("publishing and polling without transactions still work"),
        )


def notify_topics(index: PointerIndex, pointers: Iterable[int], standing: Callable[[int], Standing]) -> None:
    """Notify topics and held readers of this instance of the pointers that were decided, or became invalid."""
    decided = []
    for pointer in pointers:
        found = standing(pointer)
        if found in ("committed", "aborted"):
            decided.append(pointer)
        elif found == "invalid":
            index.wake(pointer)
    index.decided(decided)


# --- routing: the service while this instance owns it, else the replica ---------------------------
#
#     owned           loaded from the store, under its own claim; serves until another instance should own it
#     not owned       requests get NoOwner, and visibility comes from the replica, as it does while the service loads
#     deposed         ends at once; claimed back after a pause, if this instance still considers itself the owner
#
# Topics and readers of this instance use ``RoutedTransactions`` in all three cases.


class NoPeer:
    """Implements ``Peer`` for a daemon without other instances."""

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """Raise NoOwner."""
        del known, wait_ms
        await trio.lowlevel.checkpoint()
        raise service_moved()

    async def enlist(self, pointer: int, name: TopicName) -> tuple[int, ...]:
        """Raise NoOwner."""
        del pointer, name
        await trio.lowlevel.checkpoint()
        raise service_moved()

    async def as_of(self, at_ms: int) -> Moment:
        """Raise NoOwner."""
        del at_ms
        await trio.lowlevel.checkpoint()
        raise service_moved()


class RoutedTransactions:
    """Implements ``Authority`` and ``Transactions``; ``home`` is the service while this instance owns it."""

    def __init__(
        self,
        build: Callable[[], TransactionService],
        ownership: Ownership,
        pointers: PointerIndex,
        peer: Peer | None = None,
    ) -> None:
        """``build``: makes a service that is not started; called each time this instance becomes its owner."""
        self._build = build
        self._ownership = ownership
        self._pointers = pointers
        self._peer = NoPeer() if peer is None else peer
        self.replica = Replica(self, pointers)
        self.home: TransactionService | None = None
        self._service: TransactionService | None = None
        #: True once the service here is loaded, and more up to date than the replica.
        self._is_loaded = False
        self._changed = trio.Event()
        self._pauses = ClaimPauses()
        self._closing = False
        ownership.on_change(self._view_changed)

    def __repr__(self) -> str:
        return f"<RoutedTransactions {self.home or self.replica!r}>"

    @property
    def is_alone(self) -> bool:
        """True if no other instance can own the service."""
        return isinstance(self._peer, NoPeer)

    # --- life -------------------------------------------------------------------------------------

    async def run(self, on_known: Callable[[], None] = lambda: None) -> None:
        """Serve or follow the service until closed. ``on_known``: called whenever the committed state becomes known."""
        while not self._closing:
            if self._is_ours():
                await self._serve(on_known)
            else:
                await self._follow(on_known)

    def close(self) -> None:
        """Refuse new requests; the service serves the waiting ones, then ``run`` returns."""
        self._closing = True
        if self._service is not None:
            self._service.close()
        self._wake()

    def _is_ours(self) -> bool:
        return self._ownership.is_mine(SERVICE_NAME) and not self._pauses.holds(SERVICE_NAME, trio.current_time())

    def _view_changed(self) -> None:
        self._pauses.end()
        if self._service is not None and not self._ownership.is_mine(SERVICE_NAME):
            self._give_away(self._service)
        self.replica.restart_requests()
        self._wake()

    def _give_away(self, service: TransactionService) -> None:
        """Close the service; readers use its last state until the next owner has sent an update."""
        known = service.known
        if self.home is not None and known is not None:
            self.replica.start_from(known)
        self.home, self._is_loaded = None, False
        service.close(given_away=True)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _follow(self, on_known: Callable[[], None]) -> None:
        """Follow the service until this instance owns it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.replica.run)
            nursery.start_soon(self._announce, on_known)
            while not (self._is_ours() or self._closing):
                with trio.move_on_after(PAUSES_S[-1]):  # a pause may end without a change of the view
                    await self._changed.wait()
            nursery.cancel_scope.cancel()

    async def _announce(self, on_known: Callable[[], None]) -> None:
        try:
            await self.replica.fresh()
        except PlainsongError:
            return  # the start of the daemon waits for this only for a limited time
        on_known()

    async def _serve(self, on_known: Callable[[], None]) -> None:
        """Run the service for as long as this instance owns it."""
        service = self.home = self._service = self._build()

        def loaded() -> None:
            if self.home is service:
                self._is_loaded = True
                self.replica.forget()
            notify_topics(self._pointers, self._pointers.watched(), service.standing)
            on_known()

        try:
            await service.run(loaded)
        finally:
            self.home, self._service, self._is_loaded = None, None, False
        if service.deposed and self._ownership.is_mine(SERVICE_NAME):
            self._ownership.deposed(SERVICE_NAME)
            self._pauses.begin(SERVICE_NAME, trio.current_time())

    # --- for topics and readers -------------------------------------------------------------------

    def standing(self, pointer: int) -> Standing:
        """Return a pointer's standing, as far as it is known here. Raises TransactionsUnavailable."""
        return self._known().standing(pointer)

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """See ``Authority``; raises TransactionsUnavailable. Topics use their enlistments instead."""
        return (pointer,) if self.home is None else self.home.pointers_of(pointer)

    def view(self) -> View:
        """Return the view of readers of committed messages; call ``fresh`` first. Raises TransactionsUnavailable."""
        return self._known().view()

    def _known(self) -> TransactionService | Replica:
        return self.home if self.home is not None and self._is_loaded else self.replica

    def view_now(self) -> View | None:
        """Return None: on a shared store another instance may have taken the service over."""
        return None

    async def fresh(self) -> None:
        """Sync, so that ``view`` shows every transaction whose commit was acknowledged before this call.

        Raises TransactionsUnavailable.
        """
        if self.home is not None:
            try:
                await self.home.fresh()
                return
            except NoOwner:
                pass  # the service has just moved
        await self.replica.fresh()
        if self.home is not None:
            await self.home.fresh()

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """See ``Peer.sync``; the service may have moved here since the request was sent."""
        return await (self._peer if self.home is None else self.home).sync(known, wait_ms)

    async def enlist(self, pointer: int, name: TopicName) -> tuple[int, ...]:
        """See ``TransactionService.enlist``; asks the owner, and waits up to ``PATIENCE_S`` while the service moves.

        A lost answer is harmless: the topic has written nothing yet, and closes the pointer before the decision.

        Raises:
          TransactionsUnavailable, NoOwner, TransactionNotInProgress, Overloaded: nothing happened.
        """
        return await self._at_owner(lambda owner: owner.enlist(pointer, name))

    async def as_of(self, at_ms: int) -> Moment:
        """See ``TransactionService.as_of``; asks the owner, and waits up to ``PATIENCE_S`` while the service moves.

        Raises:
          TransactionsUnavailable: the service cannot be reached. AsOfTooOld, InvalidParameter.
        """
        try:
            return await self._at_owner(lambda owner: owner.as_of(at_ms))
        except NoOwner as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error

    async def _at_owner(self, ask: Callable[[Peer], Awaitable[A]]) -> A:
        """Send an idempotent request to the owner, here or over a link; retry up to ``PATIENCE_S`` while it moves."""
        until_s = trio.current_time() + PATIENCE_S
        backoff = Backoff(PAUSES_S)
        while True:
            try:
                return await ask(self._peer if self.home is None else self.home)
            except (NoOwner, TransactionsUnavailable, OutcomeUnknown) as error:
                pause_s = backoff.failed()
                if trio.current_time() + pause_s >= until_s:
                    if isinstance(error, OutcomeUnknown):
                        raise TransactionsUnavailable(error.detail, hint="nothing happened; retry") from error
                    raise
            await trio.sleep(pause_s)
