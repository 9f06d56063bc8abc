"""Assembles the daemon from its settings: actors, cluster, listeners.

The actors and what stands in front of them, put together as the settings say.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import trio

from actors.cache import CacheBudget
from actors.directory import Directory
from actors.invalid_list import InvalidPass
from actors.janitor import Janitor, JanitorSettings
from actors.namespaces import Namespaces
from actors.observe import SpaceGuard, SystemClock
from actors.ownership import Alone
from actors.pointers import PointerIndex
from actors.topic import TopicEnvironment
from broker.api.cluster import TOPICS_OPEN, topics_open
from broker.api.routes import ROUTES, hot_handlers, local_handlers
from broker.api.stream import LocalStream
from broker.authority import build_authority
from broker.cluster.join import WHO, who_handler
from broker.cluster.serve import Cluster
from broker.cluster.transactions import LinkedPeer, RoutedTephraMethods, TransactionCalls, announce_namespace
from broker.front.parent import Answering, serve_front_ends
from broker.gauges import add_link_gauges
from broker.http.budgets import BodyBudget, http_settings
from broker.http.quart_app import Application, build_application
from broker.http.server import serve_http
from broker.logs import AccessLog
from broker.metrics import Decisions
from broker.service import Service
from broker.stores import message_bound, place_of
from broker.thrift import TephraMethods, serve_thrift
from plainsong.protocol.topic.state import TopicLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.ownership import Ownership
    from broker.cluster.owners import Owners
    from broker.config import Config
    from broker.http.budgets import HttpSettings
    from broker.http.messages import HotHandlers
    from broker.metrics import Metrics
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from storage.base import Store

#: Seconds between two looks at how late the event loop is.
LAG_INTERVAL_S = 0.5


async def build_service(
    config: Config, store: Store, metrics: Metrics, actors: trio.Nursery, ownership: Ownership | None = None
) -> Service:
    """The actors and what serves them, started in ``actors``; with ``ownership``, as one of several. Raises StoreError."""
    clock = SystemClock()
    space = SpaceGuard(store, config.storage.min_free_bytes)
    pointers = PointerIndex(config.transactions.max_held_polls)
    await pointers.load(store)

    async def ask_topic(name: TopicName, ask: Ask[Any]) -> Any:
        return await (directory if cluster is None else cluster.asks).ask(name, ask)

    async def tell(namespace: str) -> None:
        if cluster is not None:
            await announce_namespace(cluster.owners, namespace)

    namespaces = Namespaces(store, default=config.deduplication.default, notify=tell)
    await namespaces.load()

    def owners() -> Owners:
        assert cluster is not None  # it is there before anybody asks a peer
        return cluster.owners

    peer = None if ownership is None else LinkedPeer(owners)
    told = Decisions(metrics)
    take_over_s = config.cluster.take_over_s
    decider = build_authority(
        config.transactions, store, clock, pointers, ask_topic, told, ownership, peer, take_over_s
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
        authority=decider.transactions,
        policy=namespaces.policy,
        ownership=ownership or Alone(),
        enlistments=decider.enlistments,
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
    cluster = None if ownership is None else Cluster(config, ownership, directory, metrics, actors)
    access = AccessLog(enabled=config.log.access)
    service = Service(
        config, store, directory, clock, space, metrics, access, version("plainsong"), decider, namespaces, pointers
    )
    if cluster is not None:
        service.cluster = cluster
        cluster.answer_with(service, local_handlers(service))
        cluster.dispatcher.kinds[TOPICS_OPEN] = partial(topics_open, service)
        cluster.dispatcher.kinds[WHO] = who_handler(cluster.ownership.me.name)
        cluster.dispatcher.kinds |= TransactionCalls(service).kinds()
        add_link_gauges(metrics, cluster.links)
    await decider.start(actors)
    invalid_pass = InvalidPass(directory, lambda: decider.invalids, ask_topic) if decider.has_list else None
    actors.start_soon(space.run)
    actors.start_soon(namespaces.run)
    actors.start_soon(directory.run_sweeper)
    actors.start_soon(Janitor(store, directory, clock, metrics, janitor_settings(config), invalid_pass).run)
    actors.start_soon(_watch_loop, metrics)
    return service


def janitor_settings(config: Config) -> JanitorSettings:
    """The janitor's part of the settings."""
    retention = config.retention
    return JanitorSettings(retention.interval_s, retention.delete_grace_s, retention.step_rows)


def topic_limits(config: Config) -> TopicLimits:
    """The topics' part of the settings."""
    producers = config.deduplication
    return TopicLimits(
        max_message_bytes=config.topic.max_message_bytes,
        max_parked_polls=config.topic.max_parked_polls,
        checkpoint_rows=config.topic.checkpoint_rows,
        max_readers=config.readers.max_per_topic,
        readers_retention_ms=config.readers.retention_s * 1000,
        max_pending=config.transactions.max_per_topic,
        max_lifetime_ms=config.transactions.max_lifetime_s * 1000,
        deduplication_default=producers.default,
        snapshot_entries=producers.snapshot_entries,
        snapshot_interval_ms=round(producers.snapshot_interval_s * 1000),
        producer_retention_ms=producers.producer_retention_s * 1000,
        max_retention_ms=producers.max_retention_s * 1000,
        max_producers=producers.max_producers,
        max_long_producers=producers.max_long_producers,
    )


async def _watch_loop(metrics: Metrics) -> None:
    """Measure how late the loop wakes those who sleep."""
    while True:
        due_s = trio.current_time() + LAG_INTERVAL_S
        await trio.sleep_until(due_s)
        metrics.lagged(max(0.0, trio.current_time() - due_s))


# --- contention ------------------------------------------------------------------------------------
#
# Another daemon on the store of one that believes itself alone: said once in a while, with what to do about it.


log = logging.getLogger(__name__)
#: Between two lines about it: each of many topics may be taken every few seconds.
PAUSE_S = 300.0


class Contention:
    """Counts the topics that were taken from this daemon, which knows of no others; call it for each."""

    def __init__(self, place: str, clock: Callable[[], float] = trio.current_time) -> None:
        self._place = place
        self._clock = clock
        self._again_s = 0.0
        self._taken = 0

    def __call__(self) -> None:
        """Another daemon has claimed a topic."""
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


# --- doors -----------------------------------------------------------------------------------------
#
# The doors: HTTP with the connections of other instances, and Thrift for Tephra's clients.


async def serve(
    service: Service, budget: BodyBudget, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    """Answer HTTP, and other instances, until ``stop`` is set; started once connections are accepted. Raises OSError."""
    settings = http_settings(service.config)
    handlers, cluster = hot_handlers(service), service.cluster
    begin = partial(LocalStream if cluster is None else cluster.begin, service)
    peers = None if cluster is None else cluster.peer_handler()
    try:
        if service.config.http.processes > 1:
            routes = ROUTES if cluster is None else cluster.routes()
            answering = Answering(service, handlers, routes, begin, budget)
            await serve_front_ends(service.config, answering, peers, stop=stop, task_status=task_status)
            return
        await serve_http(
            settings,
            handlers,
            create_app(service, settings, handlers),
            binds=[service.config.http.bind],
            budget=budget,
            stop=stop,
            grace_s=service.config.shutdown.drain_s,
            begin=begin,
            peers=peers,
            task_status=task_status,
        )
    finally:
        service.served.set()


async def start_thrift(service: Service, stop: trio.Event, servers: trio.Nursery) -> list[str]:
    """Serve Tephra's clients, where ``transactions.thrift`` says so; the addresses. Raises OSError."""
    config = service.config
    own, routed = service.decider.own, service.decider.routed
    if not config.transactions.thrift or (own is None and routed is None):
        return []
    serving = partial(
        serve_thrift,
        config.transactions.thrift,
        RoutedTephraMethods(service) if own is None else TephraMethods(own),
        budget=BodyBudget(config.http.max_inflight_bytes // 4),  # its own: half-sent frames must not hold up publishes
        stop=stop,
        grace_s=config.shutdown.drain_s,
    )
    addresses: list[str] = await servers.start(serving)
    return addresses


# --- app -------------------------------------------------------------------------------------------
#
# The application: the route table, bound to what serves it.


def create_app(service: Service, settings: HttpSettings, handlers: HotHandlers) -> Application:
    """Every route of this version as an ASGI application.

    The hot ones are those the lane serves itself; here they are for HTTP/2, and for ``http.lane = false``.
    """
    routes = ROUTES if service.cluster is None else service.cluster.routes()
    return build_application(service, routes, handlers, settings)
