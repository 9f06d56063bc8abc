"""A link as its caller has it: calls under way at once, each answered when its answer is ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Self

import trio

from broker.peering.bounds import BETWEEN_INSTANCES, INLINE_BYTES, PIECE_BYTES, LinkBounds
from broker.peering.flow import Inflow, Outflow
from broker.peering.wire import Wire
from protocol.errors import Internal, MalformedBody, Overloaded, PlainsongError
from protocol.peering.frames import Frame
from protocol.peering.vocabulary import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.http.exchange import BodyStream
    from protocol.peering.values import Vocabulary

log = logging.getLogger("plainsong.peering")


class LinkBroken(Exception):
    """There is no answer, and will be none over this link.

    ``sent``: whether the peer may have got the request; False means that it certainly has not.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer: a value, and a body, whole or to be read as it comes. Whoever gets a stream closes it."""

    value: Any = None
    body: bytes | BodyStream = b""


class _Waiting:
    """One call, and the task that waits for its answer."""

    __slots__ = ("answer", "inflow", "outflow", "pieces", "place", "size", "task", "value")

    def __init__(self, size: int) -> None:
        self.size = size
        #: Of its last frame, after which the peer has all it needs to act.
        self.place: float = inf
        self.task: trio.lowlevel.Task | None = None
        self.answer: Any = None
        #: Of an answer that comes in pieces and is had as one.
        self.value: Any = None
        self.pieces: list[bytes] | None = None
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None

    def settle(self, answer: Any) -> None:
        """Gives the answer, or the exception instead of one. Only the first counts."""
        if self.answer is None:
            self.answer = answer
            if self.task is not None:
                trio.lowlevel.reschedule(self.task)
                self.task = None

    async def wait(self) -> Any:
        """The answer; raises what came instead."""
        if self.answer is None:
            self.task = trio.lowlevel.current_task()

            def abort(_: object) -> trio.lowlevel.Abort:
                self.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


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
        self._waiting: dict[int, _Waiting] = {}
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
    def was_heard(self) -> bool:
        """Whether the other side has ever said that it is one of a link."""
        return self._wire.met

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

    async def call(self, kind: str, value: Any, body: bytes = b"", *, deadline_s: float | None = None) -> Reply:
        """What the peer answers. A caller that is cancelled cancels the call there; what was taken still happens.

        Args:
          kind, value, body: what the peer's dispatch gets; the value is of what the vocabulary knows.
          deadline_s: how long to wait at most, on the clock of the event loop; the peer is told what is left.
        Raises:
          PlainsongError: as it was raised there. Overloaded also when too much is under way here: nothing happened.
          LinkBroken: there is no answer: the link ended, or the deadline passed.
          TypeError, ValueError: the value cannot travel; nothing was sent.
        """
        waiting = self._begin(len(body))
        number = self._number
        reply: Reply | None = None
        try:
            with trio.CancelScope(deadline=inf if deadline_s is None else deadline_s):
                if self._wire.is_full:
                    await self._wire.room()
                await self._send_call(number, waiting, kind, value, body, deadline_s)
                reply = await waiting.wait()
                return reply
            raise LinkBroken("there was no answer in time", sent=waiting.place <= self._wire.written)
        finally:
            if reply is None or isinstance(reply.body, bytes):
                self._over(number, cancel=waiting.answer is None)

    async def _send_call(
        self, number: int, waiting: _Waiting, kind: str, value: Any, body: bytes, deadline_s: float | None
    ) -> None:
        wire = self._wire
        left_s = None if deadline_s is None else max(0.0, deadline_s - trio.current_time())
        if len(body) <= INLINE_BYTES:
            waiting.place = wire.put(Frame.CALL, number, kind, value, body, left_s)
            return
        wire.put(Frame.BEGIN, number, kind, value, len(body), left_s)
        for start in range(0, len(body), PIECE_BYTES):
            await wire.room()
            if waiting.answer is not None:
                return  # refused before it was whole
            last = start + PIECE_BYTES >= len(body)
            place = wire.put(Frame.PIECE, number, body[start : start + PIECE_BYTES], not last)
            if last:
                waiting.place = place

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
            waiting.place = self._wire.put(Frame.OPEN, number, kind, value)
            await waiting.wait()
        except BaseException:
            self._over(number, cancel=waiting.answer is None)
            raise
        return Channel(inflow, outflow, self, number)

    def _begin(self, size: int) -> _Waiting:
        if not self.is_open:
            raise LinkBroken(self._why if not self._wire.is_open else "the peer is leaving", sent=False)
        bounds = self._bounds
        if len(self._waiting) >= bounds.requests:
            raise Overloaded(f"{len(self._waiting)} calls are under way on one link", hint="retry a little later")
        if self._bytes and self._bytes + size > bounds.bytes:
            raise Overloaded(f"bodies of {self._bytes} bytes are under way on one link", hint="retry a little later")
        self._number += 1
        self._bytes += size
        waiting = self._waiting[self._number] = _Waiting(size)
        return waiting

    def _over(self, number: int, *, cancel: bool) -> None:
        """Nobody waits for it here any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        self._bytes -= waiting.size
        if cancel and self._wire.is_open:
            self._wire.put(Frame.CANCEL, number)
        if self._leaving and not self._waiting:
            self._wire.finish()

    def _broke(self, waiting: _Waiting) -> None:
        error = LinkBroken(self._why, sent=waiting.place <= self._wire.written)
        self._failed(waiting, error)

    @staticmethod
    def _failed(waiting: _Waiting, error: Exception) -> None:
        if waiting.inflow is not None:
            waiting.inflow.end(error)
        if waiting.outflow is not None:
            waiting.outflow.broke(error)
        waiting.settle(error)

    # --- what the peer says --------------------------------------------------------------------

    def take(self, frame: list[Any]) -> None:
        """One frame of the peer; what is for nobody who waits is dropped. Raises MalformedBody."""
        kind, number = frame[0], frame[1]
        if kind == Frame.LEAVING:
            self._leaving = True
            if not self._waiting:
                self._wire.finish()
            return
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # it has left
        if kind == Frame.ANSWER and isinstance(frame[3], bytes):
            waiting.settle(Reply(frame[2], frame[3]))
        elif kind == Frame.FAILED:
            self._failed(waiting, frame[2] if isinstance(frame[2], PlainsongError) else Internal("no error was told"))
            self._end_stream(number, waiting)
        elif kind == Frame.HEAD:
            self._begun(number, waiting, frame[2], whole=bool(frame[3]))
        elif kind == Frame.OPENED and waiting.outflow is not None:
            waiting.settle(waiting.outflow)
        elif kind == Frame.PIECE and isinstance(frame[2], bytes):
            self._piece(waiting, frame[2], more=bool(frame[3]))
        elif kind == Frame.END:
            if waiting.pieces is not None:
                waiting.settle(Reply(waiting.value, b"".join(waiting.pieces)))
            elif waiting.inflow is not None:
                waiting.inflow.end()
                self._end_stream(number, waiting)
        elif kind == Frame.CREDIT and waiting.outflow is not None and isinstance(frame[2], int):
            waiting.outflow.credit(frame[2])
        else:
            raise MalformedBody(f"a frame of kind {kind} that makes no sense to a caller")

    def _begun(self, number: int, waiting: _Waiting, value: Any, *, whole: bool) -> None:
        if whole:
            waiting.value, waiting.pieces = value, []
        else:
            waiting.inflow = Inflow(self._wire, number)
            waiting.settle(Reply(value, _AnswerStream(waiting.inflow, self, number)))

    @staticmethod
    def _piece(waiting: _Waiting, piece: bytes, *, more: bool) -> None:
        if waiting.pieces is not None:
            waiting.pieces.append(piece)
        elif waiting.inflow is not None:
            waiting.inflow.take(piece, more=more)

    def _end_stream(self, number: int, waiting: _Waiting) -> None:
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

    def cut(self) -> None:
        """Ends it now: whoever waits learns LinkBroken."""
        self._wire.cut()


class _AnswerStream:
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
