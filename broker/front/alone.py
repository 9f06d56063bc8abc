"""One call at a time, over a connection of its own: no task stands between whoever asks and the answer.

The frames are those of a link. What is under way together goes over the link, where it shares writes; what is alone has
nothing to share, and each step from one task to another is time that its client waits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import wait_readable

from broker.peering.answers import LinkBroken
from protocol.errors import Internal, MalformedBody, PlainsongError
from protocol.peering.frames import PREFACE, Frame, FrameReader, FrameWriter
from protocol.peering.vocabulary import VOCABULARY

if TYPE_CHECKING:
    import socket

RECEIVE_BYTES = 16 << 10


class AloneWire:
    """The bytes of such a connection, for either side: a socket that does not block, and is its own from then on."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        #: A frame as bytes: ``FrameWriter.encode``.
        self.encode = FrameWriter(VOCABULARY).encode
        self._feed = FrameReader(VOCABULARY).feed

    async def meet(self) -> None:
        """Makes the acquaintance of the other side. Raises OSError, MalformedBody."""
        self._socket.send(PREFACE)
        said = b""
        while len(said) < len(PREFACE):
            said += await self._read(len(PREFACE) - len(said))
        if said != PREFACE:
            raise MalformedBody("it did not begin as a link does", hint=f"it began with {said!r}")

    def send(self, data: bytes) -> None:
        """Sends a frame now: there is room, for it is the only one. Half a frame is none, and ends the connection.

        Raises:
          OSError: nothing was sent that counts.
        """
        try:
            sent = os.write(self._socket.fileno(), data)
        except OSError:
            self.close()
            raise
        if sent < len(data):
            self.close()
            raise OSError("the connection did not take a whole frame")

    async def receive(self) -> list[Any]:
        """The next frame. Raises OSError: there will be none; MalformedBody."""
        while True:
            frame = self._frame_in(await self._read(RECEIVE_BYTES))
            if frame is not None:
                return frame

    def received(self) -> list[Any] | None:
        """The next frame if it has come. Raises as ``receive`` does."""
        try:
            data = os.read(self._socket.fileno(), RECEIVE_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise OSError("it has ended")
        return self._frame_in(data)

    def close(self) -> None:
        """Ends it; whoever waits learns OSError. A second call does nothing."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def _frame_in(self, data: bytes) -> list[Any] | None:
        frames = self._feed(data)
        if len(frames) > 1:
            raise MalformedBody("more than one at a time")
        return frames[0] if frames else None

    async def _read(self, max_bytes: int) -> bytes:
        while True:
            try:
                await wait_readable(self._socket)
                data = os.read(self._socket.fileno(), max_bytes)
            except BlockingIOError:
                continue
            except trio.ClosedResourceError as error:
                raise OSError("it was closed") from error
            if not data:
                raise OSError("it has ended")
            return data


class Alone:
    """The asking side. Whose turn is cancelled leaves an answer behind; until that has come, nobody asks here."""

    def __init__(self, connection: socket.socket) -> None:
        self._wire = AloneWire(connection)
        self._number = 0
        self._in_use = True
        #: Whether nobody waits any more for the answer that is to come.
        self._left = False

    async def open(self) -> None:
        """Gets ready to be asked. Raises LinkBroken."""
        try:
            await self._wire.meet()
        except (OSError, MalformedBody) as error:
            self.close()
            raise LinkBroken("the connection broke", sent=False) from error
        self._in_use = False

    def is_free(self) -> bool:
        """Whether ``ask`` may be called now; an answer that nobody waited for is put away here."""
        if self._left:
            try:
                frame = self._wire.received()
                if frame is not None:
                    self._checked(frame)
                    self._in_use = self._left = False
            except (OSError, MalformedBody):
                self.close()
        return not self._in_use

    async def ask(self, kind: str, value: Any) -> Any:
        """The value of the answer to a call, of few bytes on either side; only when ``is_free``.

        Raises:
          PlainsongError: as it was raised there.
          LinkBroken: there is no answer, and will be none.
          FrameTooLarge, TypeError, ValueError: the value cannot travel; nothing was sent.
        """
        self._number += 1
        data = self._wire.encode(Frame.CALL, self._number, kind, value, b"", None)
        self._in_use = True
        sent = False
        try:
            self._wire.send(data)
            sent = True
            frame = self._checked(await self._wire.receive())
        except trio.Cancelled:
            self._left = True
            raise
        except (OSError, MalformedBody) as error:
            self.close()
            raise LinkBroken("the connection broke", sent=sent) from error
        self._in_use = False
        if frame[0] == Frame.ANSWER:
            return frame[2]
        raise frame[2] if isinstance(frame[2], PlainsongError) else Internal("no error was told")

    def _checked(self, frame: list[Any]) -> list[Any]:
        if frame[1] != self._number or frame[0] not in (Frame.ANSWER, Frame.FAILED):
            raise MalformedBody("a frame that answers nothing")
        return frame

    def close(self) -> None:
        """Ends it; whoever waits learns LinkBroken. A second call does nothing."""
        self._in_use, self._left = True, False
        self._wire.close()
