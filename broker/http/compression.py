"""Compressed answers: whether a client takes gzip, and bodies and streams in it."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.http.exchange import BodyStream, HttpAnswer

#: Poll answers are made once and thrown away: the fastest level.
LEVEL = 1
#: zlib's window bits that mean "with gzip's header and trailer".
GZIP_WINDOW = 31
#: From here on a worker thread compresses, so that nobody else waits.
INLINE_BYTES = 64 << 10


@lru_cache(maxsize=64)
def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client that sent this ``Accept-Encoding`` takes gzip; weights of zero refuse it."""
    weights: dict[str, float] = {}
    for offer in accept_encoding.lower().split(","):
        coding, _, parameters = offer.partition(";")
        weights[coding.strip()] = _weight(parameters)
    for name in ("gzip", "x-gzip", "*"):
        if name in weights:
            return weights[name] > 0
    return False


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


async def compress(answer: HttpAnswer, accept_encoding: str | None, min_bytes: int) -> None:
    """Turns the body of ``answer`` into gzip if it is worth it and the client takes it; tells caches either way."""
    body = answer.body
    if isinstance(body, bytes) and len(body) < min_bytes:
        return
    answer.headers = [*answer.headers, ("Vary", "Accept-Encoding")]
    if accept_encoding is None or not accepts_gzip(accept_encoding):
        return
    answer.headers.append(("Content-Encoding", "gzip"))
    answer.length = None
    answer.body = await gzipped(body) if isinstance(body, bytes) else GzippedStream(body)


async def gzipped(body: bytes) -> bytes:
    """``body`` in gzip."""
    packer = zlib.compressobj(LEVEL, wbits=GZIP_WINDOW)
    if len(body) <= INLINE_BYTES:
        return packer.compress(body) + packer.flush()
    return await trio.to_thread.run_sync(packer.compress, body) + packer.flush()


class GzippedStream:
    """A stream in gzip. (A generator here would not close what it compresses if it never ran.)"""

    def __init__(self, chunks: BodyStream) -> None:
        self._plain = chunks
        self._chunks = aiter(chunks)
        self._packer = zlib.compressobj(LEVEL, wbits=GZIP_WINDOW)
        self._ended = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                self._ended = True
                return self._packer.flush()
            if len(chunk) <= INLINE_BYTES:
                packed = self._packer.compress(chunk)
            else:
                packed = await trio.to_thread.run_sync(self._packer.compress, chunk)
            if packed:
                return packed
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Closes what is compressed."""
        await self._plain.aclose()
