"""The core of the daemon, on which all routes are built: topics, transactions and other instances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from actors.cache import CacheBudget
from actors.directory import Directory
from actors.mailbox import RunQueue
from actors.namespaces import Namespaces
from actors.observe import SpaceGuard
from actors.ownership import Alone
from actors.pages import Pages
from actors.pointers import PointerIndex
from actors.topic import TopicEnvironment
from broker.authority import build_authority
from broker.cluster.serve import Cluster
from broker.cluster.transactions import LinkedPeer, announce_namespace
from broker.contention import Contention
from broker.http.handlers import RequestTasks
from broker.metrics import Decisions, Rates
from broker.stores import message_bound, place_of
from plainsong.protocol.topic.state import TopicLimits

if TYPE_CHECKING:
    from actors.observe import Clock
    from actors.ownership import Ownership
    from broker.authority import Authority
    from broker.cluster.owners import Owners
    from broker.config import Config
    from broker.link.client import Links
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.security.quotas import Quotas
    from broker.security.setup import Security
    from broker.tls import Certificates
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from storage.base import Store


class Reach:
    """Asks the owners of topics and of transactions, here or at other instances.

    The objects that it asks are built with it, so ``build_core`` sets its attributes later; nothing uses it before all
    are set.
    """

    directory: Directory
    authority: Authority
    cluster: Cluster | None = None
    """None if there is only this instance."""

    async def ask(self, name: TopicName, ask: Ask[Any]) -> Any:
        """Ask a topic at its owner."""
        return await (self.directory if self.cluster is None else self.cluster.asks).ask(name, ask)

    async def announce(self, namespace: str) -> None:
        """Inform other instances that the properties of a namespace have changed."""
        if self.cluster is not None:
            await announce_namespace(self.cluster.owners, namespace)

    def owners(self) -> Owners:
        """Return the owners of all topics, as a cluster assigns them."""
        assert self.cluster is not None  # set before anything asks a peer
        return self.cluster.owners

    async def transaction_owner(self, pointer: int) -> str | None:
        """Return the name that began a transaction, from the instance that decides it; see ``owner_known_here``."""
        if self.authority.embedded is None and self.authority.routed is not None and self.cluster is not None:
            return await LinkedPeer(self.owners).owner_of(pointer)
        return self.owner_known_here(pointer)

    def owner_known_here(self, pointer: int) -> str | None:
        """Return the name that began a transaction; empty if transactions are decided elsewhere."""
        return "" if self.authority.embedded is None else self.authority.embedded.owner_of(pointer)


@dataclass(frozen=True, slots=True)
class Core:
    """The objects on which all routes are built."""

    config: Config
    store: Store
    metrics: Metrics
    clock: Clock
    space: SpaceGuard
    pointers: PointerIndex
    namespaces: Namespaces
    authority: Authority
    directory: Directory
    pages: Pages
    reach: Reach
    ownership: Ownership | None
    membership: Membership | None
    cluster: Cluster | None
    security: Security
    tasks: RequestTasks
    rates: Rates
    stopping: trio.Event

    @property
    def links(self) -> Links | None:
        """Links to the other instances."""
        return None if self.cluster is None else self.cluster.links

    @property
    def quotas(self) -> Quotas | None:
        """Quotas of names, while authentication is on."""
        return self.security.guard.quotas if self.security.guard.required else None

    @property
    def delete_grace_ms(self) -> int:
        """Time for which a deleted topic can be undeleted."""
        return self.config.retention.delete_grace_s * 1000


async def build_core(
    config: Config,
    store: Store,
    metrics: Metrics,
    actors: trio.Nursery,
    ownership: Ownership | None,
    membership: Membership | None,
    clock: Clock,
    security: Security,
    certificates: Certificates | None,
) -> Core:
    """Build the core. Raises StoreError."""
    reach = Reach()
    space = SpaceGuard(store, config.storage.min_free_bytes)
    pointers = PointerIndex()
    await pointers.load(store)
    namespaces = Namespaces(store, default=config.deduplication.default, notify=reach.announce)
    await namespaces.load()
    run_queue = RunQueue(store)
    authority = reach.authority = build_authority(
        config.transactions,
        store,
        clock,
        pointers,
        reach.ask,
        Decisions(metrics),
        run_queue,
        ownership,
        None if ownership is None else LinkedPeer(reach.owners),
        config.cluster.take_over_s,
    )
    if ownership is None:
        metrics.on_deposed = Contention(place_of(config))
    environment = TopicEnvironment(
        store=store,
        clock=clock,
        space=space,
        limits=replace(topic_limits(config), message_bound=message_bound(config, store.traits)),
        commits=config.commit,
        observer=metrics,
        pointers=pointers,
        authority=authority.transactions,
        policies=namespaces.policies,
        ownership=ownership or Alone(),
        enlistments=authority.enlistments,
        run_queue=run_queue,
    )
    directory = reach.directory = Directory(
        actors,
        environment,
        CacheBudget(config.cache.max_bytes),
        config.topic,
    )
    environment.ownership.on_change(namespaces.reload_soon)
    if ownership is not None:
        reach.cluster = Cluster(config, ownership, directory, metrics, actors, certificates)
    return Core(
        config=config,
        store=store,
        metrics=metrics,
        clock=clock,
        space=space,
        pointers=pointers,
        namespaces=namespaces,
        authority=authority,
        directory=directory,
        pages=Pages(store, directory),
        reach=reach,
        ownership=ownership,
        membership=membership,
        cluster=reach.cluster,
        security=security,
        tasks=RequestTasks(actors),
        rates=Rates(),
        stopping=trio.Event(),
    )


def topic_limits(config: Config) -> TopicLimits:
    """Return the settings of topics."""
    producers = config.deduplication
    return TopicLimits(
        max_message_bytes=config.topic.max_message_bytes,
        max_parked_polls=config.topic.max_parked_polls,
        checkpoint_rows=config.topic.checkpoint_rows,
        max_readers=config.readers.max_per_topic,
        readers_retention_ms=config.readers.retention_s * 1000,
        max_pending=config.transactions.max_per_topic,
        max_lifetime_ms=config.transactions.max_lifetime_s * 1000,
        issues_pointers=config.transactions.service == "embedded",
        max_ahead_ms=MAX_AHEAD_MS if config.transactions.service == "tephra" else 0,
        deduplication_default=producers.default,
        snapshot_entries=producers.snapshot_entries,
        snapshot_interval_ms=round(producers.snapshot_interval_s * 1000),
        producer_retention_ms=producers.producer_retention_s * 1000,
        max_retention_ms=producers.max_retention_s * 1000,
        max_producers=producers.max_producers,
        max_long_producers=producers.max_long_producers,
    )


#: Limit on how far an external transaction service's clock may be ahead of the daemon's.
MAX_AHEAD_MS = 300_000
