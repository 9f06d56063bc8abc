"""The owning process's side of front ends: their sockets and processes, and the answers to what they forward.

Each front end has its own sockets on the common address; the kernel distributes connections among them. They listen
only once all front ends are ready, so that no accepted client has to wait. This process keeps the sockets open when a
front end dies, so that connections wait for its successor instead of being refused.
"""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from socket import socketpair
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from actors.mailbox import Future
from broker.api.answers import LOOP_BYTES, off_loop
from broker.cluster.remote_stream import converse
from broker.config import every_setting
from broker.front import FrontEndFailed
from broker.http import sockets
from broker.http.descriptors import Descriptors
from broker.http.messages import only_plain, status_of
from broker.http.route import status_to
from broker.http.sockets import SocketFiles, address_of, bind_shared, start_listening
from broker.link.flow import Reply
from broker.link.http_codec import answer_request, decode_identity, decode_request
from broker.link.proof import without_binding
from broker.link.server import in_task, serve_link
from broker.link.wire import WITHIN_DAEMON
from broker.reload import Reloads
from broker.security.guard import OPEN, RefusedRequest
from broker.security.peer import Peer
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.codec import JSON
from plainsong.protocol.codec.stream import MAX_RUN
from plainsong.protocol.errors import BadRequest, Internal, NoOwner, PlainsongError
from plainsong.protocol.ids import consecutive_ids
from plainsong.protocol.link import VOCABULARY
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt
from plainsong.protocol.topic.asks import PublishEach
from storage.threaded import in_thread

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from broker.api.messages.publish import Publishing
    from broker.config import Config
    from broker.http.budgets import AnswerBudget, BodyBudget
    from broker.http.messages import Begin, Conversation
    from broker.http.route import Accounting, Endpoint
    from broker.link.server import Call, CallHandler, PendingReply, ServedChannel, ServesPeer
    from broker.security.setup import Security
    from broker.tls import Certificates

log = logging.getLogger(__name__)
#: Pauses in seconds before a front end is restarted; the last one repeats.
PAUSES_S = (0.05, 0.2, 1.0, 5.0)
#: A front end that lived this long counts as started successfully.
STEADY_S = 10.0
#: A front end that leaves a ping unanswered for this long is replaced; its share of the clients waits until then.
SILENCE_S = 30.0
#: The time for last answers of a front end whose link has ended.
AFTER_LINK_S = 5.0
#: Time limit for a front end to exit after the grace period of a stop.
LAST_S = 1.0
#: The minimum answer budget of a front end; answers stream through it.
MIN_ANSWER_BYTES = 4 << 20
_SECTIONS = ("http", "security", "metrics", "tls", "otel", "cluster", "log", "shutdown")


async def serve_front_ends(
    config: Config,
    answering: Answering,
    peers: ServesPeer | None,
    *,
    stop: trio.Event,
    certificates: Certificates | None = None,
    reloads: Reloads | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``http.processes`` front ends until ``stop`` is set and they have ended, within ``shutdown.drain_s``.

    ``task_status`` receives the addresses once all front ends accept connections; ``peers`` receives the connections of
    other instances; ``certificates`` counts the handshakes of all. Front ends reload files when this process does.

    Raises:
      OSError: the address cannot be listened on.
      FrontEndFailed: a front end did not start.
    """
    rows = await in_thread(_bind_all, config)
    files = SocketFiles(rows[0])
    try:
        async with trio.open_nursery() as nursery:
            shared = _Shared(
                share_of(config),
                answering,
                peers,
                stop,
                nursery,
                config.http.max_connections,
                certificates,
                reloads or Reloads(),
            )
            front_ends = [_FrontEndProcess(f"front-{number}", row, shared) for number, row in enumerate(rows, 1)]
            for each in front_ends:
                nursery.start_soon(each.keep)
            for each in front_ends:
                await each.ready.wait()
            if not stop.is_set():
                start_listening(rows)
            shared.begun.set()
            task_status.started([address_of(listener) for listener in rows[0]])
            await stop.wait()
            for listener in (each for row in rows for each in row):
                listener.close()  # no new connections; the front ends close their own copies
            nursery.cancel_scope.deadline = trio.current_time() + config.shutdown.drain_s + LAST_S
    finally:
        for listener in (each for row in rows for each in row):
            listener.close()
        files.remove()


def _bind_all(config: Config) -> list[list[socket.socket]]:
    """Return the sockets of each front end on all addresses of ``http.bind``. Raises ValueError, BindFailed."""
    rows: list[list[socket.socket]] = [[] for _ in range(config.http.processes)]
    try:
        for bind in map(str, config.http.binds):
            shared = bind_shared(bind, config.http.processes, config.http.unix_mode)
            for row, more in zip(rows, shared, strict=True):
                row += more
    except BaseException:
        SocketFiles(rows[0]).remove()
        for sock in (each for row in rows for each in row):
            sock.close()
        raise
    return rows


def share_of(config: Config) -> dict[str, Any]:
    """Return the settings of one front end: the daemon's, with its share of the common limits."""
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
    return {
        name: mine.value(name)
        for name, setting in every_setting().items()
        if setting.section.partition(".")[0] in _SECTIONS
    }


class _Shared:
    """State that all front ends of a daemon share."""

    def __init__(
        self,
        settings: dict[str, Any],
        answering: Answering,
        peers: ServesPeer | None,
        stop: trio.Event,
        nursery: trio.Nursery,
        max_peers: int,
        certificates: Certificates | None,
        reloads: Reloads,
    ) -> None:
        self.settings = settings
        self.answering = answering
        self.peers = peers
        self.stop = stop
        self.nursery = nursery
        self.certificates = certificates
        self.reloads = reloads
        #: Set once the sockets listen, or the daemon stops before that.
        self.begun = trio.Event()
        #: The limit of connections of other instances, and their number.
        self.max_peers = max_peers
        self.open_peers = 0


class _FrontEndProcess:
    """One front end: its sockets, and its process, which is replaced when it ends."""

    def __init__(self, name: str, listeners: list[socket.socket], shared: _Shared) -> None:
        self._name = name
        self._listeners = listeners
        self._shared = shared
        #: Set once the first process is about to accept connections, or the daemon stops before that.
        self.ready = trio.Event()

    async def keep(self) -> None:
        """Keep a process running until the stop. Raises FrontEndFailed: the first one did not start."""
        backoff = Backoff(PAUSES_S)
        while True:
            begun_s = trio.current_time()
            try:
                status: int | str = await self._run()
            except OSError as error:  # out of descriptors, processes or memory: the same as an immediate end
                status = str(error)
            if self._shared.stop.is_set():
                self.ready.set()
                return
            if not self.ready.is_set():
                raise FrontEndFailed(f"{self._name} ended with status {status} before it accepted connections")
            if trio.current_time() - begun_s > STEADY_S:
                backoff.reset()
            pause_s = backoff.failed()
            log.error("a front end ended", extra={"front_end": self._name, "status": status, "again_in_s": pause_s})
            with trio.move_on_after(pause_s):
                await self._shared.stop.wait()
                return

    async def _run(self) -> int:
        """Run one process; return its exit status."""
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for pair in (socketpair, sockets.handover_pair):
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
        link, handover = ours

        def reload() -> None:
            if process.returncode is None and self.ready.is_set():
                process.send_signal(signal.SIGHUP)

        self._shared.reloads.add(reload)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, sockets.stream_of(link), process)
                nursery.start_soon(self._take_peers, handover)
                nursery.start_soon(self._terminate_at_stop, process)
                status = await process.wait()
                nursery.cancel_scope.cancel()
            return status
        finally:
            self._shared.reloads.remove(reload)
            handover.close()
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()

    async def _serve(self, link: trio.SocketStream, process: trio.Process) -> None:
        bounds = replace(WITHIN_DAEMON, silence_s=SILENCE_S)
        await serve_link(link, self._dispatch, bounds, flush=self._shared.answering.flush, peer=self._name)
        await trio.sleep(AFTER_LINK_S)
        process.kill()  # it is frozen: its connections would wait forever

    async def _terminate_at_stop(self, process: trio.Process) -> None:
        await self._shared.stop.wait()
        process.terminate()

    def _dispatch(self, call: Call, reply: PendingReply) -> None:
        if call.kind == "handshake":
            if self._shared.certificates is not None:
                self._shared.certificates.count(call.value)
            reply(Reply())
        elif call.kind == "settings":
            security = self._shared.answering.security
            tables = {} if security is None else security.files.content
            peers = self._shared.peers is not None
            reply(Reply({"settings": self._shared.settings, "peers": peers, "tables": tables}))
        elif call.kind == "ready":
            reply.run(self._begun)
        else:
            self._shared.answering.dispatch(call, reply)

    async def _begun(self) -> Reply:
        """Wait until all front ends are ready; False: the daemon stops."""
        self.ready.set()
        await self._shared.begun.wait()
        if self._shared.stop.is_set():
            return Reply(False)
        log.info("a front end accepts connections", extra={"front_end": self._name})
        return Reply(True)

    async def _take_peers(self, handover: socket.socket) -> None:
        """Serve connections of other instances that the front end accepted; they outlive it."""
        while (taken := await sockets.receive_connection(handover)) is not None:
            self._shared.nursery.start_soon(self._serve_peer, *taken)

    async def _serve_peer(self, connection: socket.socket, data: bytes) -> None:
        shared = self._shared
        if shared.peers is None or shared.open_peers >= shared.max_peers:
            connection.close()
            return
        shared.open_peers += 1
        try:
            binding, already_read = without_binding(data)
            await shared.peers(sockets.stream_of(connection), already_read, shared.stop, binding)
        except Exception:
            log.exception("a connection failed")
        finally:
            shared.open_peers -= 1


# --- answers ---------------------------------------------------------------------------------------


def _raised(error: Exception) -> Exception:
    """Return the error of a request, which the front end answers."""
    return error


class Answering:
    """Answers the calls of front ends, with the same handlers as a daemon without front ends.

    Args:
      endpoints, begin: as for a listener of this process, counted and forwarded.
      budget: limits the memory of all clients' streams.
      descriptors: records that a front end refused connections for lack of file descriptors.
      refusal: returns the error for publishes at this moment, None to accept them. Publishes bypass ``endpoints``.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        begin: Begin,
        publishing: Publishing,
        accounting: Accounting,
        answers: AnswerBudget,
        budget: BodyBudget,
        security: Security | None = None,
        descriptors: Descriptors | None = None,
        refusal: Callable[[], PlainsongError | None] = lambda: None,
    ) -> None:
        self.security = security
        self._refusal = refusal
        self._descriptors = descriptors or Descriptors()
        self._guard = OPEN if security is None else security.guard
        self._endpoints = {endpoint.route.name: endpoint for endpoint in endpoints}
        self._begin = begin
        self._publishing = publishing
        self._batches = PublishBatches(publishing, accounting)
        self._accounting = accounting
        self._answers = answers
        self._budget = budget
        self._kinds: dict[str, CallHandler] = {
            "request": self._request,
            "publish": self._publish,
            "publish_packed": self._publish_packed,
            "stream": in_task(self._stream),
            "tables": in_task(self._changed_tables),
        }
        #: Handlers of the front ends' reports, which get an empty reply.
        self._reports: dict[str, Callable[[Any], object]] = {
            "counted": self._counted,
            "refused": self._refused,
            "quota_refused": self._guard.quotas.count_refusal,
            "descriptors_short": self._descriptors_short,
            "authenticated": self._authenticated,
            "forbidden": self._guard.counters.forbidden,
        }

    def dispatch(self, call: Call, reply: PendingReply) -> None:
        """Answer one call of a front end. Raises BadRequest: there is no such call."""
        report = self._reports.get(call.kind)
        if report is not None:
            report(call.value)
            reply(Reply())
            return
        handler = self._kinds.get(call.kind)
        if handler is None:
            raise BadRequest(f"front ends do not call {call.kind[:80]!r}")
        handler(call, reply)

    def flush(self) -> None:
        """Publish the contents of the batches; called after the calls that arrived together."""
        self._batches.flush()

    async def _changed_tables(self, call: Call) -> Reply:
        """Wait until the guard's epoch has changed; return the new epoch and the security files."""
        await self._guard.moved_from(call.value)
        return Reply([self._guard.epoch, {} if self.security is None else self.security.files.content])

    # --- whole requests ------------------------------------------------------------------------

    def _request(self, call: Call, reply: PendingReply) -> None:
        name, request = decode_request(call.value, call.body)
        route, handler = self._endpoints[name]
        # The front end has authenticated the name and checked its verb; lists and views need all of its rights.
        request.rights = self._guard.rights_of(request.who)
        # For other routes the front end refuses answers itself, since it reads their bodies and counts them.
        only_looks = route.hot and route.reads_only
        answer_request(handler, request, self._answers.room(), call, reply, only_looks=only_looks, refused=_raised)

    async def _stream(self, call: Call) -> Reply:
        assert call.channel is not None  # streams are conversations
        namespace, topic, request_id, identity = call.value
        who = decode_identity(identity)
        with self._budget.reserve() as reservation:
            await serve_conversation(self._begin(namespace, topic, request_id, reservation, who), call.channel)
        return Reply()

    # --- reports -------------------------------------------------------------------------------

    def _refused(self, value: list[Any]) -> None:
        """Record a request that a front end has refused for its sender's identity or rights."""
        error, identity, address, target, request_id = value
        self._guard.refused(RefusedRequest(error, decode_identity(identity), Peer(address), target, request_id))

    def _descriptors_short(self, value: None) -> None:
        """Record that a front end refused connections for lack of file descriptors."""
        del value
        self._descriptors.refused()

    def _authenticated(self, value: list[str]) -> None:
        """Count a credential that a front end has checked."""
        via, result = value
        self._guard.counters.authenticated(via, result)

    def _counted(self, value: list[Any]) -> None:
        """Count a request that a front end has answered."""
        route, status, seconds = value
        self._accounting.requested(route, status, seconds)

    # --- publishes that a front end has read and checked -----------------------------------------

    def _publish(self, call: Call, reply: PendingReply) -> None:
        namespace, topic, messages, size, request_id = call.value
        name = TopicName(namespace, topic)
        is_alone = self._accounting.access.enabled or self._refusal() is not None  # it is logged, or refused, by itself
        if len(messages) == 1 and not is_alone:
            self._batches.add(name, messages[0], size, reply)
        else:
            self._put(name, PublishRequest(messages), size, request_id, reply)

    def _publish_packed(self, call: Call, reply: PendingReply) -> None:
        packed = call.body
        if len(packed) > LOOP_BYTES:
            reply.run(partial(self._unpack_and_publish, packed))
            return
        namespace, topic, body, size, request_id = VOCABULARY.unpack(packed)
        self._put(TopicName(namespace, topic), body, size, request_id, reply)

    async def _unpack_and_publish(self, packed: bytes) -> Reply:
        """Unpack a large body in a thread, then publish."""
        unpacked: Any = await off_loop(len(packed), JSON, partial(VOCABULARY.unpack, packed))
        namespace, topic, body, size, request_id = unpacked
        published: Future[Reply] = Future()
        self._put(TopicName(namespace, topic), body, size, request_id, published.settle)
        return await published.wait()

    def _put(
        self,
        name: TopicName,
        body: PublishRequest,
        size: int,
        request_id: str,
        answered: Callable[[Reply | Exception], object],
    ) -> None:
        """Publish, and count and log the answer; NoOwner is counted where the request is answered instead."""
        begun_s = perf_counter()

        def settled(found: PublishResponse | Receipt | Exception) -> None:
            answered(found if isinstance(found, Exception) else Reply(found))  # first: the rest needs no waiting client
            if isinstance(found, NoOwner):
                return
            seconds, status = perf_counter() - begun_s, status_to(found) if isinstance(found, Exception) else 200
            self._accounting.requested("publish", status, seconds)
            self._accounting.access.answered("publish", str(name), status, seconds, identity=request_id)

        refusal = self._refusal()
        if refusal is None:
            self._publishing.put_body(name, body, size, settled)
        else:
            settled(refusal)


# --- small publishes -------------------------------------------------------------------------------


#: A topic's answer to a run: one receipt for the whole run, or an outcome for each publish, or one error for all.
PublishOutcome: TypeAlias = "Receipt | list[Receipt | PlainsongError] | PlainsongError"


@dataclass(slots=True)
class _Run:
    """Publishes of one message each, for one topic."""

    payloads: list[bytes] = field(default_factory=list)
    answers: list[PendingReply] = field(default_factory=list)
    size: int = 0


class PublishBatches:
    """Puts small plain publishes that arrive together into their topic's mailbox as one ask.

    A run is stored as one and answered one by one, as in a stream: neither order nor answers differ. A publish then
    costs the owning process one frame read and one frame written.
    """

    def __init__(self, publishing: Publishing, accounting: Accounting) -> None:
        self._publishing = publishing
        self._accounting = accounting
        self._runs: dict[TopicName, _Run] = {}
        self._begun_s = 0.0

    def add(self, name: TopicName, message: bytes, size: int, reply: PendingReply) -> None:
        """Add a publish of one message; it is put with the next ``flush``."""
        run = self._runs.get(name)
        if run is None:
            if not self._runs:
                self._begun_s = perf_counter()
            run = self._runs[name] = _Run()
        run.payloads.append(message)
        run.answers.append(reply)
        run.size += size
        if len(run.payloads) >= MAX_RUN:
            self.flush()

    def flush(self) -> None:
        """Put the publishes that were added."""
        if not self._runs:
            return
        runs, self._runs = self._runs, {}
        for name, run in runs.items():
            self._put(name, run, self._begun_s)

    def _put(self, name: TopicName, run: _Run, begun_s: float) -> None:
        def settled(outcome: PublishOutcome | Exception) -> None:
            found = (only_plain(outcome) or Internal()) if isinstance(outcome, Exception) else outcome
            self._answer(name, run, found, perf_counter() - begun_s)

        self._publishing.put(name, PublishEach(run.payloads, run.size), settled)

    def _answer(self, name: TopicName, run: _Run, outcome: PublishOutcome, seconds: float) -> None:
        answers = run.answers
        if isinstance(outcome, Receipt):
            assert outcome.first_id is not None  # plain publishes are never duplicates
            generation = outcome.generation
            for answer, first_id in zip(answers, consecutive_ids(outcome.first_id, len(answers)), strict=True):
                answer(Reply([first_id, first_id, generation]), at_once=answer is answers[-1])
            self._account(name, outcome, len(answers), seconds, sum(map(len, run.payloads)))
            return
        each = outcome if isinstance(outcome, list) else [outcome] * len(answers)
        for answer, one, payload in zip(answers, each, run.payloads, strict=True):
            answer(Reply([one.first_id, one.last_id, one.generation]) if isinstance(one, Receipt) else one)
            self._account(name, one, 1, seconds, len(payload))

    def _account(
        self, name: TopicName, outcome: Receipt | PlainsongError, requests: int, seconds: float, size: int
    ) -> None:
        """Count answered publishes; those forwarded to another owner are counted there."""
        if isinstance(outcome, Receipt):
            self._accounting.requested("publish", 200, seconds, requests)
            self._publishing.rates.publishing.add(name, requests, trio.current_time(), size)
        elif not isinstance(outcome, NoOwner):
            self._accounting.requested("publish", status_of(outcome), seconds, requests)


# --- streams ---------------------------------------------------------------------------------------


async def serve_conversation(conversation: Conversation, channel: ServedChannel) -> None:
    """Serve the owning process's end of a front end's stream."""
    try:
        await channel.send(VOCABULARY.pack([list(each) for each in conversation.headers]))
        await converse(conversation, channel)
    finally:
        conversation.close()
