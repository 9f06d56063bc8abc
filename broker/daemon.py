"""Everything that lives as long as the daemon, and how it starts and stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from actors.invalid_list import InvalidPass
from actors.janitor import Janitor
from actors.observe import SpaceGuard, watch_jumps
from broker.http.messages import status_of
from broker.http.origin_check import origin_check
from broker.security.guard import RefusedRequest
from broker.security.identity import NO_IDENTITY

if TYPE_CHECKING:
    from actors.directory import Directory
    from actors.namespaces import Namespaces
    from actors.observe import Clock
    from actors.pages import Pages
    from actors.pointers import PointerIndex
    from actors.scrub import Scrub
    from actors.store_time import StoreTime
    from broker.api.messages.publish import Publishing
    from broker.attention import Attention
    from broker.audit import Audit
    from broker.authority import Authority
    from broker.cluster.serve import Cluster
    from broker.config import Config
    from broker.http.budgets import AnswerBudget
    from broker.http.descriptors import Descriptors
    from broker.http.messages import Begin
    from broker.http.origin_check import OriginCheck
    from broker.http.route import Accounting, Endpoint
    from broker.metrics import Metrics
    from broker.security.peer import Peer
    from broker.security.setup import Security
    from plainsong.protocol.errors import PlainsongError
    from storage.base import Store

#: Seconds between measurements of the event loop's lag.
LAG_INTERVAL_S = 0.5


@dataclass(slots=True)
class Daemon:
    """Everything that lives as long as the daemon; ``main`` starts and ends it. Handlers get only what they use."""

    config: Config
    version: str
    store: Store
    clock: Clock
    space: SpaceGuard
    metrics: Metrics
    accounting: Accounting
    directory: Directory
    pages: Pages
    pointers: PointerIndex
    namespaces: Namespaces
    authority: Authority
    attention: Attention
    """Other parts of the daemon append to its sources."""
    scrub: Scrub
    answers: AnswerBudget
    publishing: Publishing
    store_time: StoreTime
    endpoints: tuple[Endpoint, ...]
    """Every route as a listener serves it: forwarded to owners, checked, counted and traced."""
    begin: Begin
    """Opens a stream of publishes."""
    cluster: Cluster | None
    security: Security
    audit: Audit
    descriptors: Descriptors
    stopping: trio.Event
    """Set when the daemon shuts down: readyz reports it, and waiting polls are answered."""

    async def start(self, actors: trio.Nursery) -> None:
        """Start background tasks. Raises StoreError; StoreUnusable: the clock is too far ahead of the store."""
        await self.store_time.load(self.store, self.config.storage.max_clock_ahead_s)
        await self.authority.start(actors)
        authority = self.authority
        invalid_pass = None
        if authority.has_list:
            ask_owner = self.directory.ask if self.cluster is None else self.cluster.asks.ask
            invalid_pass = InvalidPass(self.directory, lambda: authority.invalids, ask_owner)
        janitor = Janitor(self.store, self.directory, self.clock, self.metrics, self.config.retention, invalid_pass)
        actors.start_soon(self.space.run)
        actors.start_soon(self.namespaces.run)
        actors.start_soon(self.directory.run_sweeper)
        actors.start_soon(self.pages.run)
        actors.start_soon(self.publishing.deadlines.run)
        actors.start_soon(janitor.run)
        actors.start_soon(self.scrub.run)
        actors.start_soon(self.store_time.watch)
        actors.start_soon(_watch_loop, self.metrics)
        actors.start_soon(watch_jumps, self.clock, self.pointers.wake_all)
        if self.security.guard.required:
            actors.start_soon(self.security.run)
            actors.start_soon(self.audit.run)

    def origin_check(self) -> OriginCheck:
        """Return the check of Host and Origin; refusals are logged and audited."""
        check = origin_check(self.config)
        access = self.accounting.access
        check.on_answered = lambda target, error: access.refused("unknown", target, status_of(error))
        if self.security.guard.required:
            check.on_refused = self.refused_origin
        return check

    def refused_origin(self, what: str, peer: Peer, error: PlainsongError) -> None:
        """Record a request that was refused because of its Host or Origin."""
        self.audit.refused(RefusedRequest(error, NO_IDENTITY, peer, what))

    def stop(self) -> None:
        """Accept nothing new; answer waiting polls at once."""
        self.stopping.set()
        self.directory.close()
        self.pointers.close()

    async def drained(self) -> None:
        """Wait until topics have ended, then the transaction service, which may ask them. Call ``stop`` first."""
        await self.directory.drained()
        await self.authority.aclose()


async def _watch_loop(metrics: Metrics) -> None:
    """Measure how late the loop wakes a sleeping task."""
    while True:
        due_s = trio.current_time() + LAG_INTERVAL_S
        await trio.sleep_until(due_s)
        metrics.lagged(max(0.0, trio.current_time() - due_s))
