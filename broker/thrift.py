"""The Thrift listener for Tephra's clients: the methods of the transaction service, connections, and the server."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from actors.mailbox import Prepared
from broker.http.connection import Connection, Input, PeerLeft, State
from broker.http.descriptors import Descriptors
from broker.http.floods import CountedWarning
from broker.http.sockets import accepted, address_of, listen_on
from broker.http.tls_socket import TlsSocket
from broker.security.identity import Identity
from broker.security.peer import peer_of
from plainsong.protocol.errors import (
    InvalidParameter,
    Overloaded,
    PlainsongError,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
    TransactionTooLarge,
)
from plainsong.protocol.tephra.rpc import (
    ILLEGAL_ARGUMENT,
    INTERNAL_ERROR,
    TOO_LARGE,
    ApplicationError,
    RefusedCall,
    TephraConflict,
    TephraCouldNotTakeSnapshot,
    TephraError,
    TephraGeneric,
    TephraInvalidTruncateTime,
    TephraNotInProgress,
    decode_call,
    decode_reply,
    encode_error,
    encode_failure,
    encode_result,
)
from plainsong.protocol.tephra.state import encode_snapshot
from plainsong.protocol.tephra.thrift import MalformedThrift, ThriftFrames, ThriftFrameTooLarge, framed
from plainsong.protocol.transactions.asks import Abort, Begin, ChangeConflict, Checkpoint, Commit, Invalidate, Prepare
from plainsong.protocol.transactions.transaction import TransactionType
from storage.threaded import in_thread

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from actors.transactions import TransactionService
    from broker.config.sections import HttpConfig
    from broker.http.budgets import BodyBudget
    from broker.http.reactor import Reactor
    from broker.security.identity import Verb
    from broker.security.peer import Peer
    from broker.security.rights import Rights
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.tephra.rpc import Call
    from plainsong.protocol.transactions.asks import Begun
    from plainsong.protocol.transactions.transaction import Transaction

# --- methods ---------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.thrift")
_UNKNOWN_CLIENT = "unknown"
#: Longer calls are decoded in a thread, since they would block the event loop.
LOOP_BYTES = 256 << 10


class _ServiceAsk(NamedTuple):
    """A call that is one request to the service."""

    ask: Ask[Any]
    result: Callable[[Any], Any]
    """Convert the service's answer to the method's result."""
    refused: Mapping[type[PlainsongError], Any] = {}
    """The results for errors that the method does not declare."""


class TephraMethods:
    """Tephra's methods on the daemon's own transaction service, with Tephra's errors; shared by connections.

    Most methods are one request to the service, which needs no task: ``start`` makes it, and ``answer`` serves
    everything else.
    """

    def __init__(self, service: TransactionService) -> None:
        self._service = service
        self._asks: dict[str, Callable[..., _ServiceAsk]] = {
            "startLong": partial(_begin, TransactionType.LONG),
            "startLongClientId": partial(_begin, TransactionType.LONG),
            "startShort": partial(_begin, TransactionType.SHORT),
            "startShortClientId": partial(_begin, TransactionType.SHORT),
            "startShortTimeout": partial(_begin, TransactionType.SHORT, _UNKNOWN_CLIENT),
            "startShortWithTimeout": partial(_begin, TransactionType.SHORT, _UNKNOWN_CLIENT),
            "startShortWithClientIdAndTimeOut": partial(_begin, TransactionType.SHORT),
            "canCommitTx": _can_commit,
            "canCommitOrThrow": lambda transaction_id, changes: _ServiceAsk(
                _prepare(transaction_id, changes), _nothing
            ),
            "commitTx": _commit_whole,
            # The service has the right write pointer: a wrong one would move every reader's read pointer.
            "commitOrThrow": lambda transaction_id, _: _ServiceAsk(Commit(transaction_id), _nothing),
            "abortTx": _abort,
            "invalidateTx": _invalidate,
            "checkpoint": _checkpoint,
        }
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "getSnapshot": self._snapshot,
            "resetState": self._service.reset,
            "status": self._status,
            "invalidTxSize": self._invalid_size,
            "truncateInvalidTx": self._truncate,
            "truncateInvalidTxBefore": self._truncate_before,
            "pruneNow": self._prune_now,
        }

    def start(self, message: bytes, answered: Callable[[bytes], object]) -> bool:
        """Start a call that needs no task; ``answered`` gets its answer. Return False if ``answer`` must serve it.

        Raises:
          MalformedThrift: it is not a call, and cannot be answered.
        """
        try:
            call = decode_call(message)
            make = self._asks.get(call.method)
            if make is None or not self._service.has_loaded:
                return False
            asked = make(*call.args)
            reply = Prepared(partial(_reply, call, asked), answered)
            self._service.put(asked.ask, reply.settled, reply.prepare)
        except (RefusedCall, TephraError, PlainsongError):
            return False  # nothing has happened; ``answer`` gets the same error
        return True

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message.

        Raises:
          MalformedThrift: it is not a call, and cannot be answered.
        """
        del remote
        try:
            call = await _decoded(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        try:
            make = self._asks.get(call.method)
            if make is None:
                return encode_result(call, await self._methods[call.method](*call.args))
            asked = make(*call.args)
        except Exception as error:  # noqa: BLE001  # it is the answer
            return _failed(call, error)
        try:
            outcome = await self._service.ask(asked.ask)
        except Exception as error:  # noqa: BLE001  # it is the answer
            outcome = error
        return _reply(call, asked, outcome)

    async def _snapshot(self) -> bytes:
        try:
            state = self._service.state()
        except TransactionsUnavailable as error:
            raise TephraCouldNotTakeSnapshot(error.detail) from None
        # In a thread: a hundred thousand pointers take most of a second.
        return await in_thread(encode_snapshot, state)

    async def _status(self) -> str:
        try:
            self._service.figures()
        except TransactionsUnavailable:
            return "NOTOK"
        return "OK"

    async def _invalid_size(self) -> int:
        return self._service.figures().invalid

    async def _truncate(self, pointers: Sequence[int]) -> bool:
        return await self._service.truncate(pointers) > 0

    async def _truncate_before(self, before_ms: int) -> bool:
        try:
            return await self._service.truncate_before(before_ms) > 0
        except InvalidParameter as error:
            raise TephraInvalidTruncateTime(error.detail) from None

    async def _prune_now(self) -> None:
        """Do nothing, like a Tephra service without pruning: its clients' stores may rely on the invalid list."""


async def _decoded(message: bytes) -> Call:
    """Return the call in a message. Raises the same as ``decode_call``, and NoThread."""
    if len(message) <= LOOP_BYTES:
        return decode_call(message)
    return await in_thread(decode_call, message)


# --- methods that are one request to the service ------------------------------------------------------


def _begin(
    type: TransactionType,  # noqa: A002  # Tephra's word
    client_id: str | None = _UNKNOWN_CLIENT,
    timeout_s: int | None = None,
) -> _ServiceAsk:
    return _ServiceAsk(Begin(type, timeout_s, _named(client_id), tephra=True), _transaction_of)


def _prepare(transaction_id: int, changes: Sequence[bytes]) -> Prepare:
    return Prepare(transaction_id, changes, sum(map(len, changes)), tephra=True)


def _can_commit(transaction: Transaction, changes: Sequence[bytes]) -> _ServiceAsk:
    conflicts = {TransactionConflict: False, TransactionTooLarge: False}
    return _ServiceAsk(_prepare(transaction.transaction_id, changes), _true, conflicts)


def _commit_whole(transaction: Transaction) -> _ServiceAsk:
    return _ServiceAsk(Commit(transaction.transaction_id), _true, {TransactionConflict: False})


def _abort(transaction: Transaction) -> _ServiceAsk:
    return _ServiceAsk(Abort(transaction.transaction_id), _nothing, {TransactionNotFound: None})  # as Tephra does


def _invalidate(transaction_id: int) -> _ServiceAsk:
    unknown = {TransactionNotFound: False, TransactionNotInProgress: False}
    return _ServiceAsk(Invalidate(transaction_id), lambda decision: decision.changed, unknown)


def _checkpoint(transaction: Transaction) -> _ServiceAsk:
    return _ServiceAsk(Checkpoint(transaction.transaction_id, transaction), _transaction_of)


def _transaction_of(begun: Begun) -> Transaction:
    return begun.transaction


def _true(_: object) -> bool:
    return True


def _nothing(_: object) -> None:
    return None


def _reply(call: Call, asked: _ServiceAsk, outcome: Any) -> bytes:
    """Return the answer to a call, from the outcome of its request."""
    if not isinstance(outcome, Exception):
        return encode_result(call, asked.result(outcome))
    for error, result in asked.refused.items():
        if isinstance(outcome, error):
            return encode_result(call, result)
    if isinstance(outcome, PlainsongError) and _tephra_error(outcome) is None:
        # Thrift has no field for the outcome, and people read the text.
        happened = "it is not known whether it happened" if outcome.outcome == "unknown" else "nothing happened"
        return failure(call, f"{outcome.detail}; {happened}")
    return _failed(call, outcome)


def _failed(call: Call, error: Exception) -> bytes:
    if isinstance(error, TephraError):
        return encode_error(call, error)
    if isinstance(error, PlainsongError):
        declared = _tephra_error(error)
        return encode_error(call, declared) if declared else failure(call, error.detail)
    log.error("a method failed", extra={"method": call.method}, exc_info=error)
    return failure(call, "the log has details")


def _named(client_id: str | None) -> str:
    if client_id is None:
        raise TephraGeneric("a client id is missing", ILLEGAL_ARGUMENT)
    return client_id


def _tephra_error(error: PlainsongError) -> TephraError | None:
    if isinstance(error, ChangeConflict):
        return TephraConflict(error.transaction_id, error.key, error.client_id)
    if isinstance(error, TransactionNotFound | TransactionNotInProgress):
        return TephraNotInProgress(error.detail)
    if isinstance(error, TransactionTooLarge):
        return TephraGeneric(error.detail, TOO_LARGE)
    if isinstance(error, InvalidParameter):
        return TephraGeneric(error.detail, ILLEGAL_ARGUMENT)
    return None


def failure(call: Call, why: str) -> bytes:
    """Return the answer to a failed call."""
    return encode_failure(call, INTERNAL_ERROR, f"Internal error processing {call.method}: {why}")


# --- grants ----------------------------------------------------------------------------------------


#: The identity of all callers when authentication is on: Thrift has no names.
THRIFT = Identity("thrift", "thrift")
#: Methods that need ``operate``; the others need ``transact``.
_OPERATES = frozenset(("resetState", "truncateInvalidTx", "truncateInvalidTxBefore", "pruneNow"))
#: Methods on one transaction, which is the first argument, or contained in it.
_OF_ONE = frozenset(
    ("canCommitTx", "canCommitOrThrow", "commitTx", "commitOrThrow", "abortTx", "invalidateTx", "checkpoint")
)


#: The audit's actions for methods that change more than the client's own transaction.
_ACTIONS = {
    "abortTx": "transaction.abort",
    "invalidateTx": "transaction.invalidate",
    "truncateInvalidTx": "transaction.truncate",
    "truncateInvalidTxBefore": "transaction.truncate",
    "resetState": "transaction.truncate",
}


class CallAudit(Protocol):
    """Records calls made as ``thrift``."""

    async def refuse_unless_writable(self) -> None:
        """Raises AuditUnavailable, LowSpace: the change must be recorded, and cannot be."""
        ...

    def call_refused(self, remote: str, target: str) -> None:
        """Record a call that was refused because ``thrift`` lacks the verb."""
        ...

    async def call_made(self, remote: str, action: str, target: str, method: str, outcome: str) -> None:
        """Record an answered call that changes something."""
        ...


class GrantedMethods:
    """Answers calls within the rights of ``thrift``: ``transact`` for transactions without a name, ``operate`` for all.

    Args:
      rights: returns the current rights of ``thrift``.
      owner_of: as ``TransactionService.owner_of``.
    """

    def __init__(
        self,
        methods: Methods,
        rights: Callable[[], Rights],
        owner_of: Callable[[int], Awaitable[str | None]],
        audit: CallAudit,
    ) -> None:
        self._methods = methods
        self._rights = rights
        self._owner_of = owner_of
        self._audit = audit

    def start(self, message: bytes, answered: Callable[[bytes], object]) -> bool:
        """Leave every call to ``answer``: an owner may have to be asked, and the outcome recorded."""
        del message, answered
        return False

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message. Raises MalformedThrift: it is not a call, and cannot be answered."""
        try:
            call = await _decoded(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        try:
            needed = await self._lacks(call)
            if needed is None and await self._is_recorded(call):
                return await self._answer_recorded(call, message, remote)
        except PlainsongError as error:
            return failure(call, error.detail)
        if needed is not None:
            self._audit.call_refused(remote, _target_of(call))
            return failure(call, f"thrift lacks {needed} on service")
        return await self._methods.answer(message, remote)

    async def _is_recorded(self, call: Call) -> bool:
        """True if the call changes something for others. Raises PlainsongError."""
        if call.method not in _ACTIONS:
            return False
        return call.method not in _OF_ONE or not _is_ours(await self._owner_of(_id_of(call)))

    async def _answer_recorded(self, call: Call, message: bytes, remote: str) -> bytes:
        """Answer a call after recording its outcome. Raises PlainsongError: the call was not made."""
        await self._audit.refuse_unless_writable()
        answer = await self._methods.answer(message, remote)
        outcome = "applied"
        try:
            decode_reply(answer, call.method, call.sequence_id)
        except TephraError:
            outcome = "refused"
        except (ApplicationError, MalformedThrift):
            outcome = "unknown"
        await self._audit.call_made(remote, _ACTIONS[call.method], _target_of(call), call.method, outcome)
        return answer

    async def _lacks(self, call: Call) -> Verb | None:
        """Return the verb that the call lacks; None if it is allowed. Raises PlainsongError."""
        rights = self._rights()
        if rights.on_service("operate"):
            return None
        if call.method in _OPERATES:
            return "operate"
        if not rights.on_service("transact"):
            return "transact"
        if call.method not in _OF_ONE:
            return None
        return None if _is_ours(await self._owner_of(_id_of(call))) else "operate"


def _id_of(call: Call) -> int:
    """Return the transaction of a call."""
    about = call.args[0]
    found: int = about if isinstance(about, int) else about.transaction_id
    return found


def _is_ours(owner: str | None) -> bool:
    """True if no name began the transaction, or ``thrift`` did, whose clients cannot be distinguished."""
    return owner in ("", None, THRIFT.name)


def _target_of(call: Call) -> str:
    return str(_id_of(call)) if call.method in _OF_ONE else "service"


# --- connections -----------------------------------------------------------------------------------


#: Time limit for receiving a frame once it has begun. Idle connections stay open.
FRAME_TIMEOUT_S = 30.0


class Methods(Protocol):
    """The methods of this instance's service, or of the service at its owner."""

    def start(self, message: bytes, answered: Callable[[bytes], object]) -> bool:
        """Start a call that needs no task; ``answered`` gets its answer. Return False if ``answer`` must serve it.

        Raises MalformedThrift: it is not a call.
        """
        ...

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message of the client at ``remote``. Raises MalformedThrift: it is not a call."""
        ...


class ThriftWarnings:
    """Log lines of a server's connections about their clients, each at most once a minute."""

    def __init__(self) -> None:
        self.invalid = CountedWarning("a Thrift connection sent an invalid call")
        self.closed = CountedWarning("a Thrift connection was closed")
        self.refused = CountedWarning("a Thrift connection was refused")


class ThriftConnection:
    """Serves one client, one call at a time, until it disconnects or sends something that is not a call.

    As over HTTP, a call that has arrived completely, and needs no task, is answered in the reactor's task, while the
    connection's own task sleeps. That one serves everything else.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        methods: Methods,
        budget: BodyBudget,
        reactor: Reactor,
        settings: HttpConfig,
        peer: Peer,
        warnings: ThriftWarnings,
    ) -> None:
        self._connection = Connection(sock, self, reactor, budget, settings, peer)
        self._warnings = warnings
        self._reactor = reactor
        self._methods = methods
        #: The memory reservation of the frame that is arriving, until its call is answered.
        self._held = budget.reserve()
        self._frames = ThriftFrames()
        #: A whole message that is left to the task.
        self._message: bytes | None = None
        self._stopping = False

    def __repr__(self) -> str:
        return f"<ThriftConnection {self._connection!r}>"

    def stop(self) -> None:
        """Take no more calls; the current one is answered."""
        self._stopping = True
        if self._connection.state is State.RESTING:
            self._connection.wake()

    # --- without the task -------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """False: a call is answered even if its client has left."""
        return False

    def gathered(self) -> None:
        """Do nothing: the task reads frames that arrive in pieces."""

    def sending_ended(self) -> None:
        """Do nothing; see ``is_reading``."""

    def data_arrived(self) -> bool:
        """Handle data that arrived while the connection rests. Return True if the task must handle it.

        Called in the reactor's task.
        """
        connection = self._connection
        if self._stopping:
            return True
        try:
            self._take_in()
            self._message = self._frames.take()
            if self._message is None:
                return True
            connection.state = State.ANSWERING
            if self._methods.start(self._message, self._answered):
                self._message = None
                return False
        except (ThriftFrameTooLarge, MalformedThrift, Overloaded):
            pass  # the task gets the same error
        connection.state = State.RESTING
        return True

    def _take_in(self) -> None:
        """Move the bytes that were read to the frames. Raises Overloaded."""
        connection = self._connection
        if connection.pending:
            self._held.grow(len(connection.pending))
            self._frames.feed(connection.pending)
            connection.pending = b""

    def _answered(self, answer: bytes) -> None:
        """Send the answer to a call that was started without the task. It neither waits nor raises."""
        connection = self._connection
        if connection.state is not State.ANSWERING:
            return  # the connection has ended
        self._held.release()
        connection.state = State.RESTING
        if not connection.send_now(framed(answer)) or self._stopping or not self._frames.is_empty:
            connection.wake()
        elif connection.input is not Input.NOTHING:
            self._reactor.again(connection)

    # --- in the connection's task -----------------------------------------------------------------

    async def run(self) -> None:
        """Serve until either side closes the connection."""
        connection = self._connection
        try:
            with connection.scope:
                while not self._stopping and (message := await self._next()) is not None:
                    connection.state = State.HANDLING
                    answer = framed(await self._methods.answer(message, connection.peer.address))
                    self._held.release()
                    connection.state = State.SENDING
                    connection.minimum_rate.restart()
                    await connection.send_all(answer)
                    if not self._frames.is_empty:
                        # Neither reading nor sending has to wait for a client that sends calls without a pause.
                        await trio.lowlevel.checkpoint()
        except (ThriftFrameTooLarge, MalformedThrift) as error:
            self._warnings.invalid(str(error))
        except Overloaded as error:
            self._warnings.closed(error.detail)
        except (PeerLeft, OSError, trio.TooSlowError):
            pass  # the client disconnected, or is too slow
        finally:
            connection.leave()
            self._held.release()
            connection.room.release()

    async def _next(self) -> bytes | None:
        """Return the next whole message; None if the client has disconnected, or the server is stopping."""
        connection, frames = self._connection, self._frames
        while True:
            message, self._message = self._message, None
            if message is None:
                self._take_in()
                message = frames.take()
            if message is not None:
                return message
            if not frames.is_empty:
                connection.state = State.READING
                with trio.fail_after(FRAME_TIMEOUT_S):
                    while (message := frames.take()) is None:
                        data = await connection.receive()
                        self._held.grow(len(data))
                        frames.feed(data)
                return message
            if connection.ended:
                return None
            await connection.rest()
            await connection.send_rest()
            if self._stopping:
                return None


# --- server ----------------------------------------------------------------------------------------


#: Each process of Tephra's clients keeps up to fifty connections open.
MAX_CONNECTIONS = 4_096
#: Time limit for a TLS handshake.
HANDSHAKE_S = 10.0


async def serve_thrift(
    bind: str,
    methods: Methods,
    *,
    budget: BodyBudget,
    stop: trio.Event,
    grace_s: float,
    settings: HttpConfig,
    reactor: Reactor,
    max_connections: int = MAX_CONNECTIONS,
    tls: Callable[[], ssl.SSLContext] | None = None,
    descriptors: Descriptors | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve Tephra's clients until ``stop`` is set; then finish running calls for at most ``grace_s``.

    Args:
      budget: bounds the memory of frames.
      settings: limits the time for sending an answer.
      reactor: waits for the sockets of connections.
      tls: returns the context for each new connection; None for no TLS.
      descriptors: limits connections by the limit on open files, and records refusals because of it.
      task_status: gets the addresses as ``host:port``.

    Raises:
      OSError: the server cannot listen on ``bind``; nothing is left open.
    """
    sockets = await in_thread(listen_on, bind)
    try:
        server = _ThriftServer(methods, budget, reactor, settings, max_connections, tls, descriptors or Descriptors())
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for sock in sockets:
                    accepting.start_soon(server.accept, sock, connections)
                task_status.started([address_of(sock) for sock in sockets])
                await stop.wait()
                accepting.cancel_scope.cancel()
            for sock in sockets:
                sock.close()
            server.stop()
            connections.cancel_scope.deadline = trio.current_time() + grace_s
    finally:
        for sock in sockets:
            sock.close()


class _ThriftServer:
    def __init__(
        self,
        methods: Methods,
        budget: BodyBudget,
        reactor: Reactor,
        settings: HttpConfig,
        max_connections: int,
        tls: Callable[[], ssl.SSLContext] | None,
        descriptors: Descriptors,
    ) -> None:
        self._descriptors = descriptors
        self._warnings = ThriftWarnings()
        self._methods = methods
        self._tls = tls
        self._budget = budget
        self._reactor = reactor
        self._settings = settings
        self._max_connections = max_connections
        self._open: set[ThriftConnection] = set()
        #: Number of connections, including those in their handshake.
        self._count = 0
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        for connection in self._open:
            connection.stop()

    async def accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        """Accept connections until cancelled; each is served by a task in ``connections``."""
        async for sock in accepted(listener, self._short):
            if not self._has_room_for(sock):
                sock.close()
                continue
            # TCP keep-alive closes idle connections whose client has vanished.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._count += 1
            connections.start_soon(self._serve, sock)

    def _short(self, why: str) -> None:
        self._warnings.refused(why)
        self._descriptors.refused()

    def _has_room_for(self, sock: socket.socket) -> bool:
        """True if a connection may stay: the store needs file descriptors, too."""
        allowed = self._descriptors.connections(self._max_connections)
        if self._count < allowed and self._descriptors.has_room_for(sock.fileno()):
            return True
        why = f"{self._count} are open"
        if self._count < self._max_connections:
            self._short(f"{why}, and few file descriptors are left")
        else:
            self._warnings.refused(why)
        return False

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection; its errors affect no other."""
        try:
            whole: socket.socket | TlsSocket = sock
            if self._tls is not None:
                whole = TlsSocket(sock, self._tls())
                with trio.fail_after(HANDSHAKE_S):
                    await whole.shake_hands()
            connection = ThriftConnection(
                whole, self._methods, self._budget, self._reactor, self._settings, peer_of(sock), self._warnings
            )
            if self._stopping:
                connection.stop()
            self._open.add(connection)
            try:
                await connection.run()
            finally:
                self._open.discard(connection)
        except (OSError, trio.TooSlowError) as error:
            log.debug("a Thrift connection had no handshake", extra={"why": str(error)})
        except Exception:
            log.exception("a Thrift connection failed")
        finally:
            sock.close()
            self._count -= 1
