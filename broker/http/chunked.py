"""Chunked request bodies, bytes in and body out: the transfer coding of RFC 9112, section 7.1, read strictly."""

from __future__ import annotations

import re

from protocol.errors import MalformedBody

#: A chunk's size line, with extensions that nobody uses, and the trailer section.
MAX_LINE_BYTES = 4 << 10
MAX_TRAILER_BYTES = 16 << 10
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?[ \t]*")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00\r\n]*")


class ChunkedBody:
    """Collects one body; ``body`` holds what has arrived of it."""

    __slots__ = ("_left", "_rest", "_trailer_bytes", "body")

    def __init__(self) -> None:
        self.body = bytearray()
        self._rest = b""
        #: Bytes left of the chunk and its line end; None between chunks, negative in the trailers.
        self._left: int | None = None
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes | None:
        """Takes what was read. Returns None until the body has ended, then the bytes that follow it.

        Raises:
          MalformedBody: this is no chunked body.
        """
        data = self._rest + data
        at = 0
        while True:
            if self._left is not None and self._left >= 2:
                at = self._take_chunk(data, at)
            if self._left is not None and self._left >= 0:
                line_end = data[at : at + 2]
                if not b"\r\n".startswith(line_end):
                    raise MalformedBody("a chunk is longer than its size says")
                if len(line_end) < 2 or self._left > 2:
                    break
                at += 2
                self._left = None
            line = self._line(data, at)
            if line is None:
                break
            at += len(line) + 2
            if self._left is None:
                self._left = self._size(line)
            elif not line:
                return data[at:]
            elif not _TRAILER_LINE.fullmatch(line):
                raise MalformedBody("the trailers of the chunked body are no headers")
        self._rest = data[at:]
        return None

    def _take_chunk(self, data: bytes, at: int) -> int:
        assert self._left is not None
        part = data[at : at + self._left - 2]
        self.body += part
        self._left -= len(part)
        return at + len(part)

    def _line(self, data: bytes, at: int) -> bytes | None:
        end = data.find(b"\r\n", at)
        length = (len(data) if end < 0 else end) - at
        bare = data.find(b"\n", at, at + length)
        if length > MAX_LINE_BYTES or bare >= 0:
            raise MalformedBody("a line of the chunked body does not end")
        if self._left is not None and end >= 0:
            self._trailer_bytes += length
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise MalformedBody(f"the trailers of the chunked body are over {MAX_TRAILER_BYTES} bytes")
        return None if end < 0 else data[at:end]

    @staticmethod
    def _size(line: bytes) -> int:
        """What is left of the chunk with its line end; -1 for the last, empty chunk."""
        matched = _SIZE_LINE.fullmatch(line)
        if matched is None:
            raise MalformedBody(f"{line[:40]!r} is not the size of a chunk")
        size = int(matched[1], 16)
        return size + 2 if size else -1
