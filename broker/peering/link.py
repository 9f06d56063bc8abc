"""A link as its caller has it: calls under way at once, each answered when its answer is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from broker.peering.answers import LinkBroken, Reply, Waiting
from broker.peering.bounds import BETWEEN_INSTANCES, INLINE_BYTES, PIECE_BYTES, LinkBounds
from broker.peering.channels import AnswerStream, Channel
from broker.peering.flow import Inflow, Outflow
from broker.peering.wire import Wire
from protocol.errors import Internal, MalformedBody, Overloaded, PlainsongError
from protocol.peering.frames import Frame
from protocol.peering.vocabulary import VOCABULARY

if TYPE_CHECKING:
    from protocol.peering.values import Vocabulary

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
        self._waiting: dict[int, Waiting] = {}
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
                self._over(number, cancel=waiting.answer is None)

    async def _answer(
        self,
        number: int,
        waiting: Waiting,
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
            waiting.place = put(Frame.CALL, number, kind, value, body, left_s)
        else:
            wire.put(Frame.BEGIN, number, kind, value, len(body), left_s)
            await self._send_body(number, waiting, body)
        reply: Reply = await waiting.wait()
        return reply

    async def _send_body(self, number: int, waiting: Waiting, body: bytes) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            await self._wire.room()
            if waiting.answer is not None:
                return  # refused before it was whole
            last = start + PIECE_BYTES >= len(body)
            place = self._wire.put(Frame.PIECE, number, body[start : start + PIECE_BYTES], not last)
            if last:
                waiting.place = place

    def tell(self, kind: str, value: Any) -> None:
        """Calls without waiting for the answer, or caring whether there is one."""
        if self.is_open:
            self._number += 1
            self._wire.put(Frame.CALL, self._number, kind, value, b"", None)

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

    def _begin(self, size: int) -> Waiting:
        if not self.is_open:
            raise LinkBroken(self._why if not self._wire.is_open else "the peer is leaving", sent=False)
        bounds = self._bounds
        if len(self._waiting) >= bounds.requests:
            raise Overloaded(f"{len(self._waiting)} calls are under way on one link", hint="retry a little later")
        if self._bytes and self._bytes + size > bounds.bytes:
            raise Overloaded(f"bodies of {self._bytes} bytes are under way on one link", hint="retry a little later")
        self._number += 1
        self._bytes += size
        waiting = self._waiting[self._number] = Waiting(size)
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

    def _broke(self, waiting: Waiting) -> None:
        error = LinkBroken(self._why, sent=waiting.place <= self._wire.written)
        self._failed(waiting, error)

    @staticmethod
    def _failed(waiting: Waiting, error: Exception) -> None:
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

    def taken(self) -> None:
        """Each frame was acted upon at once."""

    def _begun(self, number: int, waiting: Waiting, value: Any, *, whole: bool) -> None:
        if whole:
            waiting.value, waiting.pieces = value, []
        else:
            waiting.inflow = Inflow(self._wire, number)
            waiting.settle(Reply(value, AnswerStream(waiting.inflow, self, number)))

    @staticmethod
    def _piece(waiting: Waiting, piece: bytes, *, more: bool) -> None:
        if waiting.pieces is not None:
            waiting.pieces.append(piece)
        elif waiting.inflow is not None:
            waiting.inflow.take(piece, more=more)

    def _end_stream(self, number: int, waiting: Waiting) -> None:
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

    async def prove(self, within_s: float) -> None:
        """Ends it, as ``cut`` does, unless the peer is heard within so many seconds: a ping may be unanswered already."""
        await self._wire.prove(within_s)

    def cut(self) -> None:
        """Ends it now: whoever waits learns LinkBroken."""
        self._wire.cut()
