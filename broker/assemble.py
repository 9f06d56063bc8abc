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
from broker.http.budgets import AnswerBudget, BodyBudget, http_settings
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
    from collections.abc import Callable

    from actors.observe import Clock
    from actors.ownership import Ownership
    from broker.authority import Authority
    from broker.cluster.owners import Owners
    from broker.config import Config
    from broker.http.messages import Begin, Handler
    from broker.http.origin_check import OriginCheck
    from broker.http.route import Endpoint
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.security.peer import Peer
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
    security = (
        build_security(config, metrics, metrics.security_reload_failed, metrics.quota_refused)
        if security is None
        else security
    )
    avro.prepare()
    guard = security.guard
    guard.requested = metrics.requested
    clock = SystemClock() if clock is None else clock
    space = SpaceGuard(store, config.storage.min_free_bytes)
    pointers = PointerIndex(config.transactions.max_held_polls)
    await pointers.load(store)

    async def ask_owner(name: TopicName, ask: Ask[Any]) -> Any:
        return await (directory if cluster is None else cluster.asks).ask(name, ask)

    async def announce(namespace: str) -> None:
        if cluster is not None:
            await announce_namespace(cluster.owners, namespace)

    def owners() -> Owners:
        assert cluster is not None  # set before anything asks a peer
        return cluster.owners

    async def transaction_owner(pointer: int) -> str | None:
        if authority.embedded is None and authority.routed is not None and cluster is not None:
            return await LinkedPeer(owners).owner_of(pointer)
        return owner_known_here(pointer)

    def owner_known_here(pointer: int) -> str | None:
        return "" if authority.embedded is None else authority.embedded.owner_of(pointer)

    namespaces = Namespaces(store, default=config.deduplication.default, notify=announce)
    await namespaces.load()
    turns = Turns(store)
    authority = build_authority(
        config.transactions,
        store,
        clock,
        pointers,
        ask_owner,
        Decisions(metrics),
        turns,
        ownership,
        None if ownership is None else LinkedPeer(owners),
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
    directory = Directory(
        actors,
        environment,
        CacheBudget(config.cache.max_bytes),
        mailbox_requests=config.topic.mailbox_requests,
        mailbox_bytes=config.topic.mailbox_bytes,
        max_open=config.topic.max_open,
        idle_s=config.topic.idle_s,
    )
    environment.ownership.on_change(namespaces.reload_soon)
    cluster = None if ownership is None else Cluster(config, ownership, directory, metrics, actors, certificates)

    # Dependencies of handlers: each gets only what it uses.
    transactions, rates, stopping, release = authority.transactions, Rates(), trio.Event(), metrics.version
    links = None if cluster is None else cluster.links
    descriptors = Descriptors()
    answers = AnswerBudget(config.http.max_answer_bytes)
    accounting = Accounting(metrics.requested, AccessLog(enabled=config.log.access))
    guard.on_answered = accounting.access.refused
    pages = Pages(store, directory)
    policies = Policies(namespaces, config.deduplication.default)
    topics = LocalTopics(directory, pages)
    holds = Holds(directory, transactions, pointers, clock)
    tasks = RequestTasks(actors)
    polling_many = PollingMany(topics, transactions, holds, rates, config.poll, stopping)
    publishing = Publishing(
        directory,
        environment.enlistments,
        transactions,
        rates,
        metrics.producer_refused,
        config.deduplication.answer_timeout_s,
        tasks,
        transaction_owner,
    )
    streams = Streams(publishing, accounting)
    named_readers = NamedReaders()
    polling = Polling(
        directory,
        pages,
        transactions,
        holds,
        rates,
        metrics.held,
        ask_owner,
        config.poll,
        stopping,
        clock,
        metrics.delivered_after,
        named_readers,
        tasks,
    )
    event_streams = EventStreams()
    changes = TopicChanges(directory, store, pages, config.retention.delete_grace_s * 1000)
    handlers: dict[str, Handler] = {}
    attention = Attention(
        directory,
        clock,
        space,
        config.storage.min_free_bytes,
        authority,
        metrics,
        ownership,
        membership,
        links,
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
    set_asides = SetAsides(store, directory, clock, folder, config.retention.delete_grace_s * 1000, scrub)
    attention.sources.append(partial(damaged, scrub))
    attention.sources.append(partial(stale_files, lambda: security.stale))
    store_time = StoreTime(clock, directory)
    attention.sources.append(partial(clock_findings, store_time))
    backups = Backups(
        store,
        clock,
        environment.ownership.me.name,
        release,
        config.backup.hold_s,
        config.backup.bytes_per_s,
        folder / "last-backup.json" if is_here else None,
    )
    add_keeping_gauges(metrics, scrub, backups)
    catalogue = Catalogue(actors, directory, store, clock, transactions, rates, ownership, links)
    add_event_gauges(metrics, event_streams)
    counting = Counting(
        directory=directory,
        store=store,
        pages=pages,
        transactions=transactions,
        holds=holds,
        rates=rates,
        named_readers=named_readers,
        stopping=stopping,
        max_wait_ms=config.poll.max_wait_ms,
        delete_grace_ms=config.retention.delete_grace_s * 1000,
        ownership=ownership,
    )
    endpoints = bind(
        ROUTES,
        (
            publishing,
            streams,
            polling_many,
            polling,
            MessageEvents(polling, event_streams),
            Problems(),
            Overview(
                catalogue,
                attention,
                directory,
                rates,
                clock,
                event_streams,
                stopping,
                handlers,
                config.retention.delete_grace_s * 1000,
                sees=lambda request, name: request.rights.any_on_topic(*name),
                sees_service=lambda request: request.rights.on_service("inspect"),
            ),
            Messages(directory, store, transactions, config.poll.max_bytes),
            counting,
            TopicMetrics(catalogue, counting),
            Topics(
                directory,
                store,
                policies,
                config.topic.default_ttl_s,
                config.http.flat_topic_properties,
                changes,
                catalogue,
                tasks,
                guard.quotas if guard.required else None,
            ),
            NamespaceRoutes(namespaces, policies),
            Readers(directory, config.readers.retention_s * 1000),
            Producers(directory, store, clock, policies, metrics.producer_refused),
            TransactionRoutes(
                authority, config.transactions, ask_owner, pointers, tasks, guard.quotas if guard.required else None
            ),
            ScrubRoutes(scrub),
            SettingAside(set_asides),
            Chains(directory, store, clock, chain_secrets(config)),
            Definitions(store, namespaces, membership, config.topic.default_ttl_s, handlers),
            backups,
            ClusterRoutes(directory, environment.ownership, membership, links, security.digests),
            Console(config.console.enabled),
            Contact(config.security.contact, clock.now_ms),
            AsyncApi(catalogue, release, bool(config.tls.certificate)),
            Health(
                version=release,
                store_kind=store.traits.kind,
                decides=config.transactions.service,
                min_free_bytes=config.storage.min_free_bytes,
                directory=directory,
                space=space,
                transactions=transactions,
                metrics=metrics,
                stopping=stopping,
                membership=membership,
                links=links,
                description=partial(description, ROUTES, release),
                are_descriptors_short=lambda: descriptors.are_short,
                security=lambda: security.stale,
                groups_of=guard.groups_of,
            ),
        ),
        tasks,
    )
    begin: Begin = streams.begin
    if cluster is not None:
        local = Local(directory, topics, polling_many, streams, answers, accounting.access, guard)
        endpoints, begin = cluster.forward(endpoints, local, tasks), partial(cluster.begin, streams)
        cluster.dispatcher.kinds[TOPICS_OPEN] = topics_open_handler(directory)
        cluster.dispatcher.kinds[SECURITY_DIGESTS] = security_digests_handler(security.digests)
        cluster.dispatcher.kinds[FINDINGS] = attention.handler
        cluster.dispatcher.kinds[FIGURES] = catalogue.figures_handler
        cluster.dispatcher.kinds[WHO] = who_handler(cluster.ownership.me.name)
        cluster.dispatcher.kinds |= TransactionCalls(authority, namespaces).kinds()
        add_link_gauges(metrics, cluster.links)
    handlers.update({each.route.name: each.handler for each in endpoints})
    audit = Audit(
        ask_owner,
        clock,
        instance=platform.node() if ownership is None else ownership.me.name,
        required=config.security.audit == "required",
        lost=metrics.audit_lost,
        store=store,
    )
    if guard.required:
        attention.sources += [audit.findings, partial(large_audit, directory)]
        guard.on_refused = audit.refused
        security.files.on_reload = audit.reloaded
        endpoints = tuple(
            refusals_noted(
                audit.audited(refused_here(each), owner_known_here, tasks), guard, recorded=each.route.name in ACTIONS
            )
            for each in endpoints
        )
    return Daemon(
        config=config,
        version=release,
        store=store,
        clock=clock,
        space=space,
        metrics=metrics,
        accounting=accounting,
        directory=directory,
        pages=pages,
        pointers=pointers,
        namespaces=namespaces,
        authority=authority,
        attention=attention,
        scrub=scrub,
        answers=answers,
        publishing=publishing,
        store_time=store_time,
        endpoints=tuple(
            traced(accounted(each, accounting), traces)
            for each in (looked_at_again(metered(each, guard), guard) for each in endpoints)
        ),
        begin=begin,
        cluster=cluster,
        security=security,
        audit=audit,
        descriptors=descriptors,
        stopping=stopping,
        served=trio.Event(),
    )


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
            "another daemon is at work on this store",
            extra={
                "store": self._place,
                "topics_taken": self._taken,
                "hint": "nothing is lost, but they take topics from each other for ever: set the same cluster.zookeeper "
                "for all daemons of this store, give each deployment a storage.hbase.table_prefix of its own, or end one",
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
    settings = http_settings(config)
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
