"""The called side of a link: calls are answered within limits, and cancelled when their caller leaves.

A handler is called in the turn of the event loop in which its call arrived. It gets a task only if it has to wait
(``in_task``), or if its reply has to: a long one, or one to a peer that reads slowly.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import trio

from broker.http.messages import only_plain
from broker.http.tls_socket import TlsStream
from broker.link.flow import Inflow, LinkBroken, Outflow, Reply, send_reply
from broker.link.wire import BETWEEN_INSTANCES, INLINE_BYTES, LinkBounds, Wire
from plainsong.protocol.errors import Internal, MalformedBody, OutcomeUnknown, Overloaded, PlainsongError
from plainsong.protocol.link import FrameKind

if TYPE_CHECKING:
    from broker.link.proof import LinkSecret

__all__ = ["AsyncCallHandler", "Call", "CallHandler", "PendingReply", "ServedChannel", "in_task", "serve_link"]
log = logging.getLogger("plainsong.peering")


@dataclass(slots=True)
class Call:
    """A call from the peer."""

    kind: str
    value: Any
    body: bytes = b""
    deadline_s: float | None = None
    """The time at which its caller stops waiting, on the event loop's clock; a task of the call is cancelled then."""
    channel: ServedChannel | None = None
    """For a conversation, which ends when its handler returns."""
    on_cancel: Callable[[], object] | None = None
    """Ends the wait for the reply, which is no longer wanted; None while nothing waits."""

    def cancel(self) -> None:
        """End any wait for the reply. What an actor has received still happens."""
        if self.on_cancel is not None:
            self.on_cancel()


CallHandler: TypeAlias = Callable[["Call", "PendingReply"], None]
"""Answers one call, like a ``Handler`` of requests: it calls the ``PendingReply``, or its ``run``, once, before it returns
or later. It must not wait. It may raise ``PlainsongError``; any other exception is a bug: logged, and answered as one."""
AsyncCallHandler: TypeAlias = Callable[["Call"], Awaitable[Reply]]
"""Answers one call; it may wait, and raise as a ``CallHandler``."""


def in_task(handler: AsyncCallHandler) -> CallHandler:
    """Return a handler that runs ``handler`` in a task for each call."""

    def answer(call: Call, reply: PendingReply) -> None:
        reply.run(partial(handler, call))

    return answer


def _nothing() -> None:
    """Do nothing."""


async def serve_link(
    stream: trio.abc.Stream,
    dispatch: CallHandler,
    bounds: LinkBounds = BETWEEN_INSTANCES,
    *,
    already_read: bytes = b"",
    stop: trio.Event | None = None,
    flush: Callable[[], None] = _nothing,
    peer: str = "",
    secret: LinkSecret | None = None,
    binding: bytes = b"",
) -> None:
    """Answer a peer's calls until it closes the connection; calls still in progress are then cancelled.

    Args:
      already_read: the bytes read from the connection so far, starting with the preface.
      stop: once set, the peer is asked to make no more calls; the link ends when its calls are answered.
      flush: is called after the calls that arrived together have been dispatched.
      secret: the peer must prove that it has it; None: no proof is required.
      binding: see ``LinkSecret.exchange``.
    """
    async with trio.open_nursery() as nursery:
        prove = None if secret is None else partial(secret.exchange, "accept", binding)
        side = _ServingSide(Wire(stream, bounds, peer, prove), dispatch, flush, nursery)
        if stop is not None:
            nursery.start_soon(side.leave_at, stop)
        try:
            why = await side.wire.run(side, already_read)
            if why:
                log.info("a link has ended", extra={"peer": peer, "why": why, "under_way": len(side.calls)})
        finally:
            side.end()
        nursery.cancel_scope.cancel()


class _PendingCall:
    """An unanswered call, and the part of it that has arrived."""

    __slots__ = ("call", "has_task", "inflow", "outflow", "pieces", "received", "size")

    def __init__(self, call: Call, size: int) -> None:
        self.call = call
        self.size = size
        self.has_task = False
        self.pieces: list[bytes] | None = None
        self.received = 0
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None


class PendingReply:
    """The reply to a call: call it, or its ``run``, once. Both do nothing once the caller has left."""

    __slots__ = ("_number", "_pending", "_side")

    def __init__(self, side: _ServingSide, number: int, pending: _PendingCall) -> None:
        self._side = side
        self._number = number
        self._pending = pending

    @property
    def is_wanted(self) -> bool:
        """True until the call is answered or its caller has left."""
        return self._side.calls.get(self._number) is self._pending

    def __call__(self, outcome: Reply | Exception, *, at_once: bool = False) -> None:
        """Send the reply or the error; with ``at_once``, write immediately, for the last of several."""
        if self.is_wanted:
            self._side.reply(self._number, self._pending, outcome, at_once=at_once)

    def run(self, work: Callable[[], Awaitable[Reply]]) -> None:
        """Run ``work`` in a task, and send its result or error. The task is cancelled when the caller leaves."""
        if self.is_wanted:
            self._side.run(self._number, self._pending, work)


class _ServingSide:
    def __init__(self, wire: Wire, dispatch: CallHandler, flush: Callable[[], None], nursery: trio.Nursery) -> None:
        self.wire = wire
        self.calls: dict[int, _PendingCall] = {}
        self.flush = flush
        self._bytes = 0
        self._dispatch = dispatch
        self._nursery = nursery
        #: A task keeps the context it is started with, and that of an actor's turn could keep a request alive.
        self._context = copy_context()

    def end(self) -> None:
        """Cancel all calls: the link has ended."""
        calls, self.calls = self.calls, {}
        for pending in calls.values():
            pending.call.cancel()

    async def leave_at(self, stop: trio.Event) -> None:
        """At ``stop``, ask the peer to make no more calls; it then closes the link once all are answered."""
        await stop.wait()
        self.wire.put(FrameKind.LEAVING, 0)

    # --- frames of the peer --------------------------------------------------------------------

    def on_frame(self, frame: list[Any]) -> None:
        kind, number = frame[0], frame[1]
        if kind == FrameKind.CALL:
            self._on_call(number, *frame[2:])
            return
        if kind in (FrameKind.BEGIN, FrameKind.OPEN):
            self._on_begin(frame)
            return
        known = self.calls.get(number)
        if known is None:
            if kind in (FrameKind.CANCEL, FrameKind.PIECE, FrameKind.END, FrameKind.CREDIT):
                return  # the frame crossed the answer
        elif kind == FrameKind.CANCEL:
            if not known.has_task:  # a task ends the call itself
                self._forget(number)
            known.call.cancel()
            return
        elif kind == FrameKind.PIECE and isinstance(frame[2], bytes):
            self._on_piece(number, known, frame[2], more=bool(frame[3]))
            return
        elif kind == FrameKind.END and known.inflow is not None:
            known.inflow.end()
            return
        elif kind == FrameKind.CREDIT and known.outflow is not None and isinstance(frame[2], int):
            known.outflow.credit(frame[2])
            return
        raise MalformedBody(f"a frame of kind {kind}, which only callers receive")

    def _on_call(self, number: int, kind: Any, value: Any, body: Any, left_s: Any) -> None:
        if type(kind) is not str or type(body) is not bytes:
            raise MalformedBody("a call is a kind, a value and a body")
        if self._admit(number, len(body)):
            self._bytes += len(body)
            pending = self.calls[number] = _PendingCall(Call(kind, value, body, _deadline(left_s)), len(body))
            self._start(number, pending)

    def _on_begin(self, frame: list[Any]) -> None:
        kind, number, name, value = frame[:4]
        size = frame[4] if kind == FrameKind.BEGIN else 0
        if type(name) is not str or type(size) is not int or size < 0:
            raise MalformedBody("a call is a kind, a value and the size of its body")
        if not self._admit(number, size):
            return
        self._bytes += size
        call = Call(name, value)
        pending = self.calls[number] = _PendingCall(call, size)
        if kind == FrameKind.BEGIN:
            call.deadline_s = _deadline(frame[5])
            pending.pieces = []
            return
        pending.inflow = Inflow(self.wire, number)
        pending.outflow = Outflow(self.wire, number)
        call.channel = ServedChannel(self.wire, number, pending.inflow, pending.outflow)
        self._start(number, pending)

    def _admit(self, number: int, size: int) -> bool:
        """Return True if the limits allow one more call. If not, refuse it, and drop its further frames."""
        bounds = self.wire.bounds
        if number in self.calls:
            raise MalformedBody(f"call {number} is already in progress")
        if len(self.calls) >= bounds.requests:
            detail = f"{len(self.calls)} calls are in progress on one link"
        elif self._bytes and self._bytes + size > bounds.bytes:
            detail = f"bodies in progress on one link use {self._bytes} bytes"
        else:
            return True
        self.wire.put(FrameKind.FAILED, number, Overloaded(detail, hint="retry later"))
        return False

    def _on_piece(self, number: int, known: _PendingCall, piece: bytes, *, more: bool) -> None:
        if known.inflow is not None:
            known.inflow.take(piece, more=more)
            return
        if known.pieces is None:
            raise MalformedBody("a piece of a body that is already complete")
        known.pieces.append(piece)
        known.received += len(piece)
        if known.received > known.size or (not more and known.received < known.size):
            raise MalformedBody(f"a body of {known.size} bytes was announced, but {known.received} arrived")
        if not more:
            known.call.body = b"".join(known.pieces)
            known.pieces = None
            self._start(number, known)

    # --- answering -----------------------------------------------------------------------------

    def _start(self, number: int, pending: _PendingCall) -> None:
        reply = PendingReply(self, number, pending)
        try:
            self._dispatch(pending.call, reply)
        except Exception as error:  # noqa: BLE001 - a bug is logged, and answered as one
            reply(error)

    def _forget(self, number: int) -> None:
        known = self.calls.pop(number, None)
        if known is not None:
            self._bytes -= known.size

    def reply(self, number: int, pending: _PendingCall, outcome: Reply | Exception, *, at_once: bool) -> None:
        """Send a reply, in a task unless it is short and the peer reads fast enough, or an error."""
        put = self.wire.put_at_once if at_once else self.wire.put
        if isinstance(outcome, Exception):
            self._forget(number)
            put(FrameKind.FAILED, number, _plain(outcome, pending.call))
        elif not isinstance(outcome.body, bytes) or len(outcome.body) > INLINE_BYTES or self.wire.is_full:
            self.run(number, pending, partial(_given, outcome))
        else:
            try:
                put(FrameKind.ANSWER, number, outcome.value, outcome.body)
            except Exception as error:  # noqa: BLE001 - it cannot be encoded
                self.wire.put(FrameKind.FAILED, number, _plain(error, pending.call))
            self._forget(number)

    def run(self, number: int, pending: _PendingCall, work: Callable[[], Awaitable[Reply]]) -> None:
        """Answer in a task, which a cancellation of the call ends."""
        scope = trio.CancelScope()
        pending.has_task = True
        pending.call.on_cancel = scope.cancel
        self._context.run(self._nursery.start_soon, self._work, number, pending, work, scope)

    async def _work(
        self, number: int, pending: _PendingCall, work: Callable[[], Awaitable[Reply]], scope: trio.CancelScope
    ) -> None:
        call = pending.call
        scope.deadline = inf if call.deadline_s is None else call.deadline_s
        try:
            with scope:
                try:
                    reply = await work()
                    scope.deadline = inf
                    if call.channel is not None:
                        call.channel.finish()
                    else:
                        pending.outflow = Outflow(self.wire, number)
                        await send_reply(self.wire, number, reply, pending.outflow)
                except Exception as error:  # noqa: BLE001 - a bug is logged, and answered as one
                    self.wire.put(FrameKind.FAILED, number, _plain(error, call))
            if scope.cancelled_caught and self.wire.is_open:
                late = OutcomeUnknown("there was no answer in time", hint="accepted requests still happen")
                self.wire.put(FrameKind.FAILED, number, late)
        finally:
            if pending.inflow is not None:
                pending.inflow.end()
            self._forget(number)


async def _given(reply: Reply) -> Reply:
    return reply


def _deadline(left_s: Any) -> float | None:
    if left_s is None:
        return None
    if not isinstance(left_s, int | float):
        raise MalformedBody("the remaining time is a number of seconds")
    return trio.current_time() + left_s


def _plain(error: Exception, call: Call) -> PlainsongError:
    """Return the error for the caller."""
    known = only_plain(error)
    if known is not None:
        return known
    if isinstance(error, LinkBroken):  # another link that this call needed
        return Internal(f"a link to the owner broke: {error.why}")
    log.error("a call failed", exc_info=error, extra={"kind": call.kind})
    return Internal(hint="the log of the instance that was called has more")


# --- channels --------------------------------------------------------------------------------------


class ServedChannel:
    """The called side of a conversation. Its first use tells the caller that the conversation is open."""

    def __init__(self, wire: Wire, number: int, inflow: Inflow, outflow: Outflow) -> None:
        self._wire = wire
        self._number = number
        self._inflow = inflow
        self._outflow = outflow
        self._accepted = False

    def accept(self) -> None:
        """Tell the caller that the conversation is open. Idempotent."""
        if not self._accepted:
            self._accepted = True
            self._wire.put(FrameKind.OPENED, self._number)

    async def send(self, data: bytes) -> None:
        """Send a message. Wait while the peer has not consumed earlier ones."""
        self.accept()
        await self._outflow.send(data)

    async def receive(self) -> bytes | None:
        """Return the next message; None: the caller sends no more."""
        self.accept()
        return await self._inflow.receive()

    def finish(self) -> None:
        """Send no more."""
        self.accept()
        self._outflow.end()


# --- peers -----------------------------------------------------------------------------------------


class ServesPeer(Protocol):
    """Serves a connection of another instance; also a ``PeerHandler``."""

    async def __call__(
        self,
        stream: trio.SocketStream | TlsStream,
        already_read: bytes,
        stop: trio.Event,
        /,
        binding: bytes | None = None,
    ) -> None:
        """``binding``: given if another process terminates TLS; None: the binding of ``stream``."""
        ...


def peer_handler(
    dispatch: CallHandler, bounds: LinkBounds = BETWEEN_INSTANCES, secret: LinkSecret | None = None
) -> ServesPeer:
    """Return a handler for connections that begin with the preface of a link; ``dispatch`` answers their calls."""

    async def serve(
        stream: trio.SocketStream | TlsStream,
        already_read: bytes,
        stop: trio.Event,
        /,
        binding: bytes | None = None,
    ) -> None:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = peer_address(stream.socket)
        if binding is None:
            binding = stream.tls.binding if isinstance(stream, TlsStream) else b""
        await serve_link(
            stream,
            dispatch,
            bounds,
            already_read=already_read,
            stop=stop,
            peer=peer,
            secret=secret,
            binding=binding,
        )

    return serve


def peer_address(sock: trio.socket.SocketType | socket.socket) -> str:
    """Return the peer's address as ``host:port``; empty if it has left, or is a front end of this daemon."""
    if sock.family == socket.AF_UNIX:
        return ""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""
    return f"{host}:{port}"
