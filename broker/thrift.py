"""The Thrift listener for Tephra's clients: the methods of the transaction service, connections, and the server."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import trio

from broker.http.sockets import address_of, listen_on
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
from plainsong.protocol.tephra.thrift import MalformedThrift, ThriftFrames, ThriftFrameTooLarge, framed
from plainsong.protocol.transactions.asks import ChangeConflict
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from actors.transactions import TransactionService
    from broker.http.budgets import BodyBudget, Reservation
    from broker.security.identity import Verb
    from broker.security.rights import Rights
    from plainsong.protocol.tephra.rpc import Call
    from plainsong.protocol.transactions.transaction import Transaction

# --- methods ---------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.thrift")
_UNKNOWN_CLIENT = "unknown"


class TephraMethods:
    """Tephra's methods on the daemon's own transaction service, with Tephra's errors; shared by connections."""

    def __init__(self, service: TransactionService) -> None:
        self._service = service
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "startLong": self._start_long,
            "startLongClientId": self._start_long_for,
            "startShort": self._start_short,
            "startShortClientId": self._start_short_for,
            "startShortTimeout": self._start_short_within,
            "startShortWithTimeout": self._start_short_within,
            "startShortWithClientIdAndTimeOut": self._start_short_for,
            "canCommitTx": self._can_commit,
            "canCommitOrThrow": self._service.prepare,
            "commitTx": self._commit_whole,
            "commitOrThrow": self._commit,
            "abortTx": self._abort,
            "invalidateTx": self._invalidate,
            "checkpoint": self._checkpoint,
            "getSnapshot": self._snapshot,
            "resetState": self._service.reset,
            "status": self._status,
            "invalidTxSize": self._invalid_size,
            "truncateInvalidTx": self._truncate,
            "truncateInvalidTxBefore": self._truncate_before,
            "pruneNow": self._prune_now,
        }

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message.

        Raises:
          MalformedThrift: it is not a call, and cannot be answered.
        """
        del remote
        try:
            call = decode_call(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        try:
            return encode_result(call, await self._methods[call.method](*call.args))
        except TephraError as error:
            return encode_error(call, error)
        except PlainsongError as error:
            declared = _tephra_error(error)
            return encode_error(call, declared) if declared else failure(call, error.detail)
        except Exception:
            log.exception("a method failed", extra={"method": call.method})
            return failure(call, "the log has details")

    # --- beginning --------------------------------------------------------------------------------

    async def _start_long(self) -> Transaction:
        return await self._start_long_for(_UNKNOWN_CLIENT)

    async def _start_long_for(self, client_id: str | None) -> Transaction:
        return (await self._service.begin(TransactionType.LONG, None, _named(client_id))).transaction

    async def _start_short(self) -> Transaction:
        return await self._start_short_for(_UNKNOWN_CLIENT)

    async def _start_short_within(self, timeout_s: int) -> Transaction:
        return await self._start_short_for(_UNKNOWN_CLIENT, timeout_s)

    async def _start_short_for(self, client_id: str | None, timeout_s: int | None = None) -> Transaction:
        return (await self._service.begin(TransactionType.SHORT, timeout_s, _named(client_id))).transaction

    # --- deciding ---------------------------------------------------------------------------------

    async def _can_commit(self, transaction: Transaction, changes: Sequence[bytes]) -> bool:
        try:
            await self._service.prepare(transaction.transaction_id, changes)
        except (TransactionConflict, TransactionTooLarge):
            return False
        return True

    async def _commit_whole(self, transaction: Transaction) -> bool:
        try:
            await self._service.commit(transaction.transaction_id)
        except TransactionConflict:
            return False
        return True

    async def _commit(self, transaction_id: int, write_pointer: int) -> None:
        del write_pointer  # the service has the right one: a wrong one would move every reader's read pointer
        await self._service.commit(transaction_id)

    async def _abort(self, transaction: Transaction) -> None:
        try:
            await self._service.abort(transaction.transaction_id)
        except TransactionNotFound:
            return  # as Tephra does

    async def _invalidate(self, transaction_id: int) -> bool:
        try:
            return (await self._service.invalidate(transaction_id)).changed
        except (TransactionNotFound, TransactionNotInProgress):
            return False

    async def _checkpoint(self, transaction: Transaction) -> Transaction:
        return (await self._service.checkpoint(transaction.transaction_id, transaction)).transaction

    # --- upkeep -----------------------------------------------------------------------------------

    async def _snapshot(self) -> bytes:
        try:
            return self._service.snapshot()
        except TransactionsUnavailable as error:
            raise TephraCouldNotTakeSnapshot(error.detail) from None

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
        """Do nothing, like a Tephra without pruning: its clients' stores may rely on the invalid list."""


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

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message. Raises MalformedThrift: it is not a call, and cannot be answered."""
        try:
            call = decode_call(message)
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
            return failure(call, f"thrift has no {needed} on service")
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


_RECEIVE_BYTES = 64 << 10
#: Time limits for receiving a frame once it has begun, and for sending an answer. Idle connections stay open.
FRAME_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0


class Methods(Protocol):
    """The methods of this instance's service, or of the service at its owner."""

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Answer a message of the client at ``remote``. Raises MalformedThrift: it is not a call."""
        ...


class ThriftConnection:
    """Serves one client, one call at a time, until it disconnects or sends something that is not a call."""

    def __init__(self, stream: trio.abc.Stream, methods: Methods, budget: BodyBudget, remote: str = "") -> None:
        self._stream = stream
        self._remote = remote
        self._methods = methods
        self._budget = budget
        self._frames = ThriftFrames()
        self._idle = trio.CancelScope()
        self._stopping = False

    def stop(self) -> None:
        """Take no more calls; the current one is answered."""
        self._stopping = True
        self._idle.cancel()

    async def run(self) -> None:
        """Serve until either side closes the connection."""
        try:
            with self._budget.reserve() as reservation:
                while not self._stopping and (message := await self._next(reservation)) is not None:
                    answer = framed(await self._methods.answer(message, self._remote))
                    reservation.release()
                    with trio.fail_after(SEND_TIMEOUT_S):
                        await self._stream.send_all(answer)
        except (ThriftFrameTooLarge, MalformedThrift) as error:
            log.warning("a Thrift connection sent an invalid call: %s", error)
        except Overloaded as error:
            log.warning("a Thrift connection was closed: %s", error.detail)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the client disconnected, or is too slow

    async def _next(self, reservation: Reservation) -> bytes | None:
        """Return the next whole message; None if the client has disconnected, or the server is stopping."""
        message = self._frames.take()
        if message is not None:
            return message
        if not self._frames.missing_bytes:
            with trio.CancelScope() as self._idle:
                if not await self._receive(reservation):
                    return None
            if self._idle.cancelled_caught:
                return None
        with trio.fail_after(FRAME_TIMEOUT_S):
            while (message := self._frames.take()) is None:
                if not await self._receive(reservation):
                    return None
        return message

    async def _receive(self, reservation: Reservation) -> bool:
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        reservation.grow(len(data))
        self._frames.feed(bytes(data))
        return bool(data)


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
    max_connections: int = MAX_CONNECTIONS,
    tls: Callable[[], ssl.SSLContext] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve Tephra's clients until ``stop`` is set; then finish running calls for at most ``grace_s``.

    ``task_status`` gets the addresses as ``host:port``. ``budget`` bounds the memory of frames. ``tls`` returns the
    context for each new connection; None: no TLS.

    Raises:
      OSError: the server cannot listen on ``bind``; nothing is left open.
    """
    sockets = await trio.to_thread.run_sync(listen_on, bind)
    try:
        server = _ThriftServer(methods, budget, max_connections, tls)
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, server.serve, listeners, handler_nursery=connections)
                )
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
        max_connections: int,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self._methods = methods
        self._tls = tls
        self._budget = budget
        self._max_connections = max_connections
        self._open: set[ThriftConnection] = set()
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        for connection in self._open:
            connection.stop()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection; its errors affect no other."""
        if len(self._open) >= self._max_connections or self._stopping:
            log.warning("a Thrift connection was refused: %s are open", len(self._open))
            await trio.aclose_forcefully(stream)
            return
        # TCP keep-alive closes idle connections whose client has vanished.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        whole: trio.SocketStream | trio.SSLStream[trio.SocketStream] = stream
        if self._tls is not None:
            whole = trio.SSLStream(stream, self._tls(), server_side=True, https_compatible=True)
        connection = ThriftConnection(whole, self._methods, self._budget, peer_of(stream.socket).address)
        self._open.add(connection)
        try:
            if isinstance(whole, trio.SSLStream):
                with trio.fail_after(HANDSHAKE_S):
                    await whole.do_handshake()
            await connection.run()
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            log.debug("a Thrift connection had no handshake", extra={"why": str(error)})
        except Exception:
            log.exception("a Thrift connection failed")
        finally:
            self._open.discard(connection)
            await trio.aclose_forcefully(stream)
