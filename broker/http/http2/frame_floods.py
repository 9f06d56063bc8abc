"""Patch: limits small frames, which hypercorn does not, although each costs as much time as thousands of bytes."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, Event, RawData

from broker.http.budgets import FEW_PARTS
from broker.http.floods import FrameAllowance
from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from broker.http.http2.patch import Http2Bounds

_PREFACE_BYTES = 24
_FRAME_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM = 1
#: Control frames that each request may send free of charge, such as window updates for its answer. A reset revokes them,
#: and is charged itself.
_CONTROLS_OF_REQUEST = 4


class FrameCutter:
    """Splits received data at the ends of frames, so that it can be handled a few frames at a time."""

    __slots__ = ("_allowance", "_head", "_left")

    def __init__(self, allowance: FrameAllowance) -> None:
        self._allowance = allowance
        #: The received part of a frame header, and the number of missing bytes of the current frame.
        self._head = b""
        self._left = _PREFACE_BYTES

    def cut(self, data: bytes, at: int) -> tuple[int, bool]:
        """Return the end of the next few frames from ``at``, and whether the client's allowance covers them."""
        frames = controls = content_bytes = 0
        size = len(data)
        while at < size:
            if self._left:
                taken = min(self._left, size - at)
                self._left -= taken
                at += taken
                continue
            if not self._head and frames >= FEW_PARTS:
                break
            missing = _FRAME_HEAD_BYTES - len(self._head)
            self._head += data[at : at + missing]
            at = min(at + missing, size)
            if len(self._head) < _FRAME_HEAD_BYTES:
                break
            self._left, kind, flags = int.from_bytes(self._head[:3], "big"), self._head[3], self._head[4]
            self._head = b""
            frames += 1
            if kind == _HEADERS:
                controls -= _CONTROLS_OF_REQUEST
            elif kind == _RST_STREAM:
                controls += _CONTROLS_OF_REQUEST + 1
            elif kind != _DATA or not (self._left or flags & _END_STREAM):
                controls += 1
            else:
                content_bytes += self._left
        self._allowance.content(content_bytes)
        return at, not controls or self._allowance.control(controls)


class FrameFloods(Patch):
    """Handles received data a few frames at a time, and ends a connection that sends too many frames without content."""

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others, bounds=bounds)
        self._allowance = FrameAllowance()
        self._frames = FrameCutter(self._allowance)

    async def handle(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        data, at = event.data, 0
        while at < len(data) and not self.closed:
            begin, (at, is_allowed) = at, self._frames.cut(data, at)
            if not is_allowed:
                with suppress(ProtocolError):
                    self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
                await self._end("too many frames without content")
                return
            try:
                # Released before the events are handled, because they may wait for the application.
                async with self.bounds.long_work if begin else nullcontext():
                    events = self.connection.receive_data(data[begin:at])
            except ProtocolError as error:
                await self._end(type(error).__name__)  # only the class: the message may quote a header
                return
            await self._handle_events(events)

    async def _end(self, why: str) -> None:
        self.bounds.refused(why)
        await self._flush()
        await self.send(Closed())

    async def _flush(self) -> None:
        data = self.connection.data_to_send()
        if data:
            self._allowance.content(len(data))
            await self.send(RawData(data=data))
