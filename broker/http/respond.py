"""A handler's answer made ready to send: errors told as problems, bodies compressed. Both doors answer through it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from broker.http.compression import compress
from broker.http.status import answer_for, only_plain
from protocol.errors import Internal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.http.exchange import BodyStream, HotHandler, HotRequest, HttpAnswer

log = logging.getLogger("plainsong.http")


async def respond(handler: HotHandler, request: HotRequest, gzip_min_bytes: int) -> HttpAnswer:
    """What ``handler`` answers to ``request``, or the problem it raised; never raises but for cancellation.

    A stream is begun here, so that what fails before its first byte is still an answer of its own.
    """
    try:
        answer = await handler(request)
        if answer.headers:
            _check_headers(answer.headers)
        if not isinstance(answer.body, bytes):
            answer.body = await begun(answer.body)
        elif len(answer.body) < gzip_min_bytes:
            return answer
    except Exception as error:  # noqa: BLE001 - a bug is answered, and logged, as one
        answer = answer_to(error, request.request_id)
    await compress(answer, request.headers.get("accept-encoding"), gzip_min_bytes)
    return answer


def _check_headers(headers: list[tuple[str, str]]) -> None:
    """Refuses header values that would be more than one line, or no line at all: a value a client had its hand in."""
    for name, value in headers:
        if not value.isprintable():
            raise ValueError(f"the header {name} of an answer has the value {value!r}")


def answer_to(error: Exception, request_id: str) -> HttpAnswer:
    """``error`` as an answer; what is no ``PlainsongError`` goes to the log, and nothing of it into the answer."""
    plain = only_plain(error)
    if plain is None:
        log.error("a request failed", exc_info=error, extra={"request_id": request_id})
        plain = Internal(hint="the log has more under this answer's X-Request-Id")
    return answer_for(plain)


class _Begun:
    """A stream whose first chunk is already made. (A generator here would not close ``rest`` if it never ran.)"""

    def __init__(self, first: bytes | None, rest: BodyStream) -> None:
        self._first = first
        self._rest = rest
        self._chunks = aiter(rest)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._chunks)

    async def aclose(self) -> None:
        await self._rest.aclose()


async def begun(chunks: BodyStream) -> BodyStream:
    """``chunks`` with the first one already made; closed if that fails, or whoever waits for it leaves."""
    try:
        return _Begun(await anext(aiter(chunks), None), chunks)
    except BaseException:
        await chunks.aclose()
        raise
