"""Answers on a link: as pieces that leave as fast as the reader at its other end takes them, counted until they left.

Whoever made an answer holds it, within its budget; those that it passes on its way hold a window of it each. So a
reader that stops reading fills no memory on its way, and its time-out reaches back to where the answer is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.peering.bounds import INLINE_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.http.answers import AnswerRoom
    from broker.http.exchange import BodyStream

#: Of a known length up to this, an answer is had whole before it is passed on: should the link break, another is asked.
COLLECTED_BYTES = 1 << 20


class HeldBody:
    """A whole body, in pieces, or a stream; ``room`` holds it until it has been sent. A ``BodyStream``."""

    def __init__(self, body: bytes | BodyStream, room: AnswerRoom | None) -> None:
        self._whole = body if isinstance(body, bytes) else b""
        self._sent = 0
        self._stream = None if isinstance(body, bytes) else body
        self._chunks = None if self._stream is None else aiter(self._stream)
        self._room = room

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while self._sent >= len(self._whole):
            if self._chunks is None:
                raise StopAsyncIteration
            # A block may be a whole page, and what goes out as one is had whole by those who pass it on.
            self._whole, self._sent = await anext(self._chunks), 0
        piece = self._whole[self._sent : self._sent + PIECE_BYTES]
        self._sent += len(piece)
        return piece

    async def aclose(self) -> None:
        """Ends it, and gives back what is held for it."""
        self._whole = b""
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            if self._room is not None:
                self._room.release()


def held(body: bytes | BodyStream, room: AnswerRoom | None) -> bytes | BodyStream:
    """``body`` as it goes out on a link: whole when it is short, else as a stream that ``room`` holds."""
    if isinstance(body, bytes) and len(body) <= INLINE_BYTES:
        if room is not None:
            room.release()
        return body
    return HeldBody(body, room)


async def collected(body: bytes | BodyStream) -> bytes:
    """All of a body that came on a link. Raises LinkBroken, PlainsongError: the rest will not come."""
    if isinstance(body, bytes):
        return body
    try:
        return b"".join([piece async for piece in body])
    finally:
        await body.aclose()
