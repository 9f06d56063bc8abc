"""The doors: HTTP with the connections of other instances, and Thrift for Tephra's clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from broker.app import create_app
from broker.cluster.thrift import ThriftAnywhere
from broker.front.answering import Answering
from broker.front.parent import serve_front_ends
from broker.handlers.stream import PublishStream
from broker.handlers.table import hot_handlers
from broker.http.bodies import BodyBudget
from broker.http.listen import serve_http
from broker.http.settings import http_settings
from broker.thrift.listen import serve_thrift
from broker.thrift.methods import TephraMethods
from broker.views.table import ROUTES

if TYPE_CHECKING:
    import trio

    from broker.service import Service


async def serve(
    service: Service, budget: BodyBudget, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]]
) -> None:
    """Answer HTTP, and other instances, until ``stop`` is set; started once connections are accepted. Raises OSError."""
    settings = http_settings(service.config)
    handlers, cluster = hot_handlers(service), service.cluster
    begin = partial(PublishStream if cluster is None else cluster.begin, service)
    peers = None if cluster is None else cluster.door()
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
    own, anywhere = service.decider.own, service.decider.anywhere
    if not config.transactions.thrift or (own is None and anywhere is None):
        return []
    serving = partial(
        serve_thrift,
        config.transactions.thrift,
        ThriftAnywhere(service) if own is None else TephraMethods(own),
        budget=BodyBudget(config.http.max_inflight_bytes // 4),  # its own: half-sent frames must not hold up publishes
        stop=stop,
        grace_s=config.shutdown.drain_s,
    )
    addresses: list[str] = await servers.start(serving)
    return addresses
