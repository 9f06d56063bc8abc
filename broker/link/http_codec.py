"""HTTP requests and answers on a link: headers and numbers as plain values, bodies unchanged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from broker.http.budgets import FREE_BYTES
from broker.http.handlers import RequestCancelled
from broker.http.messages import Answer, BodyPieces, Request
from broker.http.wire import admitted, begun
from broker.link.flow import Reply
from broker.link.wire import INLINE_BYTES, PIECE_BYTES
from broker.security.identity import ANONYMOUS, Identity
from broker.security.peer import Peer
from plainsong.protocol.cluster import OWNER_HEADER
from plainsong.protocol.codec import gathered
from plainsong.protocol.codec.cloud_events import BINARY_MODE_HEADERS
from plainsong.protocol.errors import MalformedBody, OutcomeUnknown
from plainsong.protocol.page import Page
from plainsong.protocol.trace import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from actors.ownership import Instance
    from broker.http.budgets import AnswerReservation
    from broker.http.messages import BodyStream, Handler
    from broker.link.server import Call, PendingReply

#: The headers that handlers read, in addition to those of events in binary mode. Bodies travel decompressed; answers
#: are compressed by the process that has the client's connection.
_HEADERS = (
    "content-type",
    "accept",
    "prefer",
    "if-match",
    "last-event-id",
    "plainsong-reader",
    TRACEPARENT,
    TRACESTATE,
)
_EVENT_PREFIX = "ce-"


def encode_request(route: str, request: Request) -> list[Any]:
    """Encode a request, without its body. It includes the sender's identity; the owner looks up the rights itself."""
    headers = _kept_headers(request.headers)
    parts = [route, dict(request.path), request.query, headers, request.request_id, request.waited_ms]
    parts += [encode_identity(request.who), request.peer.address]
    return parts if request.page_bytes is None else [*parts, request.page_bytes]


def decode_request(value: list[Any], body: bytes) -> tuple[str, Request]:
    """Reverse ``encode_request``: return the route's name and the request. Raises ValueError."""
    route, path, query, headers, request_id, waited_ms, *more = value
    request = Request(path, query, headers, body, request_id, waited_ms)
    if more:
        who, address, *page_bytes = more
        request.who, request.peer = decode_identity(who), Peer(str(address))
        request.page_bytes = page_bytes[0] if page_bytes else None
    return route, request


def encode_identity(who: Identity) -> list[Any] | None:
    """Encode the sender's identity; None if it is anonymous."""
    if who == ANONYMOUS:
        return None
    return [who.name, who.via, who.credential, list(who.groups), who.expires_ms]


def decode_identity(value: list[Any] | None) -> Identity:
    """Reverse ``encode_identity``. Raises ValueError."""
    if value is None:
        return ANONYMOUS
    if not isinstance(value, list) or len(value) != 5 or not isinstance(value[3], list):
        raise ValueError("a name on a link lacks a part or has an invalid one")
    name, via, credential, groups, expires_ms = value
    return Identity(name, via, credential, tuple(groups), expires_ms)


def encode_answer(answer: Answer, room: AnswerReservation | None = None) -> Reply:
    """Encode an answer, whole or as a stream with its length if known; ``room`` is released once it is sent."""
    length = len(answer.body) if isinstance(answer.body, bytes) else answer.length
    headers = [list(each) for each in answer.headers]
    return Reply([answer.status, answer.content_type, headers, length], budgeted(answer.body, room))


def answer_request(
    handler: Handler,
    request: Request,
    room: AnswerReservation,
    call: Call,
    reply: PendingReply,
    *,
    only_looks: bool,
    refused: Callable[[Exception], Reply | Exception],
) -> None:
    """Have ``handler`` answer the request of a call, as a listener does, and reply with its answer.

    A short answer is sent as soon as the handler gives it, without a task. A stream that fails before its first byte
    counts as an error.

    Args:
      room: accounts for the answer until it is sent.
      only_looks: see ``admitted``.
      refused: returns the reply to an error, or the error that the caller receives.
    """
    request.room = room
    call.on_cancel = request.cancel

    def answered(outcome: Answer | Exception) -> None:
        if isinstance(outcome, RequestCancelled):
            outcome = OutcomeUnknown("the daemon ended before it answered", hint="accepted requests still happen")
        if isinstance(outcome, Exception):
            room.release()
            reply(refused(outcome))
        elif _is_short(outcome, room, only_looks=only_looks):
            reply(encode_answer(outcome, room))
        elif reply.is_wanted:
            reply.run(partial(_encoded, outcome, room, refused, only_looks=only_looks))
        else:
            room.release()

    handler(request, answered)


def _is_short(answer: Answer, room: AnswerReservation, *, only_looks: bool) -> bool:
    """True if an answer is whole, fits one frame and need not wait for room."""
    if not isinstance(answer.body, bytes) or len(answer.body) > INLINE_BYTES:
        return False
    size = len(answer.body)
    return size <= FREE_BYTES or not only_looks or room.has(size)


async def _encoded(
    answer: Answer, room: AnswerReservation, refused: Callable[[Exception], Reply | Exception], *, only_looks: bool
) -> Reply:
    """Account for an answer in ``room``, start its stream, and encode it; ``room`` is released if that fails."""
    try:
        if not isinstance(answer.body, bytes | BodyPieces):
            answer.body = await begun(answer.body)
        return encode_answer(await admitted(answer, room, only_looks=only_looks), room)
    except Exception as error:
        room.release()
        found = refused(error)
        if isinstance(found, Exception):
            raise found from error
        return found
    except BaseException:
        room.release()
        raise


async def decode_answer(reply: Reply, owner: Instance | None) -> Answer:
    """Reverse ``encode_answer``, and add the owner's address as a header; a stream has its first piece already.

    Raises:
      ValueError: this is not an answer.
      LinkBroken: the link broke before the first piece, or before the last piece of a short answer.
    """
    status, content_type, headers, length = reply.value
    decoded = [(name, value) for name, value in headers]
    if isinstance(reply.body, bytes) or (length is not None and length <= COLLECTED_BYTES):
        body: bytes | BodyStream = await collect(reply.body)
    else:
        body = await begun(reply.body)
    if owner is not None:
        decoded.append((OWNER_HEADER, owner.address))
    return Answer(status, body, content_type, decoded, None if isinstance(body, bytes) else length)


def encode_page(page: Page, room: AnswerReservation | None = None) -> Reply:
    """Encode a page; its messages are the body."""
    sizes = [len(part) for part in page.parts]
    is_short = sum(sizes) <= INLINE_BYTES
    body = b"".join(page.parts) if is_short else BodyPieces(gathered(page.parts))
    return Reply([replace(page, parts=()), sizes], budgeted(body, room))


async def decode_page(reply: Reply) -> Page:
    """Reverse ``encode_page``. Raises MalformedBody."""
    page, sizes = reply.value
    body = await collect(reply.body)
    if not isinstance(page, Page) or sum(sizes) != len(body):
        raise MalformedBody("this is not a page")
    ends = list(accumulate(sizes))
    page.parts = [body[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return page


def _kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: headers[name] for name in _HEADERS if name in headers}
    if not BINARY_MODE_HEADERS.isdisjoint(headers):
        kept |= {name: value for name, value in headers.items() if name.startswith(_EVENT_PREFIX)}
    return kept


# --- budgets of answers ----------------------------------------------------------------------------
#
# The pieces of an answer are sent as fast as its reader accepts them. Until then it counts against the budget of the
# instance that made it, and each process on the way holds one window of it. A stalled reader therefore fills no memory
# on the way, and its time-out takes effect at the instance that made the answer.


#: An answer up to this length is collected before it is passed on, so that it can be requested again if the link
#: breaks.
COLLECTED_BYTES = 1 << 20


class BudgetedBody:
    """A body in pieces, or a stream; ``room`` is released when it has been sent. A ``BodyStream``."""

    def __init__(self, body: bytes | BodyStream, room: AnswerReservation | None) -> None:
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
            # A block may be a whole page; uncut, it would be held whole by every process on the way.
            self._whole, self._sent = await anext(self._chunks), 0
        piece = self._whole[self._sent : self._sent + PIECE_BYTES]
        self._sent += len(piece)
        return piece

    async def aclose(self) -> None:
        """End the body, and release its room."""
        self._whole = b""
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            if self._room is not None:
                self._room.release()


def budgeted(body: bytes | BodyStream, room: AnswerReservation | None) -> bytes | BodyStream:
    """Return ``body`` unchanged if it is short, else as a stream that releases ``room`` at its end."""
    if isinstance(body, bytes) and len(body) <= INLINE_BYTES:
        if room is not None:
            room.release()
        return body
    return BudgetedBody(body, room)


async def collect(body: bytes | BodyStream) -> bytes:
    """Return the whole body of an answer. Raises LinkBroken, PlainsongError: the rest will not arrive."""
    if isinstance(body, bytes):
        return body
    try:
        return b"".join([piece async for piece in body])
    finally:
        await body.aclose()
