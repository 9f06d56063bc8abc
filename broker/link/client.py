"""The calling side of a link: concurrent calls, conversations, and the links of this process by address."""

from __future__ import annotations

import logging
import socket
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import trio

from broker.http.sockets import split_bind
from broker.http.tls_socket import TlsSocket, TlsStream
from broker.link.flow import Inflow, LinkBroken, Outflow, PendingCall, Reply
from broker.link.wire import BETWEEN_INSTANCES, INLINE_BYTES, PIECE_BYTES, UNPROVEN, LinkBounds, Wire
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import Internal, MalformedBody, Overloaded, PlainsongError
from plainsong.protocol.link import FrameKind

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from broker.link.proof import LinkSecret

__all__ = ["Channel", "Link", "LinkBroken", "Reply"]


class Link:
    """The caller's side of one connection. ``run`` it in a task; it ends with the connection."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        bounds: LinkBounds = BETWEEN_INSTANCES,
        *,
        peer: str = "",
        secret: LinkSecret | None = None,
    ) -> None:
        binding = stream.tls.binding if isinstance(stream, TlsStream) else b""
        prove = None if secret is None else partial(secret.exchange, "connect", binding)
        self._wire = Wire(stream, bounds, peer, prove)
        self._bounds = bounds
        self._waiting: dict[int, PendingCall] = {}
        self._bytes = 0
        self._number = 0
        self._leaving = False
        self._why = "the link has ended"
        self.ended = trio.Event()
        #: True once the peer has turned out to be of version 0.1, whose calls differ.
        self.is_0_1 = False

    @property
    def is_open(self) -> bool:
        """True if it accepts calls."""
        return self._wire.is_open and not self._leaving

    @property
    def is_peer(self) -> bool:
        """True if the peer has sent the preface of a link, and the proof if one is required."""
        return self._wire.is_peer

    @property
    def under_way(self) -> int:
        """Number of calls and conversations in progress."""
        return len(self._waiting)

    async def run(self) -> str:
        """Run the link until it ends. Return the reason, empty for an orderly end. Pending calls raise LinkBroken."""
        try:
            self._why = await self._wire.run(self) or "the peer closed the link"
            return self._why
        finally:
            self._leaving = True
            for waiting in list(self._waiting.values()):
                self._break(waiting)
            self.ended.set()

    # --- calling -------------------------------------------------------------------------------

    async def call(
        self, kind: str, value: Any, body: bytes = b"", *, deadline_s: float | None = None, at_once: bool = False
    ) -> Reply:
        """Call the peer, and return its answer.

        Cancelling the caller cancels the call at the peer; what an actor has already received still happens.

        Args:
          kind, value, body: passed to the peer's dispatch; the value may have only types of the links' vocabulary.
          deadline_s: when to stop waiting, on the event loop's clock; the peer receives the remaining time.
          at_once: write immediately; for a call that cannot share a write with another one in this turn of the loop.
        Raises:
          PlainsongError: as the peer raised it. Overloaded also if too much is in progress here: nothing happened.
          LinkBroken: the link ended, or the deadline passed, before the answer arrived.
          TypeError, ValueError: the value cannot be encoded; nothing was sent.
        """
        waiting = self._begin(len(body))
        number = self._number
        reply: Reply | None = None
        try:
            if deadline_s is None:
                reply = await self._answer(number, waiting, kind, value, body, None, at_once)
                return reply
            with trio.CancelScope(deadline=deadline_s):
                reply = await self._answer(
                    number, waiting, kind, value, body, deadline_s - trio.current_time(), at_once
                )
                return reply
            raise LinkBroken("there was no answer in time", sent=waiting.place <= self._wire.written)
        finally:
            if reply is None or isinstance(reply.body, bytes):
                # A stream may have started just as its caller was cancelled.
                self._forget(number, cancel=not waiting.is_over)

    async def _answer(
        self,
        number: int,
        waiting: PendingCall,
        kind: str,
        value: Any,
        body: bytes,
        left_s: float | None,
        at_once: bool,
    ) -> Reply:
        wire = self._wire
        if wire.is_full:
            await wire.drain()
        if len(body) <= INLINE_BYTES:
            put = wire.put_at_once if at_once else wire.put
            waiting.place = put(FrameKind.CALL, number, kind, value, body, left_s)
        else:
            wire.put(FrameKind.BEGIN, number, kind, value, len(body), left_s)
            await self._send_body(number, waiting, body)
        reply: Reply = await waiting.wait()
        return reply

    async def _send_body(self, number: int, waiting: PendingCall, body: bytes) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            await self._wire.drain()
            if waiting.is_settled:
                return  # refused before it was complete
            last = start + PIECE_BYTES >= len(body)
            place = self._wire.put(FrameKind.PIECE, number, body[start : start + PIECE_BYTES], not last)
            if last:
                waiting.place = place

    def notify(self, kind: str, value: Any) -> None:
        """Call the peer without waiting for an answer; dropped if the link is not open."""
        if self.is_open:
            self._number += 1
            self._wire.put(FrameKind.CALL, self._number, kind, value, b"", None)

    async def converse(self, kind: str, value: Any) -> Channel:
        """Open a conversation, with messages both ways. The caller closes it.

        Raises:
          PlainsongError: the peer refused it. LinkBroken: the link ended.
        """
        waiting = self._begin(0)
        number = self._number
        waiting.inflow = inflow = Inflow(self._wire, number)
        waiting.outflow = outflow = Outflow(self._wire, number)
        try:
            waiting.place = self._wire.put(FrameKind.OPEN, number, kind, value)
            await waiting.wait()
        except BaseException:
            self._forget(number, cancel=not waiting.is_over)
            raise
        return Channel(inflow, outflow, self, number)

    def _begin(self, size: int) -> PendingCall:
        if not self.is_open:
            raise LinkBroken(self._why if not self._wire.is_open else "the peer is leaving", sent=False)
        bounds = self._bounds
        if len(self._waiting) >= bounds.requests:
            raise Overloaded(f"{len(self._waiting)} calls are in progress on one link", hint="retry later")
        if self._bytes and self._bytes + size > bounds.bytes:
            raise Overloaded(f"bodies in progress on one link use {self._bytes} bytes", hint="retry later")
        self._number += 1
        self._bytes += size
        waiting = self._waiting[self._number] = PendingCall(size)
        return waiting

    def _forget(self, number: int, *, cancel: bool) -> None:
        """Remove a call; with ``cancel``, the peer is asked to end it too."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        self._bytes -= waiting.size
        if cancel and self._wire.is_open:
            self._wire.put(FrameKind.CANCEL, number)
        if self._leaving and not self._waiting:
            self._wire.finish()

    def _break(self, waiting: PendingCall) -> None:
        error = LinkBroken(self._why, sent=waiting.place <= self._wire.written)
        self._fail(waiting, error)

    @staticmethod
    def _fail(waiting: PendingCall, error: Exception) -> None:
        if waiting.inflow is not None:
            waiting.inflow.end(error)
        if waiting.outflow is not None:
            waiting.outflow.fail(error)
        waiting.settle(error)

    # --- frames of the peer --------------------------------------------------------------------

    def on_frame(self, frame: list[Any]) -> None:
        """See ``FrameHandler``. Frames of calls that have ended are dropped."""
        kind, number = frame[0], frame[1]
        if kind == FrameKind.LEAVING:
            self._leaving = True
            if not self._waiting:
                self._wire.finish()
            return
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # its caller has left
        if kind == FrameKind.ANSWER and isinstance(frame[3], bytes):
            waiting.settle(Reply(frame[2], frame[3]))
        elif kind == FrameKind.FAILED:
            self._fail(
                waiting,
                frame[2]
                if isinstance(frame[2], PlainsongError)
                else Internal("the peer sent a reply that is not an error"),
            )
            self._end_stream(number, waiting)
        elif kind == FrameKind.HEAD:
            self._on_head(number, waiting, frame[2], whole=bool(frame[3]))
        elif kind == FrameKind.OPENED and waiting.outflow is not None:
            waiting.settle(waiting.outflow)
        elif kind == FrameKind.PIECE and isinstance(frame[2], bytes):
            self._on_piece(waiting, frame[2], more=bool(frame[3]))
        elif kind == FrameKind.END:
            if waiting.pieces is not None:
                waiting.settle(Reply(waiting.value, b"".join(waiting.pieces)))
            elif waiting.inflow is not None:
                waiting.inflow.end()
                self._end_stream(number, waiting)
        elif kind == FrameKind.CREDIT and waiting.outflow is not None and isinstance(frame[2], int):
            waiting.outflow.credit(frame[2])
        else:
            raise MalformedBody(f"a frame of kind {kind}, which callers never receive")

    def flush(self) -> None:
        """See ``FrameHandler``: frames are handled one by one."""

    def _on_head(self, number: int, waiting: PendingCall, value: Any, *, whole: bool) -> None:
        if whole:
            waiting.value, waiting.pieces = value, []
        else:
            waiting.inflow = Inflow(self._wire, number)
            waiting.settle(Reply(value, AnswerStream(waiting.inflow, self, number)))

    @staticmethod
    def _on_piece(waiting: PendingCall, piece: bytes, *, more: bool) -> None:
        if waiting.pieces is not None:
            waiting.pieces.append(piece)
        elif waiting.inflow is not None:
            waiting.inflow.take(piece, more=more)

    def _end_stream(self, number: int, waiting: PendingCall) -> None:
        """Remove a stream that the peer has ended in both directions."""
        if waiting.inflow is not None and (waiting.outflow is None or waiting.outflow.ended):
            self._forget(number, cancel=False)

    # --- its end -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Accept no more calls, wait for pending answers, and close. Cancel it to close sooner."""
        self._leaving = True
        if not self._waiting:
            self._wire.finish()
        try:
            await self.ended.wait()
        finally:
            self._wire.cut()

    async def probe(self, within_s: float) -> None:
        """Cut the link unless the peer sends something within this time, already running if a ping is unanswered."""
        await self._wire.probe(within_s)

    def cut(self) -> None:
        """End the link now; pending calls raise LinkBroken."""
        self._wire.cut()


# --- channels --------------------------------------------------------------------------------------


class AnswerStream:
    """The body of an answer as it arrives; a ``BodyStream``."""

    def __init__(self, inflow: Inflow, link: Link, number: int) -> None:
        self._inflow = inflow
        self._link = link
        self._number = number

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await self._inflow.receive()
        if data is None:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """End the stream on both sides, unless it has ended."""
        self._link._forget(self._number, cancel=not self._inflow.ended)
        self._inflow.end()


class Channel:
    """One conversation: messages both ways, in order each way, as fast as the receiver consumes them."""

    def __init__(self, inflow: Inflow, outflow: Outflow, link: Link, number: int) -> None:
        self._inflow = inflow
        self._outflow = outflow
        self._link = link
        self._number = number

    async def send(self, data: bytes) -> None:
        """Send a message. Wait while the peer has not consumed earlier ones. Raises LinkBroken, PlainsongError."""
        await self._outflow.send(data)

    async def receive(self) -> bytes | None:
        """Return the next message; None: the peer has finished. Raises LinkBroken, PlainsongError."""
        return await self._inflow.receive()

    def finish(self) -> None:
        """Send no more; there may still be messages to receive."""
        self._outflow.end()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """End the conversation; the peer's task is cancelled unless both sides have finished."""
        both = self._inflow.ended and self._outflow.ended
        self._link._forget(self._number, cancel=not both)
        self._inflow.end()
        self._outflow.fail(LinkBroken("the conversation was closed", sent=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# --- links -----------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.peering")
#: Pauses in seconds after failed attempts, during which there are no further attempts; the last one repeats.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
#: The pause before dialling a peer again that failed the proof.
UNPROVEN_PAUSE_S = 5.0


async def connect(address: str) -> trio.SocketStream:
    """Connect to ``host:port``. Raises OSError; ValueError for an invalid address."""
    host, port = split_bind(address)
    stream = await trio.open_tcp_stream(host, port)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return stream


async def connect_by_tls(context: Callable[[], ssl.SSLContext], address: str) -> TlsStream:
    """Connect with TLS; ``context`` returns the context for each new connection. Raises OSError, ValueError."""
    host, _ = split_bind(address)
    stream = await connect(address)
    raw = socket.socket(fileno=stream.socket.detach())
    try:
        tls = TlsSocket(raw, context(), connected_to=host)
        await tls.shake_hands()
    except BaseException:
        raw.close()
        raise
    return TlsStream(tls)


class _Peer:
    """One address: its link, the current attempt to dial it, and why the last one failed."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.dialled: trio.Event | None = None
        self.backoff = Backoff(PAUSES_S)
        self.not_before_s = 0.0
        self.why = ""


class Links:
    """A link to each address: dialled when first needed, kept, and dialled again when it breaks.

    Links run in ``nursery``.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        bounds: LinkBounds = BETWEEN_INSTANCES,
        *,
        dial: Callable[[str], Awaitable[trio.abc.Stream]] = connect,
        secret: LinkSecret | None = None,
    ) -> None:
        self._secret = secret
        self._nursery = nursery
        #: Links run in this context: a task keeps the context it is started with, and a caller's could keep a request
        #: alive.
        self._context = copy_context()
        self._bounds = bounds
        #: Connects to an address.
        self.dial = dial
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def __iter__(self) -> Iterator[tuple[str, Link]]:
        """Iterate over the open links, with their addresses."""
        for address, peer in list(self._peers.items()):
            if peer.link is not None and peer.link.is_open:
                yield address, peer.link

    @property
    def unreachable(self) -> dict[str, str]:
        """The addresses whose last attempt failed, with the reason."""
        lost = {address: peer for address, peer in self._peers.items() if peer.backoff.failures}
        return {address: peer.why for address, peer in lost.items() if peer.link is None or not peer.link.is_open}

    async def to(self, address: str) -> Link:
        """Return the link to ``address``, dialled if necessary; concurrent callers share one attempt.

        Raises:
          LinkBroken: the address cannot be reached at present; ``sent`` is False.
        """
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer()
        if peer.link is not None and peer.link.is_open:
            return peer.link
        if self._closed:
            raise LinkBroken("the links of this process are closed", sent=False)
        if trio.current_time() < peer.not_before_s:
            raise LinkBroken(peer.why, sent=False)
        if peer.dialled is None:
            peer.dialled = trio.Event()
            self._context.run(self._nursery.start_soon, self._dial_and_run, address, peer, peer.dialled)
        await peer.dialled.wait()
        if peer.link is None or not peer.link.is_open:
            raise LinkBroken(peer.why or f"the link to {address} has ended", sent=False)
        return peer.link

    def forget(self, address: str) -> None:
        """Forget an instance that is leaving or gone. Its link ends once its calls are answered or the peer is dead."""
        peer = self._peers.pop(address, None)
        if peer is not None and peer.link is not None:
            self._nursery.start_soon(self._part, peer.link)

    async def _part(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.probe, self._bounds.parting_s)
            await link.aclose()
            nursery.cancel_scope.cancel()

    async def aclose(self) -> None:
        """Accept no more calls, and close each link once its calls are answered. Cancel it to close sooner."""
        self._closed = True
        async with trio.open_nursery() as closing:
            for peer in self._peers.values():
                if peer.link is not None:
                    closing.start_soon(peer.link.aclose)

    async def _dial_and_run(self, address: str, peer: _Peer, dialled: trio.Event) -> None:
        try:
            stream = await self._connected(address, peer)
        finally:
            peer.dialled = None
            dialled.set()
        if stream is None:
            return
        link = peer.link
        assert link is not None
        if self._peers.get(address) is not peer:  # forgotten while it was dialled
            self._nursery.start_soon(self._part, link)
        why = await link.run()
        if not self._closed and peer.link is link:
            log.info("a link has ended", extra={"peer": address, "why": why})
        if link.is_peer:
            peer.backoff.reset()
        else:
            self._failed(peer, f"{address} is not a peer: {why}")
            if why.startswith(UNPROVEN):  # retrying at the usual rate would help only someone who guesses the secret
                peer.not_before_s = trio.current_time() + UNPROVEN_PAUSE_S

    async def _connected(self, address: str, peer: _Peer) -> trio.abc.Stream | None:
        try:
            with trio.fail_after(self._bounds.dial_s):
                stream = await self.dial(address)
        except (OSError, ValueError, trio.TooSlowError) as error:
            what = "it does not answer" if isinstance(error, trio.TooSlowError) else str(error)
            self._failed(peer, f"{address} cannot be reached: {what}")
            return None
        peer.link = Link(stream, self._bounds, peer=address, secret=self._secret)
        return stream

    def _failed(self, peer: _Peer, why: str) -> None:
        peer.why = why
        peer.not_before_s = trio.current_time() + peer.backoff.failed()
        if peer.backoff.failures == 1:
            log.warning("a peer cannot be reached", extra={"why": why})
