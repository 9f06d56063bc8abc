"""Thrift's framed transport: a length of 32 bits, then so many bytes; they may come in pieces of any size."""

from __future__ import annotations

from struct import pack, unpack_from

#: What Tephra's server reads at most, and ours.
MAX_FRAME_BYTES = 16 << 20
_HEAD_BYTES = 4


class FrameTooLarge(ValueError):
    """A frame says a length that nobody takes: the connection cannot go on."""


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return pack(">i", len(message)) + message


class Frames:
    """Bytes of one connection come in, whole messages go out; holds no more than ``max_bytes`` and what was fed."""

    __slots__ = ("_buffer", "_max_bytes")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    @property
    def missing_bytes(self) -> int:
        """How many bytes the message under way still lacks; 0: none is under way, or it is whole."""
        if not self._buffer:
            return 0
        if len(self._buffer) < _HEAD_BYTES:
            return _HEAD_BYTES - len(self._buffer)
        return max(0, _HEAD_BYTES + self._size() - len(self._buffer))

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next whole message; None: more has to arrive.

        Raises:
          FrameTooLarge: its length is none, or over the bound; nothing was allocated for it.
        """
        if len(self._buffer) < _HEAD_BYTES:
            return None
        stop = _HEAD_BYTES + self._size()
        if len(self._buffer) < stop:
            return None
        message = bytes(self._buffer[_HEAD_BYTES:stop])
        del self._buffer[:stop]
        return message

    def _size(self) -> int:
        size: int = unpack_from(">i", self._buffer)[0]
        if not 0 < size <= self._max_bytes:
            raise FrameTooLarge(f"a frame of {size} bytes, where 1 to {self._max_bytes} are taken")
        return size
