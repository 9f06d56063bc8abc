"""Assembles the daemon from its settings: actors, dependencies of handlers, the cluster, listeners."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from actors.cache import CacheBudget
from actors.directory import Directory
from actors.invalid_list import InvalidPass
from actors.janitor import Janitor, JanitorSettings
from actors.mailbox import Turns
from actors.namespaces import Namespaces
from actors.observe import SpaceGuard, SystemClock, watch_jumps
from actors.ownership import Alone
from actors.pages import Pages
from actors.pointers import PointerIndex
from actors.scrub import Scrub
from actors.set_aside import SetAsides
from actors.store_time import StoreTime
from actors.topic import TopicEnvironment
from broker.api.description.asyncapi import AsyncApi
from broker.api.description.openapi import description
from broker.api.description.problems import Problems
from broker.api.messages.events import EventStreams, MessageEvents
from broker.api.messages.holding import Holds
from broker.api.messages.poll import Polling
from broker.api.messages.poll_many import LocalTopics, PollingMany
from broker.api.messages.publish import Publishing
from broker.api.messages.readers import NamedReaders, Readers
from broker.api.messages.set_aside import SettingAside
from broker.api.messages.show import Messages
from broker.api.messages.stream import Streams
from broker.api.operations.backups import Backups
from broker.api.operations.cluster import (
    SECURITY_DIGESTS,
    TOPICS_OPEN,
    ClusterRoutes,
    security_digests_handler,
    topics_open_handler,
)
from broker.api.operations.console import Console
from broker.api.operations.contact import Contact
from broker.api.operations.definitions import Definitions
from broker.api.operations.health import Health
from broker.api.operations.overview import Overview
from broker.api.operations.scrub import ScrubRoutes, damaged
from broker.api.routes import ROUTES
from broker.api.topics.chain import Chains, chain_secrets
from broker.api.topics.changes import TopicChanges
from broker.api.topics.metrics import TopicMetrics
from broker.api.topics.producers import Producers
from broker.api.topics.stats import Counting
from broker.api.topics.topics import NamespaceRoutes, Policies, Topics, refused_here
from broker.api.transactions.transactions import TransactionRoutes
from broker.api.waiting import looked_at_again, metered, refusals_noted
from broker.attention import FINDINGS, Attention, clock_findings, stale_files
from broker.audit import ACTIONS, Audit, large_audit
from broker.authority import build_authority
from broker.catalogue import FIGURES, Catalogue
from broker.cluster.join import WHO, who_handler
from broker.cluster.serve import Cluster, Local
from broker.cluster.transactions import LinkedPeer, RoutedTephraMethods, TransactionCalls, announce_namespace
from broker.front.parent import Answering, serve_front_ends
from broker.gauges import add_event_gauges, add_keeping_gauges, add_link_gauges
from broker.http.budgets import AnswerBudget, BodyBudget
from broker.http.descriptors import Descriptors
from broker.http.handlers import RequestTasks
from broker.http.messages import status_of
from broker.http.origin_check import origin_check
from broker.http.route import Accounting, accounted, bind
from broker.http.server import load_application, serve_http
from broker.logs import AccessLog
from broker.metrics import Decisions, Rates
from broker.reload import Reloads
from broker.security.guard import RefusedRequest
from broker.security.identity import NOBODY
from broker.security.setup import Security, build_security
from broker.stores import message_bound, place_of
from broker.thrift import THRIFT, GrantedMethods, TephraMethods, serve_thrift
from broker.tracing import traced
from plainsong.protocol.codec import avro
from plainsong.protocol.topic.state import TopicLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.observe import Clock
    from actors.ownership import Ownership
    from broker.authority import Authority
    from broker.cluster.owners import Owners
    from broker.config import Config
    from broker.http.messages import Begin, Handler
    from broker.http.origin_check import OriginCheck
    from broker.http.route import Endpoint
    from broker.link.client import Links
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.security.peer import Peer
    from broker.security.quotas import Quotas
    from broker.thrift import Methods
    from broker.tls import Certificates
    from broker.tracing import Traces
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.names import TopicName
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
    served: trio.Event
    """Set when the server has stopped and the last answers were sent."""

    async def start(self, actors: trio.Nursery) -> None:
        """Start background tasks. Raises StoreError; StoreUnusable: the clock is too far ahead of the store."""
        await self.store_time.load(self.store, self.config.storage.max_clock_ahead_s)
        await self.authority.start(actors)
        authority = self.authority
        invalid_pass = None
        if authority.has_list:
            ask_owner = self.directory.ask if self.cluster is None else self.cluster.asks.ask
            invalid_pass = InvalidPass(self.directory, lambda: authority.invalids, ask_owner)
        janitor = Janitor(
            self.store, self.directory, self.clock, self.metrics, janitor_settings(self.config), invalid_pass
        )
        actors.start_soon(self.space.run)
        actors.start_soon(self.namespaces.run)
        actors.start_soon(self.directory.run_sweeper)
        actors.start_soon(self.pages.run)
        actors.start_soon(self.publishing.deadlines.run)
        actors.start_soon(janitor.run)
        actors.start_soon(self.scrub.run)
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
        self.audit.refused(RefusedRequest(error, NOBODY, peer, what))

    def stop(self) -> None:
        """Accept nothing new; answer waiting polls at once."""
        self.stopping.set()
        self.directory.close()
        self.pointers.close()

    async def drained(self) -> None:
        """Wait until topics have ended, then the transaction service, which may ask them. Call ``stop`` first."""
        await self.directory.drained()
        await self.authority.aclose()


async def assemble(
    config: Config,
    store: Store,
    metrics: Metrics,
    actors: trio.Nursery,
    *,
    ownership: Ownership | None = None,
    membership: Membership | None = None,
    clock: Clock | None = None,
    security: Security | None = None,
    certificates: Certificates | None = None,
    traces: Traces | None = None,
) -> Daemon:
    """Assemble the daemon without starting it; its actors live in ``actors``.

    Args:
      ownership: which of several instances owns what; None: there is only this one.
      membership: the same, if it comes from ZooKeeper, for the routes that show or change the cluster.
      security: the guard, with its files loaded; None: load them here.
      certificates: for links to other instances; None: links are plain.
      traces: records requests; None: requests are not traced.
    Raises:
      StoreError: the store could not be read.
    """
    if security is None:
        security = build_security(config, metrics, metrics.security_reload_failed, metrics.quota_refused)
    avro.prepare()
    accounting = Accounting(metrics.requested, AccessLog(enabled=config.log.access))
    security.guard.requested = metrics.requested
    security.guard.on_answered = accounting.access.refused
    clock = SystemClock() if clock is None else clock
    core = await _core(config, store, metrics, actors, ownership, membership, clock, security, certificates)
    care = _care(core)
    service = _service(core, actors, accounting)
    descriptors, answers = Descriptors(), AnswerBudget(config.http.max_answer_bytes)
    handlers: dict[str, Handler] = {}
    subjects = (
        *_message_subjects(core, service),
        *_topic_subjects(core, service),
        *_operation_subjects(core, service, care, handlers, descriptors),
    )
    endpoints = bind(ROUTES, subjects, core.tasks)
    begin: Begin = service.streams.begin
    if core.cluster is not None:
        endpoints, begin = _among_instances(core, core.cluster, service, care, endpoints, answers, accounting)
    handlers.update({each.route.name: each.handler for each in endpoints})
    audit = _audit(core, care)
    if security.guard.required:
        endpoints = tuple(
            refusals_noted(
                audit.audited(refused_here(each), core.reach.owner_known_here, core.tasks),
                security.guard,
                recorded=each.route.name in ACTIONS,
            )
            for each in endpoints
        )
    return Daemon(
        config=config,
        version=metrics.version,
        store=store,
        clock=clock,
        space=core.space,
        metrics=metrics,
        accounting=accounting,
        directory=core.directory,
        pages=core.pages,
        pointers=core.pointers,
        namespaces=core.namespaces,
        authority=core.authority,
        attention=care.attention,
        scrub=care.scrub,
        answers=answers,
        publishing=service.publishing,
        store_time=care.store_time,
        endpoints=tuple(
            traced(accounted(each, accounting), traces)
            for each in (looked_at_again(metered(each, security.guard), security.guard) for each in endpoints)
        ),
        begin=begin,
        cluster=core.cluster,
        security=security,
        audit=audit,
        descriptors=descriptors,
        stopping=core.stopping,
        served=trio.Event(),
    )


# --- the core: store, topics, transactions, other instances ----------------------------------------


class _Reach:
    """Asks the owners of topics and of transactions, here or at other instances.

    What it asks is made from it, so ``_core`` sets the attributes while it builds; nothing asks before all are set.
    """

    directory: Directory
    authority: Authority
    cluster: Cluster | None = None
    """None: there is only this instance."""

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
class _Core:
    """What all routes stand on."""

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
    reach: _Reach
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


async def _core(
    config: Config,
    store: Store,
    metrics: Metrics,
    actors: trio.Nursery,
    ownership: Ownership | None,
    membership: Membership | None,
    clock: Clock,
    security: Security,
    certificates: Certificates | None,
) -> _Core:
    """Build the core. Raises StoreError."""
    reach = _Reach()
    space = SpaceGuard(store, config.storage.min_free_bytes)
    pointers = PointerIndex(config.transactions.max_held_polls)
    await pointers.load(store)
    namespaces = Namespaces(store, default=config.deduplication.default, notify=reach.announce)
    await namespaces.load()
    turns = Turns(store)
    authority = reach.authority = build_authority(
        config.transactions,
        store,
        clock,
        pointers,
        reach.ask,
        Decisions(metrics),
        turns,
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
        commit_requests=config.commit.max_requests,
        commit_bytes=config.commit.max_bytes,
        observer=metrics,
        pointers=pointers,
        authority=authority.transactions,
        policies=namespaces.policies,
        ownership=ownership or Alone(),
        enlistments=authority.enlistments,
        turns=turns,
    )
    directory = reach.directory = Directory(
        actors,
        environment,
        CacheBudget(config.cache.max_bytes),
        mailbox_requests=config.topic.mailbox_requests,
        mailbox_bytes=config.topic.mailbox_bytes,
        max_open=config.topic.max_open,
        idle_s=config.topic.idle_s,
    )
    environment.ownership.on_change(namespaces.reload_soon)
    if ownership is not None:
        reach.cluster = Cluster(config, ownership, directory, metrics, actors, certificates)
    return _Core(
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


# --- care for the store, and what an operator should look at ---------------------------------------


@dataclass(frozen=True, slots=True)
class _Care:
    """What keeps the store sound, and reports what is not."""

    attention: Attention
    scrub: Scrub
    set_asides: SetAsides
    store_time: StoreTime
    backups: Backups


def _care(core: _Core) -> _Care:
    config, store, directory, clock = core.config, core.store, core.directory, core.clock
    attention = Attention(
        directory,
        clock,
        core.space,
        config.storage.min_free_bytes,
        core.authority,
        core.metrics,
        core.ownership,
        core.membership,
        core.links,
    )
    folder = config.storage.data_dir.absolute()
    is_here = store.traits.kind == "leveldb"
    scrub = Scrub(
        store,
        directory,
        clock,
        config.storage.scrub_interval_s,
        config.storage.scrub_bytes_per_s,
        folder / "scrub.json" if is_here else None,
    )
    store_time = StoreTime(clock, directory)
    attention.sources.append(partial(damaged, scrub))
    attention.sources.append(partial(stale_files, lambda: core.security.stale))
    attention.sources.append(partial(clock_findings, store_time))
    backups = Backups(
        store,
        clock,
        directory.environment.ownership.me.name,
        core.metrics.version,
        config.backup.hold_s,
        config.backup.bytes_per_s,
        folder / "last-backup.json" if is_here else None,
    )
    add_keeping_gauges(core.metrics, scrub, backups)
    return _Care(
        attention=attention,
        scrub=scrub,
        set_asides=SetAsides(store, directory, clock, folder, core.delete_grace_ms, scrub),
        store_time=store_time,
        backups=backups,
    )


def _audit(core: _Core, care: _Care) -> Audit:
    """Return the audit; with authentication it records refusals and reloads, and reports what it cannot write."""
    ownership, security = core.ownership, core.security
    audit = Audit(
        core.reach.ask,
        core.clock,
        instance=platform.node() if ownership is None else ownership.me.name,
        required=core.config.security.audit == "required",
        lost=core.metrics.audit_lost,
        store=core.store,
    )
    if security.guard.required:
        care.attention.sources += [audit.findings, partial(large_audit, core.directory)]
        security.guard.on_refused = audit.refused
        security.files.on_reload = audit.reloaded
    return audit


# --- the subjects of the routes: each gets only what it uses ---------------------------------------


@dataclass(frozen=True, slots=True)
class _Service:
    """What several routes, or other instances, share."""

    topics: LocalTopics
    policies: Policies
    publishing: Publishing
    streams: Streams
    polling: Polling
    polling_many: PollingMany
    event_streams: EventStreams
    catalogue: Catalogue
    counting: Counting


def _service(core: _Core, actors: trio.Nursery, accounting: Accounting) -> _Service:
    config, store, directory, pages = core.config, core.store, core.directory, core.pages
    transactions, rates = core.authority.transactions, core.rates
    topics, named_readers = LocalTopics(directory, pages), NamedReaders()
    holds = Holds(directory, transactions, core.pointers, core.clock)
    publishing = Publishing(
        directory,
        directory.environment.enlistments,
        transactions,
        rates,
        core.metrics.producer_refused,
        config.deduplication.answer_timeout_s,
        core.tasks,
        core.reach.transaction_owner,
    )
    polling = Polling(
        directory,
        pages,
        transactions,
        holds,
        rates,
        core.metrics.held,
        core.reach.ask,
        config.poll,
        core.stopping,
        core.clock,
        core.metrics.delivered_after,
        named_readers,
        core.tasks,
    )
    counting = Counting(
        directory=directory,
        store=store,
        pages=pages,
        transactions=transactions,
        holds=holds,
        rates=rates,
        named_readers=named_readers,
        stopping=core.stopping,
        max_wait_ms=config.poll.max_wait_ms,
        delete_grace_ms=core.delete_grace_ms,
        ownership=core.ownership,
    )
    event_streams = EventStreams()
    add_event_gauges(core.metrics, event_streams)
    return _Service(
        topics=topics,
        policies=Policies(core.namespaces, config.deduplication.default),
        publishing=publishing,
        streams=Streams(publishing, accounting),
        polling=polling,
        polling_many=PollingMany(topics, transactions, holds, rates, config.poll, core.stopping),
        event_streams=event_streams,
        catalogue=Catalogue(actors, directory, store, core.clock, transactions, rates, core.ownership, core.links),
        counting=counting,
    )


def _message_subjects(core: _Core, service: _Service) -> tuple[object, ...]:
    """Return the subjects of the routes of messages, and of transactions."""
    config, authority = core.config, core.authority
    return (
        service.publishing,
        service.streams,
        service.polling,
        service.polling_many,
        MessageEvents(service.polling, service.event_streams),
        Messages(core.directory, core.store, authority.transactions, config.poll.max_bytes),
        Readers(core.directory, config.readers.retention_s * 1000),
        TransactionRoutes(authority, config.transactions, core.reach.ask, core.pointers, core.tasks, core.quotas),
    )


def _topic_subjects(core: _Core, service: _Service) -> tuple[object, ...]:
    """Return the subjects of the routes of topics and namespaces."""
    config, directory, store, clock = core.config, core.directory, core.store, core.clock
    return (
        service.counting,
        TopicMetrics(service.catalogue, service.counting),
        Topics(
            directory,
            store,
            service.policies,
            config.topic.default_ttl_s,
            config.http.flat_topic_properties,
            TopicChanges(directory, store, core.pages, core.delete_grace_ms),
            service.catalogue,
            core.tasks,
            core.quotas,
        ),
        NamespaceRoutes(core.namespaces, service.policies),
        Producers(directory, store, clock, service.policies, core.metrics.producer_refused),
        Chains(directory, store, clock, chain_secrets(config)),
    )


def _operation_subjects(
    core: _Core, service: _Service, care: _Care, handlers: Mapping[str, Handler], descriptors: Descriptors
) -> tuple[object, ...]:
    """Return the subjects of the routes for operators, and of those that describe the API.

    Args:
      handlers: by name, of every route; filled later.
    """
    config, release, security = core.config, core.metrics.version, core.security
    return (
        Overview(
            service.catalogue,
            care.attention,
            core.directory,
            core.rates,
            core.clock,
            service.event_streams,
            core.stopping,
            handlers,
            core.delete_grace_ms,
            sees=lambda request, name: request.rights.any_on_topic(*name),
            sees_service=lambda request: request.rights.on_service("inspect"),
        ),
        SettingAside(care.set_asides),
        ScrubRoutes(care.scrub),
        care.backups,
        Definitions(core.store, core.namespaces, core.membership, config.topic.default_ttl_s, handlers),
        ClusterRoutes(
            core.directory, core.directory.environment.ownership, core.membership, core.links, security.digests
        ),
        Console(config.console.enabled),
        Contact(config.security.contact, core.clock.now_ms),
        Problems(),
        AsyncApi(service.catalogue, release, bool(config.tls.certificate)),
        Health(
            version=release,
            store_kind=core.store.traits.kind,
            decides=config.transactions.service,
            min_free_bytes=config.storage.min_free_bytes,
            directory=core.directory,
            space=core.space,
            transactions=core.authority.transactions,
            metrics=core.metrics,
            stopping=core.stopping,
            membership=core.membership,
            links=core.links,
            description=partial(description, ROUTES, release),
            are_descriptors_short=lambda: descriptors.are_short,
            security=lambda: security.stale,
            groups_of=security.guard.groups_of,
        ),
    )


def _among_instances(
    core: _Core,
    cluster: Cluster,
    service: _Service,
    care: _Care,
    endpoints: tuple[Endpoint, ...],
    answers: AnswerBudget,
    accounting: Accounting,
) -> tuple[tuple[Endpoint, ...], Begin]:
    """Forward requests to owners, and answer what other instances ask."""
    local = Local(
        core.directory,
        service.topics,
        service.polling_many,
        service.streams,
        answers,
        accounting.access,
        core.security.guard,
    )
    endpoints = cluster.forward(endpoints, local, core.tasks)
    cluster.dispatcher.kinds[TOPICS_OPEN] = topics_open_handler(core.directory)
    cluster.dispatcher.kinds[SECURITY_DIGESTS] = security_digests_handler(core.security.digests)
    cluster.dispatcher.kinds[FINDINGS] = care.attention.handler
    cluster.dispatcher.kinds[FIGURES] = service.catalogue.figures_handler
    cluster.dispatcher.kinds[WHO] = who_handler(cluster.ownership.me.name)
    cluster.dispatcher.kinds |= TransactionCalls(core.authority, core.namespaces).kinds()
    add_link_gauges(core.metrics, cluster.links)
    return endpoints, partial(cluster.begin, service.streams)


# --- settings of the lower floors ------------------------------------------------------------------


def janitor_settings(config: Config) -> JanitorSettings:
    """Return the settings of the janitor."""
    retention = config.retention
    return JanitorSettings(retention.interval_s, retention.delete_grace_s, retention.step_rows)


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


#: How far the clock of an external transaction service may be ahead of the daemon's.
MAX_AHEAD_MS = 300_000


async def _watch_loop(metrics: Metrics) -> None:
    """Measure how late the loop wakes a sleeping task."""
    while True:
        due_s = trio.current_time() + LAG_INTERVAL_S
        await trio.sleep_until(due_s)
        metrics.lagged(max(0.0, trio.current_time() - due_s))


# --- contention ------------------------------------------------------------------------------------
#
# If another daemon works on the store of a daemon configured as the only one, log it from time to time, with the
# remedy.


log = logging.getLogger(__name__)
#: Pause between two log lines: many topics may be taken every few seconds.
PAUSE_S = 300.0


class Contention:
    """Counts topics claimed by other daemons, for a daemon that knows of none; call it for each topic."""

    def __init__(self, place: str, clock: Callable[[], float] = trio.current_time) -> None:
        self._place = place
        self._clock = clock
        self._again_s = 0.0
        self._taken = 0

    def __call__(self) -> None:
        """Record that another daemon has claimed a topic."""
        self._taken += 1
        now_s = self._clock()
        if now_s < self._again_s:
            return
        log.warning(
            "another daemon uses this store",
            extra={
                "store": self._place,
                "topics_taken": self._taken,
                "hint": "nothing is lost, but the daemons keep taking topics from each other: set the same "
                "cluster.zookeeper for all daemons of this store, give each deployment a "
                "storage.hbase.table_prefix of its own, or stop one",
            },
        )
        self._again_s = now_s + PAUSE_S
        self._taken = 0


# --- listeners -------------------------------------------------------------------------------------


async def serve(
    daemon: Daemon,
    budget: BodyBudget,
    stop: trio.Event,
    certificates: Certificates | None = None,
    reloads: Reloads | None = None,
    *,
    task_status: trio.TaskStatus[list[str]],
) -> None:
    """Serve HTTP, and other instances, until ``stop`` is set; started once connections are accepted. Raises OSError."""
    config = daemon.config
    settings = config.http
    peers = None if daemon.cluster is None else daemon.cluster.peer_handler()
    try:
        if config.http.processes > 1:
            answering = Answering(
                daemon.endpoints,
                daemon.begin,
                daemon.publishing,
                daemon.accounting,
                daemon.answers,
                budget,
                daemon.security,
                daemon.descriptors,
            )
            await serve_front_ends(
                config,
                answering,
                peers,
                stop=stop,
                certificates=certificates,
                reloads=reloads or Reloads(),
                task_status=task_status,
            )
            return
        check = daemon.origin_check()
        if certificates is not None:
            certificates.tell_names(check.serve_names)
        await serve_http(
            settings,
            daemon.endpoints,
            partial(load_application, daemon.endpoints, settings, daemon.accounting),
            binds=list(map(str, config.http.binds)),
            unix_mode=config.http.unix_mode,
            budget=budget,
            stop=stop,
            grace_s=config.shutdown.drain_s,
            tls=certificates,
            check=check,
            guard=daemon.security.guard,
            begin=daemon.begin,
            peers=peers,
            turns=daemon.directory.environment.turns,
            bell=daemon.store.bell,
            accounting=daemon.accounting,
            descriptors=daemon.descriptors,
            task_status=task_status,
        )
    finally:
        daemon.served.set()


async def start_thrift(
    daemon: Daemon, stop: trio.Event, servers: trio.Nursery, certificates: Certificates | None = None
) -> list[str]:
    """Serve Tephra's clients if ``transactions.thrift`` is set; return the addresses. Raises OSError."""
    config, authority = daemon.config, daemon.authority
    if not config.transactions.thrift or (authority.own is None and authority.routed is None):
        return []
    owners = None if daemon.cluster is None else daemon.cluster.owners
    methods: Methods = RoutedTephraMethods(authority, owners) if authority.own is None else TephraMethods(authority.own)
    guard = daemon.security.guard
    if guard.required:
        methods = GrantedMethods(methods, partial(guard.rights_of, THRIFT), daemon.publishing.owner_of, daemon.audit)
    serving = partial(
        serve_thrift,
        config.transactions.thrift,
        methods,
        budget=BodyBudget(config.http.max_inflight_bytes // 4),  # separate: incomplete frames must not block publishes
        stop=stop,
        grace_s=config.shutdown.drain_s,
        tls=certificates.context if config.transactions.thrift_tls and certificates is not None else None,
    )
    addresses: list[str] = await servers.start(serving)
    return addresses
