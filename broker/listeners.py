"""The daemon's listeners: HTTP, front ends, other instances and Tephra's clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from broker.api.operations.replication import not_leased
from broker.cluster.transactions import RoutedTephraMethods
from broker.front.parent import Answering, serve_front_ends
from broker.http.budgets import BodyBudget
from broker.http.server import serve_http
from broker.leased import LeasedMethods
from broker.reload import Reloads
from broker.thrift import THRIFT, GrantedMethods, TephraMethods, serve_thrift

if TYPE_CHECKING:
    import trio

    from actors.lease import LeaseKeeper
    from broker.daemon import Daemon
    from broker.http.reactor import Reactor
    from broker.thrift import Methods
    from broker.tls import Certificates


async def serve(
    daemon: Daemon,
    budget: BodyBudget,
    reactor: Reactor,
    stop: trio.Event,
    certificates: Certificates | None = None,
    reloads: Reloads | None = None,
    lease: LeaseKeeper | None = None,
    *,
    task_status: trio.TaskStatus[list[str]],
) -> None:
    """Serve HTTP and links from other instances until ``stop`` is set. Raises OSError.

    Args:
      lease: publishes of front ends are accepted only while it is valid; None: always. ``while_leased`` checks all other
        requests.
      task_status: started with the addresses, once connections are accepted.
    """
    config = daemon.config
    peers = None if daemon.cluster is None else daemon.cluster.peer_handler()
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
            lambda: None if lease is None or lease.is_current else not_leased(),
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
        certificates.report_names_to(check.serve_names)
    await serve_http(
        config.http,
        daemon.endpoints,
        reactor=reactor,
        budget=budget,
        stop=stop,
        grace_s=config.shutdown.drain_s,
        tls=certificates,
        check=check,
        guard=daemon.security.guard,
        begin=daemon.begin,
        peers=peers,
        accounting=daemon.accounting,
        descriptors=daemon.descriptors,
        task_status=task_status,
    )


async def start_thrift(
    daemon: Daemon,
    reactor: Reactor,
    stop: trio.Event,
    listeners: trio.Nursery,
    certificates: Certificates | None = None,
    lease: LeaseKeeper | None = None,
) -> list[str]:
    """Serve Tephra's clients if ``transactions.thrift`` is set; return the addresses. Raises OSError.

    Args:
      lease: calls are answered only while it is valid; None: always.
    """
    config, authority = daemon.config, daemon.authority
    if not config.transactions.thrift or (authority.own is None and authority.routed is None):
        return []
    owners = None if daemon.cluster is None else daemon.cluster.owners
    methods: Methods = RoutedTephraMethods(authority, owners) if authority.own is None else TephraMethods(authority.own)
    guard = daemon.security.guard
    if guard.required:
        methods = GrantedMethods(methods, partial(guard.rights_of, THRIFT), daemon.publishing.owner_of, daemon.audit)
    if lease is not None:
        methods = LeasedMethods(methods, lease)
    serving = partial(
        serve_thrift,
        config.transactions.thrift,
        methods,
        budget=BodyBudget(config.http.max_inflight_bytes // 4),  # separate: incomplete frames must not block publishes
        stop=stop,
        grace_s=config.shutdown.drain_s,
        settings=config.http,
        reactor=reactor,
        tls=certificates.context if config.transactions.thrift_tls and certificates is not None else None,
        descriptors=daemon.descriptors,
    )
    addresses: list[str] = await listeners.start(serving)
    return addresses
