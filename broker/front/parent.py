"""The owning process's part of front ends: their sockets, which it keeps, and their lives, which it begins and ends.

Each has sockets of its own on the common address, among which the system shares connections out. They listen once all
front ends are there, so that nobody is let in who would have to wait; and they stay open here when a front end dies, so
that connections wait for its successor instead of being refused.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from socket import socketpair
from typing import TYPE_CHECKING, Any

import trio

from broker.config import every_setting
from broker.front import FrontEndFailed, descriptors
from broker.front.quick import QuickPublishes
from broker.http.sockets import bind_together, let_in, shown
from broker.peering.answers import Reply
from broker.peering.bounds import WITHIN_DAEMON
from broker.peering.serving import serve_link

if TYPE_CHECKING:
    import socket

    from broker.config import Config
    from broker.front.answering import Answering
    from broker.http.listen import PeerDoor
    from broker.peering.serving import Call

log = logging.getLogger(__name__)

#: Seconds before a front end that ended is started again, growing while it does not live; the last one repeats.
PAUSES_S = (0.05, 0.2, 1.0, 5.0)
#: A front end that lived for so long has not failed to start.
SETTLED_S = 10.0
#: How long a front end may answer no ping before it is ended and another takes its place: half of the clients wait.
SILENCE_S = 30.0
#: How long a process whose link has ended has for its last answers.
AFTER_LINK_S = 5.0
#: How long after the grace of a stop a front end may take to end by itself.
LAST_S = 1.0
#: What a front end may hold of answers at least; they stream through it.
MIN_ANSWER_BYTES = 4 << 20
_SECTIONS = ("http", "log", "shutdown")


async def serve_front_ends(
    config: Config,
    answering: Answering,
    peers: PeerDoor | None,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves by ``http.processes`` front ends until ``stop`` is set and they have left, within ``shutdown.drain_s``.

    ``task_status`` is given the addresses once all of them accept. ``peers`` gets the connections of other instances.

    Raises:
      OSError: the address cannot be listened on.
      FrontEndFailed: one did not come up.
    """
    together = await trio.to_thread.run_sync(bind_together, config.http.bind, config.http.processes)
    try:
        async with trio.open_nursery() as nursery:
            parts = _Parts(share_of(config), answering, peers, stop, nursery, config.http.max_connections)
            front_ends = [_FrontEnd(f"front-{number}", row, parts) for number, row in enumerate(together, 1)]
            for each in front_ends:
                nursery.start_soon(each.keep)
            for each in front_ends:
                await each.ready.wait()
            if not stop.is_set():
                let_in(together)
            parts.begun.set()
            task_status.started([shown(listener) for listener in together[0]])
            await stop.wait()
            for listener in (each for row in together for each in row):
                listener.close()  # nobody new is let in; the front ends close theirs
            nursery.cancel_scope.deadline = trio.current_time() + config.shutdown.drain_s + LAST_S
    finally:
        for listener in (each for row in together for each in row):
            listener.close()


def share_of(config: Config) -> dict[str, Any]:
    """The settings of one front end: those of the daemon, and its share of what is bounded for all of them."""
    http = config.http
    mine = replace(
        config,
        http=replace(
            http,
            max_connections=-(-http.max_connections // http.processes),
            max_inflight_bytes=max(http.max_inflight_bytes // http.processes, 2 * http.max_body_bytes),
            max_answer_bytes=max(http.max_answer_bytes // http.processes, MIN_ANSWER_BYTES),
        ),
    )
    return {name: mine.value(name) for name, setting in every_setting().items() if setting.section in _SECTIONS}


class _Parts:
    """What all front ends of a daemon share."""

    def __init__(
        self,
        settings: dict[str, Any],
        answering: Answering,
        peers: PeerDoor | None,
        stop: trio.Event,
        nursery: trio.Nursery,
        max_peers: int,
    ) -> None:
        self.settings = settings
        self.answering = answering
        self.peers = peers
        self.stop = stop
        self.nursery = nursery
        #: Set once the sockets listen, or the stop came before.
        self.begun = trio.Event()
        #: Connections of other instances that may be here at a time, and that are.
        self.max_peers = max_peers
        self.open_peers = 0


class _FrontEnd:
    """One front end: its sockets, and one process after the other."""

    def __init__(self, name: str, listeners: list[socket.socket], parts: _Parts) -> None:
        self._name = name
        self._listeners = listeners
        self._parts = parts
        #: Set once the first process is about to accept, or the stop came before.
        self.ready = trio.Event()

    async def keep(self) -> None:
        """Keeps a process running until the stop. Raises FrontEndFailed."""
        failures = 0
        while True:
            begun_s = trio.current_time()
            try:
                status: int | str = await self._run()
            except OSError as error:  # out of descriptors, processes or memory: as of those that end at once
                status = str(error)
            if self._parts.stop.is_set():
                self.ready.set()
                return
            if not self.ready.is_set():
                raise FrontEndFailed(f"{self._name} ended with status {status} before it accepted connections")
            failures = 0 if trio.current_time() - begun_s > SETTLED_S else failures + 1
            pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            log.error("a front end ended", extra={"front_end": self._name, "status": status, "again_in_s": pause_s})
            with trio.move_on_after(pause_s):
                await self._parts.stop.wait()
                return

    async def _run(self) -> int:
        """One process, from its start to its end; its exit status."""
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for pair in (socketpair, descriptors.pair):
                mine, its = pair()
                ours.append(mine)
                theirs.append(its)
            numbers = [each.fileno() for each in (*theirs, *self._listeners)]
            command = [sys.executable, "-m", "broker.front", self._name, *map(str, numbers)]
            process = await trio.lowlevel.open_process(command, pass_fds=numbers, stdin=None)
        except BaseException:
            for each in ours:
                each.close()
            raise
        finally:
            for each in theirs:
                each.close()
        link, door = ours
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, descriptors.stream_of(link), process)
                nursery.start_soon(self._take_peers, door)
                nursery.start_soon(self._tell_to_leave, process)
                status = await process.wait()
                nursery.cancel_scope.cancel()
            return status
        finally:
            door.close()
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()

    async def _serve(self, link: trio.SocketStream, process: trio.Process) -> None:
        quick = QuickPublishes(self._parts.answering.service)
        bounds = replace(WITHIN_DAEMON, silence_s=SILENCE_S)
        await serve_link(link, self._dispatch, bounds, quick=quick, peer=self._name)
        await trio.sleep(AFTER_LINK_S)
        process.kill()  # frozen or lost: it would keep its connections waiting for ever

    async def _tell_to_leave(self, process: trio.Process) -> None:
        await self._parts.stop.wait()
        process.terminate()

    async def _dispatch(self, call: Call) -> Reply:
        if call.kind == "settings":
            return Reply({"settings": self._parts.settings, "peers": self._parts.peers is not None})
        if call.kind != "ready":
            return await self._parts.answering.dispatch(call)
        self.ready.set()
        await self._parts.begun.wait()
        if self._parts.stop.is_set():
            return Reply(False)
        log.info("a front end accepts connections", extra={"front_end": self._name})
        return Reply(True)

    async def _take_peers(self, door: socket.socket) -> None:
        """Connections of other instances that came to this front end; they outlive it."""
        while (taken := await descriptors.take(door)) is not None:
            self._parts.nursery.start_soon(self._serve_peer, *taken)

    async def _serve_peer(self, connection: socket.socket, already_read: bytes) -> None:
        parts = self._parts
        if parts.peers is None or parts.open_peers >= parts.max_peers:
            connection.close()
            return
        parts.open_peers += 1
        try:
            await parts.peers(descriptors.stream_of(connection), already_read, parts.stop)
        except Exception:
            log.exception("a connection failed")
        finally:
            parts.open_peers -= 1
