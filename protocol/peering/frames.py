"""Frames: what goes over a link, one after the other, each its length (4 bytes, big-endian) and a msgpack array.

    [CALL, n, kind, value, body, s]     do this, and answer; s: seconds the caller will wait, or nil
    [BEGIN, n, kind, value, size, s]    the same, with a body of that size to follow as PIECEs
    [OPEN, n, kind, value]              begin a conversation
    [ANSWER, n, value, body]            all of the answer
    [HEAD, n, value, whole]             the answer begins; its body follows as PIECEs, to be had as one or one by one
    [OPENED, n]                         the conversation has begun
    [PIECE, n, bytes, more]             of a body, or of a conversation's message, which goes on if there is more
    [END, n]                            no more PIECEs from this side
    [FAILED, n, error]                  instead of an answer, or of the rest of one
    [CREDIT, n, bytes]                  so much more may be sent: what was sent before has been used
    [CANCEL, n]                         nobody waits for n any more
    [PING, x], [PONG, x]                are you there
    [LEAVING, 0]                        call no more; what is under way will be answered

``n`` is the caller's number for a call, never used twice on a link. A caller says CALL, BEGIN, OPEN and CANCEL.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from protocol.errors import MalformedBody

if TYPE_CHECKING:
    from protocol.peering.values import Vocabulary

#: What a connection begins with that becomes a link; no method of HTTP is called so.
PREFACE = b"PLAINSONG/1\r\n\r\n"
#: What one frame may have at most, its length not counted.
MAX_FRAME_BYTES = 1 << 20


class Frame(IntEnum):
    """The first element of a frame."""

    CALL = 1
    BEGIN = 2
    OPEN = 3
    ANSWER = 4
    HEAD = 5
    OPENED = 6
    PIECE = 7
    END = 8
    FAILED = 9
    CREDIT = 10
    CANCEL = 11
    PING = 12
    PONG = 13
    LEAVING = 14


#: How many elements each has, by its plain number.
_ELEMENTS: dict[int, int] = {
    kind.value: elements
    for elements, kinds in {
        2: (Frame.OPENED, Frame.END, Frame.CANCEL, Frame.PING, Frame.PONG, Frame.LEAVING),
        3: (Frame.FAILED, Frame.CREDIT),
        4: (Frame.OPEN, Frame.ANSWER, Frame.HEAD, Frame.PIECE),
        6: (Frame.CALL, Frame.BEGIN),
    }.items()
    for kind in kinds
}


class FrameTooLarge(MalformedBody):
    """A frame over the bound: one that comes in ends the link, one that would go out is not sent."""


class FrameWriter:
    """Makes the frames of one connection."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._pack = vocabulary.packer()

    def encode(self, kind: Frame, *rest: Any) -> bytes:
        """A frame as bytes, its length first.

        Raises:
          FrameTooLarge: it has more bytes than may be.
          TypeError, ValueError: as ``Vocabulary.pack`` does.
        """
        try:
            packed = self._pack([+kind, *rest])
        except Exception:
            self._pack = self._vocabulary.packer()
            raise
        if len(packed) > self._max_bytes:
            raise FrameTooLarge(f"a frame would have {len(packed)} bytes, of {self._max_bytes} that it may")
        return len(packed).to_bytes(4, "big") + packed


class FrameReader:
    """Takes what a connection brings apart into frames, however it was cut."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._rest = b""

    @property
    def begun_bytes(self) -> int:
        """What has come of a frame that is not whole yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[list[Any]]:
        """The frames that are whole now, in their order.

        Raises:
          FrameTooLarge: one announces more than may be; nothing is kept of it.
          MalformedBody: one is no frame. Nothing more can be read after either; frames before it were not returned.
        """
        buffer = self._rest + data if self._rest else data
        frames: list[list[Any]] = []
        at, end, unpack = 0, len(buffer), self._vocabulary.unpack
        while end - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > self._max_bytes:
                raise FrameTooLarge(f"a frame of {size} bytes is announced, of {self._max_bytes} that it may have")
            begin, stop = at + 4, at + 4 + size
            if stop > end:
                break
            frames.append(_checked(unpack(buffer[begin:stop])))
            at = stop
        self._rest = buffer[at:]
        return frames


def _checked(frame: Any) -> list[Any]:
    if type(frame) is list and len(frame) > 1 and type(frame[0]) is int and type(frame[1]) is int:
        if _ELEMENTS.get(frame[0]) == len(frame):
            return frame
        raise MalformedBody(f"a frame of kind {frame[0]} with {len(frame)} elements is not known")
    raise MalformedBody("a frame is an array of its kind, its number and more")
