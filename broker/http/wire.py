"""Bodies and answers as bytes of HTTP/1.1: heads, chunks, gzip; and handlers' answers made ready to send."""

from __future__ import annotations

import io
import logging
import re
import time
import zlib
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import trio

from broker.http.budgets import FREE_BYTES, GZIP_WINDOW, SMALL_BYTES, AnswerReservation
from broker.http.handlers import answer_of
from broker.http.messages import BodyPieces, PassedStream, answer_for, only_plain
from plainsong.protocol.errors import Internal, MalformedBody, Overloaded, PlainsongError
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from broker.http.messages import Answer, BodyStream, Handler, Request

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


@lru_cache(maxsize=1)
def _date_line(now_s: int) -> str:
    return f"Date: {formatdate(now_s, usegmt=True)}\r\n"


def answer_head(answer: Answer, request_id: str, *, chunks: bool, close: bool) -> bytes:
    """Return the head of ``answer`` with its empty line.

    A stream is framed by its length if that is known, else by chunks, or by the end of the connection.
    """
    head = f"{_STATUS_LINES[answer.status]}{_date_line(int(time.time()))}X-Request-Id: {request_id}\r\n"
    if answer.content_type is not None:
        head = f"{head}Content-Type: {answer.content_type}\r\n"
    for name, value in answer.headers:
        head = f"{head}{name}: {value}\r\n"
    if isinstance(answer.body, bytes):
        head = f"{head}Content-Length: {len(answer.body)}\r\n"
    elif answer.length is not None:
        head = f"{head}Content-Length: {answer.length}\r\n"
    elif chunks:
        head += "Transfer-Encoding: chunked\r\n"
    return f"{head}Connection: close\r\n\r\n".encode("latin-1") if close else f"{head}\r\n".encode("latin-1")


def refusal(error: PlainsongError, request_id: str, *, head_only: bool = False) -> bytes:
    """Return the last answer of a connection: ``error`` as a problem, without its body if ``head_only``."""
    answer = answer_for(error)
    assert isinstance(answer.body, bytes)
    head = answer_head(answer, request_id, chunks=False, close=True)
    return head if head_only else head + answer.body


def head_of(status: int, headers: Iterable[tuple[str, str]], *, chunks: bool) -> bytes:
    """Return the head of an answer; ``headers`` has every header except ``Date`` and ``Transfer-Encoding``."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    framing = "Transfer-Encoding: chunked\r\n" if chunks else ""
    return f"{_STATUS_LINES[status]}{_date_line(int(time.time()))}{lines}{framing}\r\n".encode("latin-1")


def chunk(data: bytes) -> bytes:
    """Encode ``data``, which must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


# --- respond ---------------------------------------------------------------------------------------
#
# A handler's answer made ready to send: errors as problem+json, bodies compressed. Both listeners use it.


log = logging.getLogger("plainsong.http")


async def respond(handler: Handler, request: Request) -> Answer:
    """Return the answer of ``handler``, or the problem for its error. Raises nothing but cancellation."""
    outcome: Answer | Exception
    try:
        outcome = await answer_of(handler, request)
    except Exception as error:  # noqa: BLE001  # mapped below
        outcome = error
    return await ready(outcome, request)


async def ready(outcome: Answer | Exception, request: Request) -> Answer:
    """Return the outcome of a handler as an answer that can be sent. Raises nothing but cancellation.

    Its stream is started here, so that an error before the first byte can still be sent as the answer.
    """
    try:
        answer = checked(outcome, request.request_id)
        if not isinstance(answer.body, bytes | BodyPieces):
            answer.body = await begun(answer.body)
        elif len(answer.body) < GZIP_MIN_BYTES:
            return answer
    except Exception as error:  # noqa: BLE001 - a bug is answered, and logged, as one
        answer = answer_to(error, request.request_id)
    await compress(answer, request.headers.get("accept-encoding"))
    return answer


def checked(outcome: Answer | Exception, request_id: str) -> Answer:
    """Return a handler's outcome as an answer: an error, or a header that cannot be sent, becomes a problem."""
    if isinstance(outcome, Exception):
        return answer_to(outcome, request_id)
    if outcome.headers:
        try:
            _check_headers(outcome.headers)
        except ValueError as error:
            return answer_to(error, request_id)
    return outcome


def _check_headers(headers: list[tuple[str, str]]) -> None:
    """Raise ValueError for a value that is not printable, such as a line break: a client may have supplied it."""
    for name, value in headers:
        if not value.isprintable():
            raise ValueError(f"the header {name} of an answer has the value {value!r}")


def answer_to(error: Exception, request_id: str) -> Answer:
    """Return ``error`` as a problem. Errors other than ``PlainsongError`` are logged, and not shown to the client."""
    plain = only_plain(error)
    if plain is None:
        log.error("a request failed", exc_info=error, extra={"request_id": request_id})
        plain = Internal(hint="the log has more under this answer's X-Request-Id")
    return answer_for(plain)


def log_cut_off(error: Exception, request_id: str) -> None:
    """Log the error of an answer that has begun, so that it breaks off."""
    plain, about = only_plain(error), {"request_id": request_id}
    if plain is None:
        log.error("a streamed answer was cut off", exc_info=error, extra=about)
    else:  # not a bug, such as no room for the next block
        log.warning("a streamed answer was cut off", extra={**about, "why": plain.detail})


class _Begun(PassedStream):
    """A stream whose first chunk is already made."""

    def __init__(self, first: bytes | None, rest: BodyStream) -> None:
        super().__init__(rest)
        self._first = first

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._pieces)


async def begun(chunks: BodyStream) -> BodyStream:
    """Return ``chunks`` with the first one already made. If that fails or is cancelled, ``chunks`` is closed."""
    try:
        return _Begun(await anext(aiter(chunks), None), chunks)
    except BaseException:
        await chunks.aclose()
        raise


# --- admission of answers --------------------------------------------------------------------------


#: Memory for an answer that is forwarded piece by piece: a link's window, and the piece in hand.
PASSED_BYTES = 768 << 10


def may_be_refused(answer: Answer) -> bool:
    """True if the answer to a read may be refused for lack of room; a small one never is."""
    return not (isinstance(answer.body, bytes) and len(answer.body) <= SMALL_BYTES)


async def admitted(answer: Answer, room: AnswerReservation, *, only_looks: bool) -> Answer:
    """Return ``answer`` with its body accounted for in ``room``, or the refusal if there is no room.

    Args:
      only_looks: the request changed nothing, so its answer may be refused.
    """
    body = answer.body
    if isinstance(body, bytes | BodyPieces):
        size = len(body)
        if size <= FREE_BYTES:
            room.release()
            return answer
    elif room.reserved_bytes:
        return answer  # its pages are reserved as they are made
    else:
        size = PASSED_BYTES if answer.length is None else min(answer.length, PASSED_BYTES)
    if room.has(size):
        return answer
    if not only_looks:
        room.must_have(size)
        return answer
    try:
        await room.take(size, size)
    except Overloaded as error:
        if not isinstance(body, bytes):
            await body.aclose()
        return answer_for(error)
    except BaseException:
        if not isinstance(body, bytes):
            with trio.CancelScope(shield=True):
                await body.aclose()
        raise
    return answer


# --- compression -----------------------------------------------------------------------------------


#: The fastest level: an answer is compressed for one reader.
LEVEL = 1
#: Smaller answers hardly shrink.
GZIP_MIN_BYTES = 1024
#: Larger bodies are compressed by a worker thread, so that no other request waits.
INLINE_BYTES = 64 << 10


@lru_cache(maxsize=64)
def accepts_gzip(accept_encoding: str) -> bool:
    """True if ``Accept-Encoding`` allows gzip; a weight of zero refuses it."""
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


#: Tells caches that other clients may get the same answer in another coding.
VARY = ("Vary", "Accept-Encoding")


async def compress(answer: Answer, accept_encoding: str | None) -> None:
    """Compress the body of ``answer`` if it is large enough and the client accepts gzip; add ``Vary`` either way."""
    body = answer.body
    if isinstance(body, bytes) and len(body) < GZIP_MIN_BYTES:
        return
    if VARY not in answer.headers:
        answer.headers = [*answer.headers, VARY]
    if accept_encoding is None or not accepts_gzip(accept_encoding):
        return
    answer.headers.append(("Content-Encoding", "gzip"))
    answer.length = None
    answer.body = await gzipped(body) if isinstance(body, bytes) else GzippedStream(body)


async def gzipped(body: bytes) -> bytes:
    packer = zlib.compressobj(LEVEL, wbits=GZIP_WINDOW)
    if len(body) <= INLINE_BYTES:
        return packer.compress(body) + packer.flush()
    return await _off_loop(partial(packer.compress, body)) + packer.flush()


#: Threads that compress answers; with few cores, more would starve the event loop.
COMPRESSING_THREADS = 2
_compressing: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("compressing answers")


async def _off_loop(compress: Callable[[], bytes]) -> bytes:
    try:
        limiter = _compressing.get()
    except LookupError:
        limiter = trio.CapacityLimiter(COMPRESSING_THREADS)
        _compressing.set(limiter)
    return await in_thread(compress, limiter=limiter)


class GzippedStream(PassedStream):
    """A stream compressed with gzip."""

    def __init__(self, plain: BodyStream) -> None:
        super().__init__(plain)
        self._packer = zlib.compressobj(LEVEL, wbits=GZIP_WINDOW)
        self._ended = False

    async def __anext__(self) -> bytes:
        while not self._ended:
            chunk = await anext(self._pieces, None)
            if chunk is None:
                self._ended = True
                return self._packer.flush()
            if len(chunk) <= INLINE_BYTES:
                packed = self._packer.compress(chunk)
            else:
                packed = await _off_loop(partial(self._packer.compress, chunk))
            if packed:
                return packed
        raise StopAsyncIteration


# --- chunked ---------------------------------------------------------------------------------------
#
# Chunked request bodies: the transfer coding of RFC 9112, section 7.1, parsed strictly.


#: The limits of a chunk's size line, whose extensions are ignored, and of the trailer section.
MAX_LINE_BYTES = 4 << 10
MAX_TRAILER_BYTES = 16 << 10
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?[ \t]*")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00\r\n]*")


class ChunkedBody:
    """Decodes one body."""

    __slots__ = ("_body", "_left", "_rest", "_trailer_bytes", "is_behind")

    def __init__(self) -> None:
        self._body = io.BytesIO()  # ``getvalue`` returns its buffer without a copy
        #: True if the last ``feed`` stopped at its limit: there are undecoded chunks left.
        self.is_behind = False
        self._rest = b""
        #: Bytes of the chunk and its line end that are still missing; None between chunks, negative in the trailers.
        self._left: int | None = None
        self._trailer_bytes = 0

    def taken(self) -> bytes:
        """Return the bytes decoded since the last call."""
        data = self._body.getvalue()
        if data:
            self._body = io.BytesIO()
        return data

    def feed(self, data: bytes, most_chunks: int = 1 << 62) -> bytes | None:
        """Decode ``data``, but at most ``most_chunks`` chunks: a chunk costs as much time as thousands of bytes.

        Returns:
          None until the body has ended, then the bytes that follow it.

        Raises:
          MalformedBody: this is not a chunked body.
        """
        data = self._rest + data
        at = 0
        for _ in range(most_chunks):
            if self._left is not None and self._left >= 2:
                at = self._take_chunk(data, at)
            if self._left is not None and self._left >= 0:
                line_end = data[at : at + 2]
                if not b"\r\n".startswith(line_end):
                    raise MalformedBody("a chunk is longer than its size")
                if len(line_end) < 2 or self._left > 2:
                    return self._stop(data, at)
                at += 2
                self._left = None
            line = self._line(data, at)
            if line is None:
                return self._stop(data, at)
            at += len(line) + 2
            if self._left is None:
                self._left = self._size(line)
            elif not line:
                self.is_behind = False
                return data[at:]
            elif not _TRAILER_LINE.fullmatch(line):
                raise MalformedBody("the trailers of the chunked body are not headers")
        return self._stop(data, at, is_behind=True)

    def _stop(self, data: bytes, at: int, *, is_behind: bool = False) -> bytes | None:
        self._rest = data[at:]
        self.is_behind = is_behind
        return None

    def _take_chunk(self, data: bytes, at: int) -> int:
        assert self._left is not None
        part = data[at : at + self._left - 2]
        self._body.write(part)
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
                raise MalformedBody(f"the trailers of the chunked body exceed {MAX_TRAILER_BYTES} bytes")
        return None if end < 0 else data[at:end]

    @staticmethod
    def _size(line: bytes) -> int:
        """Return the size of the chunk including its line end; -1 for the last, empty chunk."""
        matched = _SIZE_LINE.fullmatch(line)
        if matched is None:
            raise MalformedBody(f"{line[:40].decode('latin-1')!r} is not the size of a chunk")
        size = int(matched[1], 16)
        return size + 2 if size else -1
