"""The picture of the daemon: nested blocks, of which the outermost lives longest.

    open_store
    └── actors nursery               topics, janitor, space guard, loop watch
        └── servers nursery          start() returns the bound addresses
            └── wait for SIGTERM or SIGINT
                  1. mailboxes close: nothing new is taken, parked polls are answered, empty
                  2. the server stops: last answers leave
        3. actors reach the end of their mailboxes and return
    4. the store closes

In the opposite order a parked poll would hold the exit for the server's whole grace period.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import trio

from actors.clock import SystemClock
from actors.directory import Directory
from actors.janitor import Janitor, JanitorSettings
from actors.scan_cache import CacheBudget
from actors.space import SpaceGuard
from actors.topic import Surroundings
from broker.access import AccessLog
from broker.app import create_app
from broker.gauges import add_gauges
from broker.handlers.later import refuse_transactional
from broker.handlers.measured import measured
from broker.handlers.poll import poll
from broker.handlers.publish import publish
from broker.http.bodies import BodyBudget
from broker.http.listen import serve_http
from broker.http.settings import HttpSettings
from broker.metrics import Metrics
from broker.notify import Notifier
from broker.running import Running
from broker.service import Service
from broker.stores import open_store
from protocol.topic.state import TopicLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.config import Config
    from broker.http.exchange import HotHandlers
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
        metrics = Metrics(version("plainsong"))
        service = build_service(config, store, metrics, actors)
        budget = BodyBudget(config.http.max_inflight_bytes)
        add_gauges(metrics, service.directory, store, service.clock, service.space, budget)
        async with trio.open_nursery() as servers:
            servers.start_soon(_stop_at_signal, stop)
            addresses = await servers.start(partial(_serve, service, budget, stop))
            announce(_running(config, store, addresses, service.version))
            notifier.ready()
            servers.start_soon(_keep_alive, notifier)
            await stop.wait()
            notifier.stopping()
            service.stopping = True
            service.directory.close()
            with trio.move_on_after(config.shutdown.drain_s):
                await service.served.wait()
            servers.cancel_scope.cancel()
        with trio.move_on_after(config.shutdown.drain_s):
            await service.directory.drained()
        actors.cancel_scope.cancel()
    log.info("stopped")


def build_service(config: Config, store: Store, metrics: Metrics, actors: trio.Nursery) -> Service:
    """The actors and what serves them, started in ``actors``."""
    clock = SystemClock()
    space = SpaceGuard(store, config.storage.min_free_bytes)
    around = Surroundings(
        store=store,
        clock=clock,
        space=space,
        limits=_limits(config),
        commit_requests=config.commit.max_requests,
        commit_bytes=config.commit.max_bytes,
        observer=metrics,
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
    retention = config.retention
    settings = JanitorSettings(retention.interval_s, retention.delete_grace_s, retention.step_rows)
    actors.start_soon(space.run)
    actors.start_soon(directory.run_sweeper)
    actors.start_soon(Janitor(store, directory, clock, metrics, settings).run)
    actors.start_soon(_watch_loop, metrics)
    access = AccessLog(enabled=config.log.access)
    return Service(config, store, directory, clock, space, metrics, access, version("plainsong"))


def hot_handlers(service: Service) -> HotHandlers:
    """The functions behind both doors."""
    return {
        "publish": measured("publish", service, partial(publish, service)),
        "poll": measured("poll", service, partial(poll, service)),
        "store": measured("store", service, refuse_transactional),
        "rollback": measured("rollback", service, refuse_transactional),
    }


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


async def _serve(
    service: Service, budget: BodyBudget, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    settings = http_settings(service.config)
    handlers = hot_handlers(service)
    try:
        await serve_http(
            settings,
            handlers,
            create_app(service, settings, handlers),
            binds=[service.config.http.bind],
            budget=budget,
            stop=stop,
            grace_s=service.config.shutdown.drain_s,
            task_status=task_status,
        )
    finally:
        service.served.set()


def _limits(config: Config) -> TopicLimits:
    return TopicLimits(
        max_message_bytes=config.topic.max_message_bytes,
        max_parked_polls=config.topic.max_parked_polls,
        checkpoint_rows=config.topic.checkpoint_rows,
        max_readers=config.readers.max_per_topic,
        readers_retention_ms=config.readers.retention_s * 1000,
    )


def _running(config: Config, store: Store, addresses: list[str], daemon_version: str) -> Running:
    return Running(
        version=daemon_version,
        addresses=[f"http://{address}" for address in addresses],
        data_dir=None if store.traits.kind == "memory" else config.storage.data_dir,
        store_kind=store.traits.kind,
        durability=store.traits.durability,
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
