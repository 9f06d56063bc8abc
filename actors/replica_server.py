"""Answers the instances that follow the transaction service; the other side is ``actors/replica.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from actors.mailbox import SingleFlight
from actors.transaction_actor import service_moved, service_not_loaded
from plainsong.protocol.errors import Overloaded, PlainsongError, TransactionsUnavailable
from plainsong.protocol.transactions.replica import replica_update
from storage.base import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.transaction_actor import ServiceSupervision, TransactionActor
    from plainsong.protocol.transactions.manager import ManagerCore
    from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
    from storage.base import Store

#: Maximum number of instances that wait for changes.
MAX_REPLICAS = 1_000


class ReplicaServer:
    """Answers replicas for one service; on a shared store, only after checking that its claim holds."""

    def __init__(
        self, store: Store, actor: TransactionActor, supervision: ServiceSupervision, deposed: Callable[[], object]
    ) -> None:
        """``deposed``: called if another instance has claimed the service in the store."""
        self._store = store
        self._actor = actor
        self._supervision = supervision
        self._deposed = deposed
        self._checking = SingleFlight(self._check)
        self._waiting = 0

    async def fresh(self) -> None:
        """See ``TransactionService.fresh``."""
        await self._supervision.first_load()
        self._here()
        if self._store.traits.shared:
            await self._checking()
        else:
            await trio.lowlevel.checkpoint()

    async def _check(self) -> None:
        core, claim = self._here(), self._actor.claim
        assert claim is not None  # a loaded actor has a claim
        try:
            await self._store.check(claim)
        except Deposed:
            self._deposed()
            raise service_moved() from None
        except PlainsongError as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error
        if self._actor.core is not core:
            raise service_not_loaded()

    async def sync(self, known: ReplicaVersion, wait_ms: int) -> ReplicaUpdate:
        """See ``TransactionService.sync``."""
        await self._supervision.first_load()
        self._here()
        if wait_ms and known == self._actor.changes.version:
            await self._change(wait_ms)
        await self.fresh()
        return replica_update(self._here(), self._actor.changes, known)

    async def _change(self, wait_ms: int) -> None:
        if self._waiting >= MAX_REPLICAS:
            raise Overloaded(f"too many instances wait for the transaction service: {self._waiting}")
        self._waiting += 1
        try:
            with trio.move_on_after(wait_ms / 1000):
                await self._actor.changed.wait()
        finally:
            self._waiting -= 1

    def _here(self) -> ManagerCore:
        if self._supervision.is_elsewhere:
            raise service_moved()
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core
