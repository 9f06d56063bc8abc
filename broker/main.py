"""The picture of the daemon: nested blocks, of which the outermost lives longest.

    open_store
    └── actors nursery               topics, transaction service, janitor, space guard, loop watch
        └── servers nursery          start() returns the bound addresses
            └── wait for SIGTERM or SIGINT
                  1. mailboxes close: nothing new is taken, parked and held polls are answered, empty
                  2. the servers stop: last answers leave
        3. topics reach the end of their mailboxes and return
        4. the transaction service, which may still have asked topics, does the same
    5. the store closes

In the opposite order a parked poll would hold the exit for the server's whole grace period.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import trio

from actors.clock import SystemClock
from actors.directory import Directory
from actors.invalid_pass import InvalidPass
from actors.janitor import Janitor, JanitorSettings
from actors.namespaces import Namespaces
from actors.one_authority import keep_authority
from actors.ownership import Alone
from actors.pointer_index import PointerIndex
from actors.scan_cache import CacheBudget
from actors.space import SpaceGuard
from actors.topic import Surroundings
from broker.access import AccessLog
from broker.app import create_app
from broker.authorities import build_authority, told
from broker.cluster.cluster import Cluster
from broker.decisions import Decisions, add_transaction_gauges
from broker.gauges import add_gauges, add_link_gauges
from broker.handlers.stream import PublishStream
from broker.handlers.table import hot_handlers, local_handlers
from broker.http.bodies import BodyBudget
from broker.http.listen import serve_http
from broker.http.settings import HttpSettings
from broker.metrics import Metrics
from broker.notify import Notifier
from broker.running import Running
from broker.service import Service
from broker.stores import fitted, open_store, place_of
from broker.thrift.listen import serve_thrift
from protocol.topic.state import TopicLimits
from storage.copying.progress import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.ownership import Ownership
    from broker.config import Config
    from protocol.names import TopicName
    from protocol.topic.asks import Ask
    from storage.base import Store

log = logging.getLogger(__name__)

#: Seconds between two looks at how late the event loop is.
LAG_INTERVAL_S = 0.5


async def run_daemon(config: Config, *, announce: Callable[[Running], None]) -> None:
    """Serve until SIGTERM or SIGINT, then leave in good order.

    ``announce`` is called once, when connections are accepted. A second signal ends the process at once.

    Raises:
      StoreUnusable: the store cannot be opened; nothing was changed.
      OSError: the address cannot be listened on.
    """
    notifier = Notifier(os.environ)
    stop = trio.Event()
    async with open_store(config) as store, trio.open_nursery() as actors:
        config = fitted(config, store.traits)
        await refuse_unfinished(store)
        await keep_authority(store, config.transactions.service)
        metrics = Metrics(version("plainsong"))
        service = await build_service(config, store, metrics, actors)
        budget = BodyBudget(config.http.max_inflight_bytes)
        add_gauges(metrics, service.directory, store, service.clock, service.space, budget)
        add_transaction_gauges(metrics, service)
        async with trio.open_nursery() as servers:
            servers.start_soon(_stop_at_signal, stop)
            addresses = await servers.start(partial(serve, service, budget, stop))
            thrift = await start_thrift(service, stop, servers)
            announce(_running(config, store, addresses, thrift, service.version))
            notifier.ready()
            servers.start_soon(_keep_alive, notifier)
            await stop.wait()
            notifier.stopping()
            service.stop()
            with trio.move_on_after(config.shutdown.drain_s):
                await service.served.wait()
            servers.cancel_scope.cancel()
        with trio.move_on_after(config.shutdown.drain_s):
            await service.drained()
        actors.cancel_scope.cancel()
    log.info("stopped")


async def build_service(
    config: Config, store: Store, metrics: Metrics, actors: trio.Nursery, ownership: Ownership | None = None
) -> Service:
    """The actors and what serves them, started in ``actors``; with ``ownership``, as one of several. Raises StoreError."""
    clock = SystemClock()
    space = SpaceGuard(store, config.storage.min_free_bytes)
    pointers = PointerIndex(config.transactions.max_held_polls)
    await pointers.load(store)

    async def ask_topic(name: TopicName, ask: Ask[Any]) -> Any:
        return await (directory if cluster is None else cluster.asking).ask(name, ask)

    namespaces = Namespaces(store, default=config.deduplication.default)
    await namespaces.load()
    decider = build_authority(config.transactions, store, clock, pointers, ask_topic, Decisions(metrics))
    around = Surroundings(
        store=store,
        clock=clock,
        space=space,
        limits=topic_limits(config),
        commit_requests=config.commit.max_requests,
        commit_bytes=config.commit.max_bytes,
        observer=metrics,
        pointers=pointers,
        authority=decider.transactions,
        policy=namespaces.policy,
        ownership=ownership or Alone(),
    )
    directory = Directory(
        actors,
        around,
        CacheBudget(config.cache.max_bytes),
        mailbox_requests=config.topic.mailbox_requests,
        mailbox_bytes=config.topic.mailbox_bytes,
        max_open=config.topic.max_open,
        idle_s=config.topic.idle_s,
    )
    cluster = None if ownership is None else Cluster(config, ownership, directory, metrics, actors)
    access = AccessLog(enabled=config.log.access)
    service = Service(
        config, store, directory, clock, space, metrics, access, version("plainsong"), decider, namespaces, pointers
    )
    if cluster is not None:
        service.cluster = cluster
        cluster.answer_with(service, local_handlers(service))
        add_link_gauges(metrics, cluster.links)
    await decider.start(actors)
    invalids = decider.invalids
    invalid_pass = None if invalids is None else InvalidPass(directory, invalids)
    actors.start_soon(space.run)
    actors.start_soon(directory.run_sweeper)
    actors.start_soon(Janitor(store, directory, clock, metrics, janitor_settings(config), invalid_pass).run)
    actors.start_soon(_watch_loop, metrics)
    return service


def janitor_settings(config: Config) -> JanitorSettings:
    """The janitor's part of the settings."""
    retention = config.retention
    return JanitorSettings(retention.interval_s, retention.delete_grace_s, retention.step_rows)


def http_settings(config: Config) -> HttpSettings:
    """The front end's part of the settings."""
    http = config.http
    return HttpSettings(
        lane=http.lane,
        max_body_bytes=http.max_body_bytes,
        max_connections=http.max_connections,
        max_inflight_bytes=http.max_inflight_bytes,
        keep_alive_s=http.keep_alive_s,
        header_timeout_s=http.header_timeout_s,
        body_timeout_s=http.body_timeout_s,
        send_timeout_s=http.send_timeout_s,
        gzip_min_bytes=http.gzip_min_bytes,
    )


async def serve(
    service: Service, budget: BodyBudget, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    """Answer HTTP, and other instances, until ``stop`` is set; started once connections are accepted. Raises OSError."""
    settings = http_settings(service.config)
    handlers, cluster = hot_handlers(service), service.cluster
    try:
        await serve_http(
            settings,
            handlers,
            create_app(service, settings, handlers),
            binds=[service.config.http.bind],
            budget=budget,
            stop=stop,
            grace_s=service.config.shutdown.drain_s,
            begin=partial(PublishStream if cluster is None else cluster.begin, service),
            peers=None if cluster is None else cluster.door(),
            task_status=task_status,
        )
    finally:
        service.served.set()


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


async def start_thrift(service: Service, stop: trio.Event, servers: trio.Nursery) -> list[str]:
    """Serve Tephra's clients, where ``transactions.thrift`` says so; the addresses. Raises OSError."""
    config = service.config
    if not config.transactions.thrift or service.embedded is None:
        return []
    serving = partial(
        serve_thrift,
        config.transactions.thrift,
        service.embedded,
        budget=BodyBudget(config.http.max_inflight_bytes // 4),  # its own: half-sent frames must not hold up publishes
        stop=stop,
        grace_s=config.shutdown.drain_s,
    )
    addresses: list[str] = await servers.start(serving)
    return addresses


def _running(config: Config, store: Store, addresses: list[str], thrift: list[str], daemon_version: str) -> Running:
    return Running(
        version=daemon_version,
        addresses=[f"http://{address}" for address in addresses],
        data_dir=config.storage.data_dir if store.traits.kind == "leveldb" else None,
        place=place_of(config),
        store_kind=store.traits.kind,
        durability=store.traits.durability,
        decides=told(config.transactions),
        thrift=thrift,
    )


async def _stop_at_signal(stop: trio.Event) -> None:
    """The first signal begins the leaving; the second ends the process, whatever it is doing."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if stop.is_set():
                # Acknowledged messages are on disk already, so there is nothing left to save.
                os._exit(128 + number)
            log.info("leaving", extra={"signal": signal.Signals(number).name})
            stop.set()


async def _keep_alive(notifier: Notifier) -> None:
    """Tell a service manager that the loop still turns, if one wants to know."""
    while notifier.watchdog_interval_s is not None:
        notifier.alive()
        await trio.sleep(notifier.watchdog_interval_s)


async def _watch_loop(metrics: Metrics) -> None:
    """Measure how late the loop wakes those who sleep."""
    while True:
        due_s = trio.current_time() + LAG_INTERVAL_S
        await trio.sleep_until(due_s)
        metrics.lagged(max(0.0, trio.current_time() - due_s))
