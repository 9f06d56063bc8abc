"""The picture of the daemon: nested blocks, of which the outermost lives longest.

    open_store
    └── actors nursery               topics, transaction service, janitor, membership, space guard, loop watch
        └── servers nursery          start() returns the bound addresses; then the cluster is entered
            └── wait for SIGTERM or SIGINT
                  0. in a cluster: others own our topics, which are let go; requests are forwarded
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
from typing import TYPE_CHECKING

import trio

from actors.authority import keep_authority
from broker.assembling import build_service
from broker.authorities import told
from broker.cluster.joining import enter, find_others, hand_over, move_in_portions, shown
from broker.cluster.self_check import look_for_oneself
from broker.decisions import add_transaction_gauges
from broker.doors import serve, start_thrift
from broker.gauges import add_cluster_gauges, add_gauges
from broker.http.bodies import BodyBudget
from broker.metrics import Metrics
from broker.notify import Notifier
from broker.running import Running
from broker.stores import fitted, open_store, place_of
from storage.copy_parts import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.config import Config
    from broker.service import Service

log = logging.getLogger(__name__)


async def run_daemon(config: Config, *, announce: Callable[[Running], None]) -> None:
    """Serve until SIGTERM or SIGINT, then leave in good order.

    ``announce`` is called once, when connections are accepted. A second signal ends the process at once.

    Raises:
      StoreUnusable: the store cannot be opened; nothing was changed.
      OSError: the address cannot be listened on.
      NameTaken: another instance of the cluster has our name.
    """
    notifier = Notifier(os.environ)
    stop = trio.Event()
    async with open_store(config) as store, trio.open_nursery() as actors:
        config = fitted(config, store.traits)
        await refuse_unfinished(store)
        await keep_authority(store, config.transactions.service)
        metrics = Metrics(version("plainsong"))
        membership = await find_others(config, actors)
        service = await build_service(config, store, metrics, actors, membership)
        budget = BodyBudget(config.http.max_inflight_bytes, service.answers)
        add_gauges(metrics, service.directory, store, service.clock, service.space, budget)
        add_transaction_gauges(metrics, service)
        portions = None
        if membership is not None:
            service.membership = membership
            portions = move_in_portions(service, membership, actors)
            add_cluster_gauges(metrics, membership)
        async with trio.open_nursery() as servers:
            servers.start_soon(_stop_at_signal, stop)
            addresses = await servers.start(partial(serve, service, budget, stop))
            thrift = await start_thrift(service, stop, servers)
            if membership is not None:
                address = config.cluster.advertise or addresses[0]
                await enter(membership, address, stop)
                servers.start_soon(look_for_oneself, membership.me.name, address)
            announce(_running(service, addresses, thrift))
            notifier.ready()
            servers.start_soon(_keep_alive, notifier)
            await stop.wait()
            notifier.stopping()
            if portions is not None:
                await hand_over(service, portions, config.shutdown.drain_s)
            service.stop()
            with trio.move_on_after(config.shutdown.drain_s):
                await service.served.wait()
            servers.cancel_scope.cancel()
        with trio.move_on_after(config.shutdown.drain_s):
            await service.drained()
        actors.cancel_scope.cancel()
    log.info("stopped")


def _running(service: Service, addresses: list[str], thrift: list[str]) -> Running:
    config, traits, membership = service.config, service.store.traits, service.membership
    return Running(
        version=service.version,
        addresses=[f"http://{address}" for address in addresses],
        data_dir=config.storage.data_dir if traits.kind == "leveldb" else None,
        place=place_of(config),
        store_kind=traits.kind,
        durability=traits.durability,
        decides=told(config.transactions),
        thrift=thrift,
        cluster="" if membership is None else shown(membership),
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
