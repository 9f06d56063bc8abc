"""The Thrift server: accepts connections within a bound, and ends them in good order."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.http.sockets import listen_on, shown
from broker.thrift.connection import Connection

if TYPE_CHECKING:
    from broker.http.bodies import BodyBudget
    from broker.thrift.connection import Methods

log = logging.getLogger("plainsong.thrift")

#: Every process of Tephra's clients keeps up to fifty open.
MAX_CONNECTIONS = 4_096


async def serve_thrift(
    bind: str,
    methods: Methods,
    *,
    budget: BodyBudget,
    stop: trio.Event,
    grace_s: float,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves Tephra's clients until ``stop`` is set and calls under way are answered, at most ``grace_s`` later.

    ``task_status`` is given the addresses as ``host:port``. What frames hold counts against ``budget``.

    Raises:
      OSError: ``bind`` cannot be listened on; nothing is left open.
    """
    sockets = await trio.to_thread.run_sync(listen_on, bind)
    try:
        server = _Server(methods, budget, max_connections)
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, server.serve, listeners, handler_nursery=connections)
                )
                task_status.started([shown(sock) for sock in sockets])
                await stop.wait()
                accepting.cancel_scope.cancel()
            for sock in sockets:
                sock.close()
            server.stop()
            connections.cancel_scope.deadline = trio.current_time() + grace_s
    finally:
        for sock in sockets:
            sock.close()


class _Server:
    def __init__(self, methods: Methods, budget: BodyBudget, max_connections: int) -> None:
        self._methods = methods
        self._budget = budget
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        for connection in self._open:
            connection.stop()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serves one connection; whatever goes wrong in it stays in it."""
        if len(self._open) >= self._max_connections or self._stopping:
            log.warning("a Thrift connection was refused: %s are open", len(self._open))
            await trio.aclose_forcefully(stream)
            return
        # Idle ones are kept for ever; those whose client vanished without a word are found by the system.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Connection(stream, self._methods, self._budget)
        self._open.add(connection)
        try:
            await connection.run()
        except Exception:
            log.exception("a Thrift connection failed")
        finally:
            self._open.discard(connection)
            await trio.aclose_forcefully(stream)
