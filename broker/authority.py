"""The daemon's transaction authority: its own service, a Tephra service, or none; its start and its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from actors.ownership import Alone
from actors.pointers import Enlistments
from actors.replica import RoutedTransactions
from actors.tephra import ForeignTephra
from actors.transactions import TransactionService
from broker.config.values import parse_address
from plainsong.protocol.errors import TransactionsUnavailable
from plainsong.protocol.transactions.ledger import TransactionSettings
from storage.base import SERVICE_NAME

if TYPE_CHECKING:
    from actors.decisions import AskTopic
    from actors.invalid_list import InvalidList
    from actors.mailbox import RunQueue
    from actors.observe import Clock, TransactionObserver
    from actors.ownership import Ownership
    from actors.pointers import PointerIndex
    from actors.replica import Peer
    from broker.config.sections import TransactionsConfig
    from plainsong.protocol.transactions.transaction import Standing
    from plainsong.protocol.transactions.view import Moment, View
    from storage.base import Store

log = logging.getLogger(__name__)
#: The longest time that the start waits for the daemon's own service, which is loaded from disk, and for Tephra. Plain
#: publishes and polls need neither.
START_PATIENCE_S = 10.0
FOREIGN_PATIENCE_S = 1.0


class Transactions(Protocol):
    """The authority on transactions. Called on the event loop; it never waits, except in ``fresh`` and ``as_of``."""

    def standing(self, pointer: int) -> Standing:
        """Return the state of a pointer, of a transaction or a checkpoint. Raises TransactionsUnavailable."""
        ...

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all known write pointers of a pointer's transaction. Raises TransactionsUnavailable."""
        ...

    def view(self) -> View:
        """Return the current view of committed readers. Raises TransactionsUnavailable."""
        ...

    def view_now(self) -> View | None:
        """Return ``view`` if it has every commit that was acknowledged before the call; None: call ``fresh`` first."""
        ...

    async def fresh(self) -> None:
        """Wait until the view has every commit that was acknowledged before the call. Raises the same as ``view``."""
        ...

    async def as_of(self, at_ms: int) -> Moment:
        """Return what had been committed by a moment. The result never changes.

        Raises:
          TransactionsUnavailable: currently unknown, or times of decisions are not recorded.
          AsOfTooOld: no longer known. InvalidParameter: the moment is in the future.
        """
        ...


class SwitchedOff:
    """``transactions.service = "off"``: clients manage pointers themselves; every pointer's state is unknown."""

    def standing(self, pointer: int) -> Standing:
        """Return "unknown"."""
        del pointer
        return "unknown"

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return only the pointer."""
        return (pointer,)

    def view(self) -> View:
        """Raises TransactionsUnavailable: readers must send their own snapshots."""
        raise TransactionsUnavailable(
            "this daemon has no transaction service",
            hint='set transactions.service to "embedded", or poll with a transaction of your own service',
        )

    def view_now(self) -> View | None:
        """Return None."""
        return None

    async def fresh(self) -> None:
        """Raises the same as ``view``."""
        self.view()

    async def as_of(self, at_ms: int) -> Moment:
        """Raises TransactionsUnavailable: times of decisions are unknown."""
        del at_ms
        await trio.lowlevel.checkpoint()
        raise TransactionsUnavailable(
            "this daemon has no transaction service, so it cannot read as of a moment",
            hint='set transactions.service to "embedded"',
        )


@dataclass(slots=True)
class Authority:
    """The authority in force, with its start and end."""

    transactions: Transactions = field(default_factory=SwitchedOff)
    own: TransactionService | None = None
    """The daemon's own service, if no other instance can own it."""
    routed: RoutedTransactions | None = None
    """If several instances share the store: the service is here only while this instance owns it."""
    foreign: ForeignTephra | None = None
    """The Tephra service that decides, if there is one."""
    ownership: Ownership = field(default_factory=Alone)
    """Which instance owns what, if several share the store."""
    _ended: trio.Event = field(default_factory=trio.Event)

    @property
    def embedded(self) -> TransactionService | None:
        """The service, if it is here now."""
        return self.own if self.routed is None else self.routed.home

    @property
    def enlistments(self) -> Enlistments | None:
        """Enlists topics before they write under a pointer; None if that is not necessary."""
        return None if self.routed is None else Enlistments(self.routed.enlist)

    @property
    def invalids(self) -> InvalidList | None:
        """The list of invalid pointers, for the janitor's pass and for requests about it.

        None if there is none, or another instance owns it: one instance makes the pass for all.
        """
        if self.foreign is not None:
            return self.foreign if self.ownership.is_mine(SERVICE_NAME) else None
        return self.embedded

    @property
    def has_list(self) -> bool:
        """True if there is a list of invalid pointers, here or at another instance."""
        return self.foreign is not None or self.own is not None or self.routed is not None

    async def start(self, nursery: trio.Nursery) -> None:
        """Run the authority in ``nursery``; return when it is loaded, or after a limited wait.

        Among several instances it does not wait: the owner is known only once this instance has entered the cluster.
        """
        loaded = trio.Event()
        if self.own is not None:
            nursery.start_soon(self._run, self.own, loaded)
        elif self.routed is not None:
            nursery.start_soon(self._run, self.routed, loaded)
            if not self.routed.is_alone:
                return
        elif self.foreign is not None:
            nursery.start_soon(self.foreign.run)
            nursery.start_soon(_announce, self.foreign, loaded)
        else:
            return
        with trio.move_on_after(START_PATIENCE_S if self.foreign is None else FOREIGN_PATIENCE_S) as waiting:
            await loaded.wait()
        if waiting.cancelled_caught:
            log.warning("the transaction service is not available yet")

    async def _run(self, embedded: TransactionService | RoutedTransactions, loaded: trio.Event) -> None:
        try:
            await embedded.run(loaded.set)
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """Accept no more requests; return when all accepted ones are answered."""
        own = self.own or self.routed
        if own is not None:
            own.close()
            await self._ended.wait()


async def _announce(foreign: ForeignTephra, loaded: trio.Event) -> None:
    await foreign.loaded()
    loaded.set()


def build_authority(
    config: TransactionsConfig,
    store: Store,
    clock: Clock,
    pointers: PointerIndex,
    ask: AskTopic,
    observer: TransactionObserver,
    run_queue: RunQueue | None = None,
    ownership: Ownership | None = None,
    peer: Peer | None = None,
    take_over_s: float = 0.0,
) -> Authority:
    """Return the authority that ``transactions.service`` names, not started.

    Args:
      run_queue: that of the topics.
      take_over_s: as ``service_settings``.
      ownership, peer: among several instances, the owner of the service, and the way to reach it.
    """
    if config.service == "embedded":
        build = partial(
            TransactionService, store, clock, pointers, ask, service_settings(config, take_over_s), observer, run_queue
        )
        if store.traits.shared:
            routed = RoutedTransactions(build, ownership or Alone(), pointers, peer)
            return Authority(routed, routed=routed)
        service = build()
        return Authority(service, own=service)
    if config.service == "tephra":
        host, port = parse_address(config.tephra)
        tephra = ForeignTephra(
            host,
            port,
            clock,
            pointers,
            store,
            refresh_s=config.tephra_refresh_s,
            max_lifetime_ms=config.max_lifetime_s * 1000,
        )
        return Authority(tephra, foreign=tephra, ownership=ownership or Alone())
    return Authority()


def service_settings(config: TransactionsConfig, take_over_s: float = 0.0) -> TransactionSettings:
    """Return the settings of the transaction service.

    Args:
      take_over_s: how long a topic may have no owner that answers; a decision waits at least this long.
    """
    return TransactionSettings(
        timeout_ms=config.timeout_s * 1000,
        long_timeout_ms=config.long_timeout_s * 1000,
        max_timeout_ms=config.max_timeout_s * 1000,
        max_lifetime_ms=config.max_lifetime_s * 1000,
        max_open=config.max_open,
        max_invalid=config.max_invalid,
        max_outcomes=config.max_outcomes,
        outcome_retention_ms=config.outcome_retention_s * 1000,
        max_change_set_bytes=config.max_change_set_bytes,
        abort_deadline_s=max(config.abort_deadline_s, take_over_s),
        commit_deadline_s=max(config.commit_deadline_s, take_over_s),
        # Thrift clients may have their own stores, whose rows this daemon cannot roll back.
        prune=config.prune and not config.thrift,
    )


def describe_authority(config: TransactionsConfig) -> str:
    """Describe the authority, for the banner."""
    if config.service == "embedded":
        return "transactions itself"
    return f"no transactions, the Tephra at {config.tephra} does" if config.service == "tephra" else "no transactions"
