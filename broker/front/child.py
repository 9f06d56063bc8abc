"""A front end's process: serves HTTP on inherited sockets, and forwards requests to the owning process.

It exits on SIGTERM, after sending its last answers, or when the owning process exits.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import trio

from broker.api.waiting import metered, reauthorized
from broker.config.config import config_of
from broker.freed_memory import bound_freed_memory
from broker.front.forward import FrontForwarding
from broker.garbage import Reclaim, freeze_loaded, short_collections
from broker.http import sockets
from broker.http.budgets import AnswerBudget, BodyBudget
from broker.http.descriptors import Descriptors
from broker.http.handlers import RequestTasks
from broker.http.messages import status_of
from broker.http.origin_check import origin_check
from broker.http.reactor import open_reactor
from broker.http.route import Accounting
from broker.http.server import serve_http
from broker.link.client import Link
from broker.link.flow import LinkBroken
from broker.link.http_codec import encode_identity
from broker.link.proof import with_binding
from broker.link.wire import WITHIN_DAEMON
from broker.logs import AccessLog, process, setup_logs
from broker.reload import Reloads
from broker.security.grants import parse_grants
from broker.security.guard import Guard, RefusedRequest
from broker.security.identity import NO_IDENTITY
from broker.security.peer_names import ConnectionNames
from broker.security.quotas import Quotas
from broker.security.tokens import parse_tokens
from broker.tls import certificates_of
from broker.tracing import open_traces, traced

if TYPE_CHECKING:
    from broker.config import Config
    from broker.http.tls_socket import TlsStream
    from broker.security.oidc import OidcProvider
    from broker.security.peer import Peer
    from broker.tls import Certificates
    from broker.tracing import Traces
    from plainsong.protocol.errors import PlainsongError

log = logging.getLogger(__name__)
#: Time allowed for the last answers once the owning process has ended.
LAST_ANSWERS_S = 1.0


class FrontEnd:
    """The life cycle of this process."""

    def __init__(self, link: socket.socket, handover: socket.socket, listeners: list[socket.socket]) -> None:
        self._link = Link(sockets.stream_of(link), WITHIN_DAEMON, peer="the owning process")
        self._handover = handover
        self._listeners = listeners
        self._stop = trio.Event()
        self._provider: OidcProvider | None = None

    async def run(self) -> None:
        """Serve until SIGTERM, or until the owning process exits."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_link)
            nursery.start_soon(Reclaim(lambda: 0).run)
            try:
                answer: dict[str, Any] = (await self._link.call("settings", None)).value
            except LinkBroken:  # the owning process has ended
                nursery.cancel_scope.cancel()  # a task that remains would keep this process, and with it the port
                return
            config = config_of(answer["settings"])
            logs = setup_logs(config.log, sys.stdout)
            try:
                with trio.open_signal_receiver(signal.SIGTERM) as signals:  # before it accepts connections
                    nursery.start_soon(self._stop_at, signals)
                    guard = self._guard(config, answer["tables"])
                    if guard.required:
                        nursery.start_soon(self._follow_tables, guard)
                        nursery.start_soon(guard.watch_ends)
                    if self._provider is not None:
                        nursery.start_soon(self._provider.run)  # each process fetches the keys itself
                    await self._serve(config, guard, nursery, has_peers=answer["peers"])
                    nursery.cancel_scope.cancel()
            finally:
                logs.close()

    async def _run_link(self) -> None:
        await self._link.run()
        if not self._stop.is_set():
            log.warning("the owning process has ended")
            self._stop.set()

    async def _stop_at(self, signals: Any) -> None:
        async for _ in signals:
            self._stop.set()

    async def _reload_at_signal(self, certificates: Certificates) -> None:
        reloads = Reloads()
        reloads.add(certificates.look_again)
        await reloads.run()

    def _guard(self, config: Config, tables: dict[str, bytes]) -> Guard:
        """Return a guard with the tables of the owning process."""
        settings = config.security
        names = ConnectionNames(settings.certificate_name, unix=settings.unix_names)
        guard = Guard(
            required=settings.authentication == "required",
            open_metrics=config.metrics.open,
            peer_names=names,
            counters=FrontForwarding(self._link),
            quotas=Quotas(
                time.monotonic,
                share=1 / config.http.processes,
                refused=lambda limit: self._link.notify("quota_refused", limit),
            ),
        )
        if guard.required and settings.oidc.issuer:
            from broker.security.oidc import OidcProvider

            guard.provider = self._provider = OidcProvider(settings.oidc, on_change=guard.expire)
        guard.on_refused = self._report_refused
        _put(guard, tables)
        return guard

    def _report_refused(self, refusal: RefusedRequest) -> None:
        """Have the owning process record a refusal."""
        address = "" if refusal.peer is None else refusal.peer.address
        told = [refusal.error, encode_identity(refusal.who), address, refusal.target, refusal.request_id]
        self._link.notify("refused", told)

    def _report_refused_origin(self, what: str, peer: Peer, error: PlainsongError) -> None:
        """Have the owning process record a refusal for a request's Host or Origin."""
        self._report_refused(RefusedRequest(error, NO_IDENTITY, peer, what))

    async def _follow_tables(self, guard: Guard) -> None:
        """Apply the owning process's tables whenever it changes them, or a credential expires."""
        epoch = 0
        while True:
            try:
                epoch, tables = (await self._link.call("tables", epoch)).value
            except LinkBroken:
                return  # the owning process has ended
            _put(guard, tables)

    async def _serve(self, config: Config, guard: Guard, nursery: trio.Nursery, *, has_peers: bool) -> None:
        traces = open_traces(config)
        async with nullcontext() if traces is None else aclosing(traces):
            await self._serve_traced(config, guard, nursery, traces, has_peers=has_peers)

    async def _serve_traced(
        self, config: Config, guard: Guard, nursery: trio.Nursery, traces: Traces | None, *, has_peers: bool
    ) -> None:
        settings = config.http
        forwarding = FrontForwarding(self._link)
        endpoints = tuple(
            traced(reauthorized(metered(each, guard), guard, counts=False), traces)
            for each in forwarding.endpoints(RequestTasks(nursery))
        )
        accounting = Accounting(forwarding.count, AccessLog(enabled=config.log.access))
        guard.on_answered = accounting.access.refused
        check = origin_check(config)
        check.on_answered = lambda target, error: accounting.access.refused("unknown", target, status_of(error))
        if guard.required:
            check.on_refused = self._report_refused_origin
        certificates = certificates_of(config)
        if certificates is not None:
            certificates.on_handshake = forwarding.count_handshake
            certificates.report_names_to(check.serve_names)
            nursery.start_soon(certificates.watch, config.security.reload_s)
            nursery.start_soon(self._reload_at_signal, certificates)
        try:
            if not (await self._link.call("ready", None)).value:
                return
        except LinkBroken:
            return  # the owning process has ended
        async with open_reactor(settings.keep_alive_s) as reactor:
            await serve_http(
                settings,
                endpoints,
                reactor=reactor,
                binds=self._listeners,
                budget=BodyBudget(settings.max_inflight_bytes, AnswerBudget(settings.max_answer_bytes)),
                stop=self._stop,
                grace_s=config.shutdown.drain_s,
                tls=certificates,
                check=check,
                guard=guard,
                begin=forwarding.begin,
                peers=self._hand_peer_over if has_peers else None,
                accounting=accounting,
                descriptors=Descriptors(lambda: self._link.notify("descriptors_short", None)),
            )
        with trio.move_on_after(LAST_ANSWERS_S):
            await self._link.aclose()

    async def _hand_peer_over(
        self, stream: trio.SocketStream | TlsStream, already_read: bytes, stop: trio.Event
    ) -> None:
        """Hand a connection from another instance over to the owning process."""
        del stop
        if isinstance(stream, trio.SocketStream):
            connection = socket.socket(fileno=os.dup(stream.socket.fileno()))
            await stream.aclose()
            await sockets.send_connection(self._handover, connection, with_binding(b"", already_read))
            return
        # TLS state cannot be handed over: the connection stays here, and its plain bytes are relayed.
        ours, theirs = socket.socketpair()
        await sockets.send_connection(self._handover, theirs, with_binding(stream.tls.binding, already_read))
        await sockets.passed_on(stream, sockets.stream_of(ours))


def _put(guard: Guard, tables: dict[str, bytes]) -> None:
    """Apply tables that the owning process has read and validated."""
    tokens, grants = tables.get("tokens"), tables.get("grants")
    guard.replace(
        tokens=None if tokens is None else parse_tokens(tokens), grants=None if grants is None else parse_grants(grants)
    )


def run_front_end(name: str, numbers: list[int]) -> None:
    """Run the process on inherited descriptors: its link, its handover socket, its listeners."""
    process.set(name)
    bound_freed_memory()
    # The owning process forwards SIGHUP, which would end this process. A handler is set later, if there are files to
    # reload.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    link, handover, *listeners = (socket.socket(fileno=number) for number in numbers)
    for each in (link, handover, *listeners):
        each.setblocking(False)
        each.set_inheritable(False)

    async def run() -> None:
        await FrontEnd(link, handover, listeners).run()

    with short_collections():
        freeze_loaded()
        trio.run(run)
