"""What the transaction service says to those who read, here and at other instances: how far it is, and that it is so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from actors.supervision import moved, not_loaded
from actors.together import Together
from protocol.errors import Overloaded, PlainsongError, TransactionsUnavailable
from protocol.transactions.mirrored import synced
from storage.base import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.supervision import Supervision
    from actors.transaction_actor import TransactionActor
    from protocol.transactions.manager.core import ManagerCore
    from protocol.transactions.mirrored import Synced, Version
    from storage.base import Store

#: Instances that wait for changes at the same time.
MAX_MIRRORS = 1_000


class Mirrors:
    """Answers for one service; where others may claim it, never without having seen that it is still the one."""

    def __init__(
        self, store: Store, actor: TransactionActor, supervision: Supervision, deposed: Callable[[], object]
    ) -> None:
        """``deposed``: called when the store says that another instance has claimed the service."""
        self._store = store
        self._actor = actor
        self._supervision = supervision
        self._deposed = deposed
        self._checking = Together(self._check)
        self._waiting = 0

    async def fresh(self) -> None:
        """See ``TransactionService.fresh``."""
        await self._supervision.tried()
        self._here()
        if self._store.traits.shared:
            await self._checking()
        else:
            await trio.lowlevel.checkpoint()

    async def _check(self) -> None:
        core, claim = self._here(), self._actor.claim
        assert claim is not None  # there is a core
        try:
            await self._store.check(claim)
        except Deposed:
            self._deposed()
            raise moved() from None
        except PlainsongError as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error
        if self._actor.core is not core:
            raise not_loaded()

    async def sync(self, known: Version, wait_ms: int) -> Synced:
        """See ``TransactionService.sync``."""
        await self._supervision.tried()
        self._here()
        if wait_ms and known == self._actor.changes.version:
            await self._change(wait_ms)
        await self.fresh()
        return synced(self._here(), self._actor.changes, known)

    async def _change(self, wait_ms: int) -> None:
        if self._waiting >= MAX_MIRRORS:
            raise Overloaded(f"{self._waiting} instances wait for the transaction service")
        self._waiting += 1
        try:
            with trio.move_on_after(wait_ms / 1000):
                await self._actor.changed.wait()
        finally:
            self._waiting -= 1

    def _here(self) -> ManagerCore:
        if self._supervision.elsewhere:
            raise moved()
        if self._actor.core is None:
            raise not_loaded()
        return self._actor.core
