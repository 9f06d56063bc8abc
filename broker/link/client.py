"""The calling side of a link: calls under way at once, conversations, and the links of this process by address.

A link as its caller has it: calls under way at once, each answered when its answer is ready.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, Self

import trio

from broker.http.sockets import split_bind
from broker.link.flow import Inflow, LinkBroken, Outflow, PendingCall, Reply
from broker.link.wire import BETWEEN_INSTANCES, INLINE_BYTES, PIECE_BYTES, LinkBounds, Wire
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import Internal, MalformedBody, Overloaded, PlainsongError
from plainsong.protocol.link import VOCABULARY, FrameKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from plainsong.protocol.link import Vocabulary

__all__ = ["Channel", "Link", "LinkBroken", "Reply"]


class Link:
    """The caller's side of one connection. ``run`` it in a task; it ends when the connection does."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        bounds: LinkBounds = BETWEEN_INSTANCES,
        *,
        vocabulary: Vocabulary = VOCABULARY,
        peer: str = "",
    ) -> None:
        self._wire = Wire(stream, bounds, vocabulary, peer)
        self._bounds = bounds
        self._waiting: dict[int, PendingCall] = {}
        self._bytes = 0
        self._number = 0
        self._leaving = False
        self._why = "the link has ended"
        self.ended = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether it takes calls."""
        return self._wire.is_open and not self._leaving

    @property
    def is_peer(self) -> bool:
        """Whether the other side has ever said that it is one of a link."""
        return self._wire.is_peer

    @property
    def under_way(self) -> int:
        """Calls and conversations that are not over."""
        return len(self._waiting)

    async def run(self) -> str:
        """Serves the link until it ends; why it did, empty when in good order. Whoever still waits is told."""
        try:
            self._why = await self._wire.run(self) or "the peer closed the link"
            return self._why
        finally:
            self._leaving = True
            for waiting in list(self._waiting.values()):
                self._broke(waiting)
            self.ended.set()

    # --- calling -------------------------------------------------------------------------------

    async def call(
        self, kind: str, value: Any, body: bytes = b"", *, deadline_s: float | None = None, at_once: bool = False
    ) -> Reply:
        """What the peer answers. A caller that is cancelled cancels the call there; what was taken still happens.

        Args:
          kind, value, body: what the peer's dispatch gets; the value is of what the vocabulary knows.
          deadline_s: how long to wait at most, on the clock of the event loop; the peer is told what is left.
          at_once: no other call is expected in this turn of the event loop with which it could share a write.
        Raises:
          PlainsongError: as it was raised there. Overloaded also when too much is under way here: nothing happened.
          LinkBroken: there is no answer: the link ended, or the deadline passed.
          TypeError, ValueError: the value cannot travel; nothing was sent.
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
                self._over(number, cancel=not waiting.is_settled)

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
            await wire.room()
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
            await self._wire.room()
            if waiting.is_settled:
                return  # refused before it was whole
            last = start + PIECE_BYTES >= len(body)
            place = self._wire.put(FrameKind.PIECE, number, body[start : start + PIECE_BYTES], not last)
            if last:
                waiting.place = place

    def tell(self, kind: str, value: Any) -> None:
        """Calls without waiting for the answer, or caring whether there is one."""
        if self.is_open:
            self._number += 1
            self._wire.put(FrameKind.CALL, self._number, kind, value, b"", None)

    async def converse(self, kind: str, value: Any) -> Channel:
        """A conversation that the peer has begun: messages both ways. Whoever gets it closes it.

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
            self._over(number, cancel=not waiting.is_settled)
            raise
        return Channel(inflow, outflow, self, number)

    def _begin(self, size: int) -> PendingCall:
        if not self.is_open:
            raise LinkBroken(self._why if not self._wire.is_open else "the peer is leaving", sent=False)
        bounds = self._bounds
        if len(self._waiting) >= bounds.requests:
            raise Overloaded(f"{len(self._waiting)} calls are under way on one link", hint="retry a little later")
        if self._bytes and self._bytes + size > bounds.bytes:
            raise Overloaded(f"bodies of {self._bytes} bytes are under way on one link", hint="retry a little later")
        self._number += 1
        self._bytes += size
        waiting = self._waiting[self._number] = PendingCall(size)
        return waiting

    def _over(self, number: int, *, cancel: bool) -> None:
        """Nobody waits for it here any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        self._bytes -= waiting.size
        if cancel and self._wire.is_open:
            self._wire.put(FrameKind.CANCEL, number)
        if self._leaving and not self._waiting:
            self._wire.finish()

    def _broke(self, waiting: PendingCall) -> None:
        error = LinkBroken(self._why, sent=waiting.place <= self._wire.written)
        self._failed(waiting, error)

    @staticmethod
    def _failed(waiting: PendingCall, error: Exception) -> None:
        if waiting.inflow is not None:
            waiting.inflow.end(error)
        if waiting.outflow is not None:
            waiting.outflow.broke(error)
        waiting.settle(error)

    # --- what the peer says --------------------------------------------------------------------

    def take(self, frame: list[Any]) -> None:
        """One frame of the peer; what is for nobody who waits is dropped. Raises MalformedBody."""
        kind, number = frame[0], frame[1]
        if kind == FrameKind.LEAVING:
            self._leaving = True
            if not self._waiting:
                self._wire.finish()
            return
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # it has left
        if kind == FrameKind.ANSWER and isinstance(frame[3], bytes):
            waiting.settle(Reply(frame[2], frame[3]))
        elif kind == FrameKind.FAILED:
            self._failed(waiting, frame[2] if isinstance(frame[2], PlainsongError) else Internal("no error was told"))
            self._end_stream(number, waiting)
        elif kind == FrameKind.HEAD:
            self._begun(number, waiting, frame[2], whole=bool(frame[3]))
        elif kind == FrameKind.OPENED and waiting.outflow is not None:
            waiting.settle(waiting.outflow)
        elif kind == FrameKind.PIECE and isinstance(frame[2], bytes):
            self._piece(waiting, frame[2], more=bool(frame[3]))
        elif kind == FrameKind.END:
            if waiting.pieces is not None:
                waiting.settle(Reply(waiting.value, b"".join(waiting.pieces)))
            elif waiting.inflow is not None:
                waiting.inflow.end()
                self._end_stream(number, waiting)
        elif kind == FrameKind.CREDIT and waiting.outflow is not None and isinstance(frame[2], int):
            waiting.outflow.credit(frame[2])
        else:
            raise MalformedBody(f"a frame of kind {kind} that makes no sense to a caller")

    def taken(self) -> None:
        """Each frame was acted upon at once."""

    def _begun(self, number: int, waiting: PendingCall, value: Any, *, whole: bool) -> None:
        if whole:
            waiting.value, waiting.pieces = value, []
        else:
            waiting.inflow = Inflow(self._wire, number)
            waiting.settle(Reply(value, AnswerStream(waiting.inflow, self, number)))

    @staticmethod
    def _piece(waiting: PendingCall, piece: bytes, *, more: bool) -> None:
        if waiting.pieces is not None:
            waiting.pieces.append(piece)
        elif waiting.inflow is not None:
            waiting.inflow.take(piece, more=more)

    def _end_stream(self, number: int, waiting: PendingCall) -> None:
        """Both directions of it have ended, as far as the peer is concerned."""
        if waiting.inflow is not None and (waiting.outflow is None or waiting.outflow.ended):
            self._over(number, cancel=False)

    # --- its end -------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Takes no more calls, lets those under way be answered, then closes. Cancel it to end them sooner."""
        self._leaving = True
        if not self._waiting:
            self._wire.finish()
        try:
            await self.ended.wait()
        finally:
            self._wire.cut()

    async def probe(self, within_s: float) -> None:
        """Ends it, as ``cut`` does, unless the peer is heard within so many seconds: a ping may be unanswered already."""
        await self._wire.probe(within_s)

    def cut(self) -> None:
        """Ends it now: whoever waits learns LinkBroken."""
        self._wire.cut()


# --- channels --------------------------------------------------------------------------------------


class AnswerStream:
    """A body that comes in pieces; a ``BodyStream``."""

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
        """Ends it there, too, unless it has ended."""
        self._link._over(self._number, cancel=not self._inflow.ended)
        self._inflow.end()


class Channel:
    """One conversation: messages both ways, each in order, and as fast as the other side uses them."""

    def __init__(self, inflow: Inflow, outflow: Outflow, link: Link, number: int) -> None:
        self._inflow = inflow
        self._outflow = outflow
        self._link = link
        self._number = number

    async def send(self, data: bytes) -> None:
        """Sends a message. Waits while the peer has not used what was sent. Raises LinkBroken, PlainsongError."""
        await self._outflow.send(data)

    async def receive(self) -> bytes | None:
        """The next message; None: the peer has finished. Raises LinkBroken, PlainsongError."""
        return await self._inflow.receive()

    def finish(self) -> None:
        """Says that no more will be sent; there may still be something to receive."""
        self._outflow.end()

    async def aclose(self) -> None:
        """``close``, for those who are asynchronous."""
        self.close()

    def close(self) -> None:
        """Ends it; there, whoever is at it is cancelled, unless both sides have finished."""
        both = self._inflow.ended and self._outflow.ended
        self._link._over(self._number, cancel=not both)
        self._inflow.end()
        self._outflow.broke(LinkBroken("the conversation was closed", sent=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# --- links -----------------------------------------------------------------------------------------
#
# The links of this process to others: dialled when first needed, kept, and dialled again after they broke.


log = logging.getLogger("plainsong.peering")
#: Seconds after a first, second … failed attempt within which nobody tries again; the last one repeats.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)


async def connect(address: str) -> trio.SocketStream:
    """A connection to ``host:port``. Raises OSError; ValueError for what is no address."""
    host, port = split_bind(address)
    stream = await trio.open_tcp_stream(host, port)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return stream


class _Peer:
    """One address: its link, whoever dials it, and how that went lately."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.dialled: trio.Event | None = None
        self.backoff = Backoff(PAUSES_S)
        self.not_before_s = 0.0
        self.why = ""


class Links:
    """One link for each address that is asked for, run in ``nursery``."""

    def __init__(
        self,
        nursery: trio.Nursery,
        bounds: LinkBounds = BETWEEN_INSTANCES,
        *,
        dial: Callable[[str], Awaitable[trio.abc.Stream]] = connect,
    ) -> None:
        self._nursery = nursery
        self._bounds = bounds
        self._dial = dial
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def __iter__(self) -> Iterator[tuple[str, Link]]:
        """The links that are open, with their addresses."""
        for address, peer in list(self._peers.items()):
            if peer.link is not None and peer.link.is_open:
                yield address, peer.link

    @property
    def unreachable(self) -> dict[str, str]:
        """Addresses that were asked for and could not be reached the last time → why."""
        lost = {address: peer for address, peer in self._peers.items() if peer.backoff.failures}
        return {address: peer.why for address, peer in lost.items() if peer.link is None or not peer.link.is_open}

    async def to(self, address: str) -> Link:
        """The link to ``address``, dialled if need be; many who ask at once share one attempt.

        Raises:
          LinkBroken: there is none just now; ``sent`` is false.
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
            self._nursery.start_soon(self._dialling, address, peer, peer.dialled)
        await peer.dialled.wait()
        if peer.link is None or not peer.link.is_open:
            raise LinkBroken(peer.why or f"the link to {address} has ended", sent=False)
        return peer.link

    def forget(self, address: str) -> None:
        """It is leaving, or gone: its link is ended when all that is under way on it is answered, or nobody is there."""
        peer = self._peers.pop(address, None)
        if peer is not None and peer.link is not None:
            self._nursery.start_soon(self._parting, peer.link)

    async def _parting(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.probe, self._bounds.parting_s)
            await link.aclose()
            nursery.cancel_scope.cancel()

    async def aclose(self) -> None:
        """Takes no more calls, and closes each link once its calls are answered. Cancel it to end them sooner."""
        self._closed = True
        async with trio.open_nursery() as closing:
            for peer in self._peers.values():
                if peer.link is not None:
                    closing.start_soon(peer.link.aclose)

    async def _dialling(self, address: str, peer: _Peer, dialled: trio.Event) -> None:
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
            self._nursery.start_soon(self._parting, link)
        why = await link.run()
        if not self._closed and peer.link is link:
            log.info("a link has ended", extra={"peer": address, "why": why})
        if link.is_peer:
            peer.backoff.reset()
        else:
            self._failed(peer, f"{address} is no peer: {why}")

    async def _connected(self, address: str, peer: _Peer) -> trio.abc.Stream | None:
        try:
            with trio.fail_after(self._bounds.dial_s):
                stream = await self._dial(address)
        except (OSError, ValueError, trio.TooSlowError) as error:
            what = "it does not answer" if isinstance(error, trio.TooSlowError) else str(error)
            self._failed(peer, f"{address} cannot be reached: {what}")
            return None
        peer.link = Link(stream, self._bounds, peer=address)
        return stream

    def _failed(self, peer: _Peer, why: str) -> None:
        peer.why = why
        peer.not_before_s = trio.current_time() + peer.backoff.failed()
        if peer.backoff.failures == 1:
            log.warning("a peer cannot be reached", extra={"why": why})
