"""Start and end of the daemon's parts, in nested blocks: the outermost begins first and ends last.

A standby (broker.standby) runs before all of them: once it has taken over, the primary starts with its directory. After
a planned switch the primary's directory becomes that of a standby.

    open_store
    └── second copy                  if there is one: ships the store's commits
        └── actors nursery           topics, transaction service, janitor, membership, space guard, loop watch
            └── reactor              waits for the sockets of all connections
                └── watches nursery      signals, files to reload, garbage, the service manager
                    └── listeners nursery    start() returns the bound addresses; then the cluster is entered
                        └── wait for SIGTERM or SIGINT
                              0. in a cluster: our topics move to other owners; requests are forwarded
                              1. mailboxes close: nothing new is accepted, parked and held polls get empty answers
                              2. the listeners stop after sending the last answers
            3. topics finish their mailboxes and return
            4. the transaction service, which may still have asked topics, does the same
        5. the last commits are shipped
    6. the store closes

If the servers stopped first, a parked poll would delay the exit for the server's whole grace period.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from actors.authority import keep_authority
from actors.lease_hold import LeaseHold
from broker.api.topics.chain import chain_secrets
from broker.assemble import assemble
from broker.attention import certificate_findings
from broker.authority import describe_authority
from broker.cluster.join import (
    describe_membership,
    enter,
    find_others,
    hand_over,
    start_rebalance,
    verify_advertised_address,
)
from broker.config.exposure import in_effect
from broker.config.values import UNIX
from broker.garbage import Reclaim, freeze_loaded, short_collections
from broker.gauges import add_cluster_gauges, add_gauges, add_security_gauges, add_tls_gauges, add_transaction_gauges
from broker.http.budgets import BodyBudget
from broker.http.reactor import open_reactor
from broker.link.proof import link_secret
from broker.listeners import serve, start_thrift
from broker.metrics import Metrics
from broker.reload import Reloads
from broker.replication import (
    add_copy_gauges,
    answer_while_leased,
    copy_findings,
    is_standby,
    outbox_of,
    second_copy,
    start_refusing,
)
from broker.security.setup import build_security
from broker.standby import run_standby
from broker.stores import fitted, open_store, place_of
from broker.systemd import Notifier
from broker.tls import certificates_of
from broker.tracing import open_traces
from plainsong.protocol.version import VERSION
from storage.copy_parts import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from broker.config import Config
    from broker.daemon import Daemon
    from broker.membership.membership import Membership
    from broker.testing import Testing

log = logging.getLogger(__name__)


async def run_daemon(config: Config, *, announce: Callable[[Running], None], testing: Testing | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then shut down in order; a second signal ends the process at once.

    ``announce`` is called once, when connections are accepted. Garbage collections are kept short while it serves.

    Raises:
      FileUnusable: the certificate, a secret, the tokens or the grants file cannot be used; nothing was opened.
      StoreUnusable: the store cannot be opened; nothing was changed.
      OSError: the address cannot be listened on.
      TracesUnavailable: tracing is configured, and OpenTelemetry is not installed.
      NameTaken: another instance of the cluster has the name of this one.
    """
    with short_collections():
        serve_next: Callable[[Config, Callable[[Running], None], Testing | None], Awaitable[bool]] = _run
        while await (_take_over_and_run if is_standby(config) else serve_next)(config, announce, testing):
            # If the directory is not a standby's now, the switch has failed.
            serve_next = _serve_again


async def _take_over_and_run(config: Config, announce: Callable[[Running], None], testing: Testing | None) -> bool:
    """Follow, and serve once this process has taken over. Returns the result of ``_run``; False if it did not serve."""
    hold = LeaseHold()
    async with trio.open_nursery() as holding:
        is_primary = await _follow(config, announce, holding, hold)
        follows_next = is_primary and await _run(config, announce, testing, hold)
        holding.cancel_scope.cancel()
    return follows_next


async def _serve_again(config: Config, announce: Callable[[Running], None], testing: Testing | None) -> bool:
    """Serve after a switch that failed, once the object store responds again. Returns the result of ``_run``.

    Raises ReignOver or Foreign if a standby has taken over in the meantime.
    """
    log.warning("the log was not handed over: serving again")
    async with trio.open_nursery() as nursery:
        # A service manager that believes the daemon to run ends it if it is silent for as long as this may take.
        nursery.start_soon(_keep_alive, Notifier(os.environ))
        is_switched = await _run(config, announce, testing, start_s=inf)
        nursery.cancel_scope.cancel()
    return is_switched


async def _follow(config: Config, announce: Callable[[Running], None], holding: trio.Nursery, hold: LeaseHold) -> bool:
    """Run as a standby. Returns True once this process has taken over, False after a signal.

    Args:
      holding, hold: see ``run_standby``.
    """
    notifier, stop = Notifier(os.environ), trio.Event()

    def listening(addresses: Sequence[str]) -> None:
        announce(
            Running(
                version=VERSION,
                addresses=[url_of(address, config) for address in addresses],
                data_dir=config.storage.data_dir,
                store_kind="leveldb",
                durability="follows the primary's commits in the object store; acknowledges nothing itself",
                decides="nothing",
                certificate=str(config.tls.certificate),
                has_console=False,
                standby=config.replication.to,
            )
        )
        notifier.ready()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_at_signal, stop)
        nursery.start_soon(_keep_alive, notifier)
        has_taken_over = await run_standby(config, listening, stop, holding, hold)
        nursery.cancel_scope.cancel()
    return has_taken_over and not stop.is_set()


async def _run(
    config: Config,
    announce: Callable[[Running], None],
    testing: Testing | None,
    hold: LeaseHold | None = None,
    *,
    start_s: float | None = None,
) -> bool:
    """Serve. Returns True after a planned switch: this process is to follow, or to serve again if the switch has failed.

    Args:
      hold: of the standby that has taken over in this process.
      start_s: see ``second_copy``.
    """
    notifier = Notifier(os.environ)
    traces = open_traces(config)
    stop, switching = trio.Event(), trio.Event()

    def switch() -> None:
        log.warning("handing over to a standby")
        switching.set()
        stop.set()

    certificates, reloads = certificates_of(config), Reloads()
    link_secret(config, "")  # raises for an unusable secret before anything is opened
    chain_secrets(config)
    metrics = Metrics(VERSION)
    security = build_security(config, metrics, metrics.security_reload_failed, metrics.quota_refused)
    outbox = outbox_of(config)
    async with (
        nullcontext() if traces is None else aclosing(traces),
        open_store(config, outbox) as store,
        second_copy(
            config, store, outbox, switching, hold or LeaseHold(), partial(_keep_alive, notifier), start_s
        ) as copy,
        trio.open_nursery() as actors,
    ):
        config = fitted(config, store.traits)
        await refuse_unfinished(store)
        await keep_authority(store, config.transactions.service)
        membership = await find_others(config, actors)
        clock = None if testing is None else testing.clock
        daemon = await assemble(
            config,
            store,
            metrics,
            actors,
            ownership=membership,
            membership=membership,
            clock=clock,
            security=security,
            certificates=certificates,
            # Front ends record their own requests.
            traces=traces if config.http.processes == 1 else None,
            copy=copy,
            switch=switch if outbox is not None and config.replication.standby != "never" else None,
        )
        if testing is not None:
            daemon = replace(daemon, endpoints=testing.faulty(daemon.endpoints))
            await actors.start(testing.serve)
        start_refusing(outbox, daemon, actors)
        await daemon.start(actors)
        budget = BodyBudget(config.http.max_inflight_bytes, daemon.answers)
        add_gauges(metrics, daemon.directory, store, daemon.clock, daemon.space, budget, daemon.store_time)
        add_transaction_gauges(metrics, daemon.authority, daemon.directory, daemon.pointers, daemon.clock)
        add_security_gauges(metrics, security)
        if copy is not None:
            add_copy_gauges(metrics, copy, config.replication)
            daemon.attention.sources.append(partial(copy_findings, copy, config.replication))
            if security.guard.required:
                for event in copy.record.events:
                    daemon.audit.happened(event.action, event.time_ms, event.after)
            answer_while_leased(copy.lease, daemon.directory.environment.run_queue)
            await copy.recorded()
        rebalance = None
        if membership is not None and daemon.cluster is not None:
            rebalance = start_rebalance(daemon.cluster.handover, membership, actors)
            add_cluster_gauges(metrics, membership)
        # If there are front ends, they read the requests, and the actors' tasks run the turns.
        reads = config.http.processes == 1
        turns, waker = (daemon.directory.environment.run_queue, store.waker) if reads else (None, None)
        async with (
            open_reactor(config.http.keep_alive_s, turns, waker) as reactor,
            trio.open_nursery() as watches,
        ):
            watches.start_soon(_stop_at_signal, stop)
            watches.start_soon(Reclaim(partial(len, daemon.directory)).run)
            await watches.start(reloads.run)
            if security.guard.required:
                reloads.add(security.files.look)
            if certificates is not None:
                reloads.add(certificates.look_again)
                watches.start_soon(certificates.watch, config.security.reload_s)
                add_tls_gauges(metrics, certificates)
                daemon.attention.sources.append(partial(certificate_findings, certificates))
            async with trio.open_nursery() as listeners:
                lease = None if copy is None else copy.lease
                serving = partial(serve, daemon, budget, reactor, stop, certificates, reloads, lease)
                addresses = await listeners.start(serving)
                thrift = await start_thrift(daemon, reactor, stop, listeners, certificates, lease)
                if membership is not None:
                    address = config.cluster.advertise or next(each for each in addresses if not each.startswith(UNIX))
                    await enter(membership, address, stop)
                    watches.start_soon(_verify_address, daemon, membership.me.name, address)
                if copy is not None:
                    copy.lease.serve(urls_of(addresses, config))
                freeze_loaded()
                names = frozenset[str]() if certificates is None else certificates.now.names
                announce(_running(daemon, membership, addresses, thrift, testing, names))
                notifier.ready()
                watches.start_soon(_keep_alive, notifier)
                await stop.wait()
                if not switching.is_set():
                    notifier.stopping()  # the process continues after a switch, so only a stop is announced
                if rebalance is not None:
                    await hand_over(daemon.directory, daemon.stopping, rebalance, config.shutdown.drain_s)
                daemon.stop()
                listeners.cancel_scope.deadline = trio.current_time() + config.shutdown.drain_s
            watches.cancel_scope.cancel()
        with trio.move_on_after(config.shutdown.drain_s):
            await daemon.drained()
        actors.cancel_scope.cancel()
    log.info("stopped")
    return switching.is_set()


async def _verify_address(daemon: Daemon, name: str, address: str) -> None:
    assert daemon.cluster is not None  # only members of a cluster have an address to verify
    await verify_advertised_address(name, address, daemon.cluster.links.dial, secret=daemon.cluster.secret)


def _running(
    daemon: Daemon,
    membership: Membership | None,
    addresses: list[str],
    thrift: list[str],
    testing: Testing | None,
    names: frozenset[str],
) -> Running:
    config, traits = daemon.config, daemon.store.traits
    return Running(
        version=daemon.version,
        addresses=[url_of(address, config) for address in addresses],
        data_dir=config.storage.data_dir if traits.kind == "leveldb" else None,
        place=place_of(config),
        store_kind=traits.kind,
        durability=traits.durability,
        decides=describe_authority(config.transactions),
        thrift=thrift,
        cluster="" if membership is None else describe_membership(membership),
        insecure=list(in_effect(config).values()),
        needs_names=config.security.authentication == "required",
        certificate=str(config.tls.certificate),
        dns_name=min(
            (name for name in names if "*" not in name), default="", key=lambda name: (name != "localhost", name)
        ),
        needs_certificates=config.tls.client_certificates == "required",
        has_console=config.console.enabled,
        testing="" if testing is None else str(testing.path),
    )


def url_of(address: str, config: Config) -> str:
    """Return the URL of a bound address."""
    if address.startswith(UNIX):
        return address
    return f"{'https' if config.tls.certificate else 'http'}://{address}"


def urls_of(addresses: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return the URLs at which clients reach this daemon while it is the primary."""
    if config.replication.urls:
        return tuple(url.strip() for url in config.replication.urls.split(","))
    return tuple(url_of(address, config) for address in addresses if not address.startswith(UNIX))


async def _stop_at_signal(stop: trio.Event) -> None:
    """Set ``stop`` at the first signal; end the process at the second, whatever it is doing."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if stop.is_set():
                # Safe: acknowledged messages are on disk.
                os._exit(128 + number)
            log.info("leaving", extra={"signal": signal.Signals(number).name})
            stop.set()


async def _keep_alive(notifier: Notifier) -> None:
    """Notify a service manager that the event loop runs, if it has a watchdog."""
    while notifier.watchdog_interval_s is not None:
        notifier.alive()
        await trio.sleep(notifier.watchdog_interval_s)


# --- running ---------------------------------------------------------------------------------------
#
# The facts that the banner shows once the daemon accepts connections.


@dataclass(frozen=True, slots=True)
class Running:
    """A running daemon."""

    version: str
    addresses: list[str]
    """URLs without a path, such as ``http://127.0.0.1:7420`` with the bound port, or ``unix:/path``; at least one."""
    data_dir: Path | None
    """The directory of the messages; None if the store has no files of its own."""
    store_kind: str
    """``StoreTraits.kind``."""
    durability: str
    """``StoreTraits.durability``: a sentence on what an acknowledged message survives."""
    decides: str
    """Which transactions the daemon decides, in a few words."""
    thrift: Sequence[str] = ()
    """Addresses of the listener for Tephra's clients, as ``host:port``; usually none."""
    cluster: str = ""
    """Its name in the cluster, and the number of instances; empty if there is only this one."""
    insecure: Sequence[str] = ()
    """Missing protections of a daemon that other machines can reach, such as ``reachable without TLS``."""
    needs_names: bool = False
    """True if requests require authentication."""
    certificate: str = ""
    """The file of the certificate; empty without TLS."""
    dns_name: str = ""
    """A DNS name in the certificate; empty if it has none."""
    needs_certificates: bool = False
    """True if connections require a client certificate."""
    has_console: bool = True
    """True if the console is enabled."""
    testing: str = ""
    """The socket on which tests control the daemon; empty if there is none."""
    place: str = "in memory"
    """Where the messages are stored, in words for the banner, if there is no ``data_dir``."""
    standby: str = ""
    """The URL of the log that it follows; empty if it is not a standby."""


def banner(running: Running) -> str:
    """Return the start message: a few lines, the last of which can be pasted into a shell."""
    first, *others = running.addresses
    names = ["  names       required: $TOKEN is your token (plainsong token create)"] if running.needs_names else []
    console = [f"  console     {_named(running, url)}/console" for url in running.addresses if not url.startswith(UNIX)]
    where = running.place if running.data_dir is None else str(running.data_dir.absolute())
    thrift = "".join(f", also for Tephra's clients at {address}" for address in running.thrift)
    testing = [f"  UNDER TEST  any user who can write to {running.testing} can make it fail"] if running.testing else []
    cluster = [f"  cluster     {running.cluster}"] if running.cluster else []
    if running.standby:
        return "\n".join(
            [
                f"plainsong {running.version} listens on {first}" + "".join(f", {other}" for other in others),
                f"  STANDBY     of {running.standby}: it follows, and serves nothing",
                f"  data        {where} ({running.store_kind})",
                f"  state       curl {_curl_options(running, first).replace('-X PUT ', '')}/v1/replication",
            ]
        )
    return "\n".join(
        [
            f"plainsong {running.version} listens on {first}" + "".join(f", {other}" for other in others),
            *cluster,
            *testing,
            *(f"  INSECURE    {waived}" for waived in running.insecure),
            f"  data        {where} ({running.store_kind})",
            f"  durability  {running.durability}",
            f"  decides     {running.decides}{thrift}",
            *(console[:1] if running.has_console else ()),
            *names,
            f"  try         curl {_curl_options(running, first)}/v1/namespaces/demo/topics/greetings",
        ]
    )


def _named(running: Running, url: str) -> str:
    """Return the URL with a DNS name of the certificate, which a client that verifies it needs."""
    scheme, _, place = url.partition("://")
    return f"{scheme}://{running.dns_name}:{place.rpartition(':')[2]}" if running.dns_name else url


def _curl_options(running: Running, first: str) -> str:
    """Return the options of curl for a PUT, and the URL without its path."""
    options = ["-X PUT"]
    if running.needs_names:
        options.append('-H "Authorization: Bearer $TOKEN"')
    if first.startswith(UNIX):
        return " ".join([*options, f"--unix-socket {first.removeprefix(UNIX)} http://localhost"])
    if running.certificate:
        options.append(f"--cacert {shlex.quote(running.certificate)}")
        if running.dns_name:  # it may not resolve yet, so connect to this machine
            host, _, port = first.partition("://")[2].rpartition(":")
            here = "127.0.0.1" if host in ("0.0.0.0", "[::]", "") else host  # noqa: S104
            options.append(f"--connect-to {running.dns_name}:{port}:{here}:{port}")
        if running.needs_certificates:
            options.append("--cert $CERTIFICATE --key $KEY")
    return " ".join([*options, _named(running, first)])
