"""The request and the answer of every route, independent of any server; parameters, errors as answers, request ids."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias
from urllib.parse import parse_qsl

from broker.security.identity import ANONYMOUS, Identity
from broker.security.peer import NO_PEER, Peer
from broker.security.rights import EVERYTHING, Rights
from plainsong.protocol.codec.json_values import as_object, fields_of, parse_json
from plainsong.protocol.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Internal,
    InvalidParameter,
    MethodNotAllowed,
    NotFound,
    PlainsongError,
    PreconditionFailed,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
    nearest,
)
from plainsong.protocol.masking import holds_credential, masked
from plainsong.protocol.names import TopicName, namespace_name, topic_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from broker.http.budgets import AnswerReservation, Reservation
    from plainsong.protocol.codec.json_values import Kind


class BodyStream(Protocol):
    """A body that is produced while it is sent, such as an async generator of bytes. Its holder closes it."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Stop producing and free all resources. Idempotent."""


class BodyPieces:
    """A large body in pieces; each is freed once it is sent. A ``BodyStream``."""

    __slots__ = ("_pieces", "length")

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = deque(pieces)
        self.length = sum(map(len, self._pieces))

    def __len__(self) -> int:
        return self.length

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.popleft()

    async def aclose(self) -> None:
        """See ``BodyStream.aclose``."""
        self._pieces.clear()


class PassedStream(ABC):
    """A ``BodyStream`` made of another one, which it closes. (An async generator that never ran would not close it.)"""

    def __init__(self, source: BodyStream) -> None:
        self._source = source
        self._pieces = aiter(source)

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None:
        """Close the other stream."""
        await self._source.aclose()


@dataclass(slots=True)
class Request:
    """One request; its body has been read, decompressed and checked against the limits."""

    path: Mapping[str, str]
    """Values of the route's path parameters: percent-decoded, not validated."""
    query: str
    """The raw query string, without its question mark."""
    headers: Mapping[str, str]
    """By lower-case name; the values of a repeated header are joined by a comma and a space."""
    body: bytes = b""
    request_id: str = ""
    """The client's ``X-Request-Id``, or a generated one."""
    waited_ms: int = 0
    """Milliseconds of the requested wait that are already over, spent at an instance that could not answer."""
    room: AnswerReservation | None = None
    """The memory reservation of the answer until it is sent; None if it is not counted."""
    who: Identity = ANONYMOUS
    """The authenticated sender; ``anonymous`` while authentication is off."""
    rights: Rights = EVERYTHING
    """Rights by the grants of this instance; everything while authentication is off."""
    messages: int = 0
    """Number of messages that it publishes or stores; set once the body is decoded."""
    decoded: Any = None
    """The decoded body, cached by its first reader: forwarding may decode it before the handler does."""
    peer: Peer = NO_PEER
    """The other end of the connection that the request arrived on."""
    page_bytes: int | None = None
    """Page size in bytes by the quotas of the sender; None if no quota limits it."""
    prepare: Callable[[Answer], object] | None = None
    """A handler may call it with the answer it expects to give, so that it is already encoded when it is due."""
    on_cancel: Callable[[], object] | None = None
    """Cancels the wait for the answer; None while nothing waits."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End any wait for the answer, which is no longer wanted. What an actor has received still happens."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    @property
    def namespace(self) -> str:
        """The namespace in the path. Raises InvalidName."""
        return namespace_name(self.path["namespace"])

    @property
    def name(self) -> TopicName:
        """The topic in the path. Raises InvalidName."""
        return topic_name(self.path["namespace"], self.path["topic"])

    def parameters(self, *known: str) -> dict[str, str]:
        """Return the query's parameters. Raises InvalidParameter for one that is not in ``known``."""
        if self.query and not known:
            raise InvalidParameter("this route has no query parameters", hint="remove everything after the ?")
        return parse_query(self.query, known)

    def json(self) -> Any:
        """Parse the body as JSON, whatever its ``Content-Type``; None if it is empty. Raises MalformedBody."""
        if self.decoded is None and self.body.strip():
            self.decoded = parse_json(self.body)
        return self.decoded

    def fields(self, kinds: Mapping[str, tuple[str, Kind]]) -> dict[str, Any]:
        """Parse the body as a record, by our field names. Raises MalformedBody, UnknownField."""
        return fields_of(as_object(self.json()), kinds) if self.body.strip() else {}


@dataclass(slots=True)
class Answer:
    """An answer. The listeners add ``Date``, ``X-Request-Id`` and the framing."""

    status: int
    #: The whole body, or a stream, which is sent chunked and always closed.
    body: bytes | BodyStream = b""
    content_type: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    #: Bytes of a stream, if known: it is then sent with a Content-Length instead of chunks.
    length: int | None = None


#: Receives the answer to a request, or an error: ``PlainsongError``, ``RequestCancelled`` after ``Request.cancel``, or
#: any other exception, which is a bug and answered as one. It neither waits nor raises.
Answered: TypeAlias = Callable[[Answer | Exception], None]
#: Answers one request: calls ``Answered`` once, before it returns or later. It neither waits nor raises.
Handler: TypeAlias = Callable[[Request, Answered], None]
#: A handler that may wait and may raise; ``broker.http.handlers.RequestTasks`` makes a ``Handler`` of it.
AsyncHandler: TypeAlias = Callable[[Request], Awaitable[Answer]]


def joined(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers by lower-case name, with repeated ones joined, so that none is overlooked."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


# --- query -----------------------------------------------------------------------------------------
#
# Each parameter may be given once; an unknown one is refused with the nearest known name as a hint.


#: Parameters that one request may have; our routes have a handful.
MAX_PARAMETERS = 32


def parse_query(query: str, known: Collection[str]) -> dict[str, str]:
    """Parse a raw query string.

    Raises:
      InvalidParameter: one is unknown or given twice, or it is not UTF-8; nothing happened.
    """
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except ValueError as error:
        raise InvalidParameter(f"the query string cannot be read: {error}") from None
    found: dict[str, str] = {}
    for key, value in pairs:
        if key not in known:
            raise InvalidParameter(f"unknown query parameter {key[:80]!r}", hint=nearest(key, known))
        if key in found:
            raise InvalidParameter(f"query parameter {key} is given twice")
        found[key] = value
    return found


def whole_number(parameters: dict[str, str], key: str) -> int | None:
    """Return a parameter as a whole number; None if it is not given. Raises InvalidParameter."""
    text = parameters.get(key)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        return int(text)
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use a whole number")


def one_of(parameters: dict[str, str], key: str, allowed: Sequence[str], default: str) -> str:
    """Return a parameter that takes one of a few values. Raises InvalidParameter."""
    text = parameters.get(key, default)
    if text in allowed:
        return text
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use one of: " + ", ".join(allowed))


def flag(parameters: dict[str, str], key: str) -> bool:
    """Return a parameter that is ``true`` or ``false`` (the default). Raises InvalidParameter."""
    return one_of(parameters, key, ("true", "false"), "false") == "true"


def wants_representation(prefer: str) -> bool:
    """True if a ``Prefer`` header asks for ``return=representation`` (RFC 7240)."""
    preferences = (part.split(";")[0].strip().lower() for part in prefer.split(","))
    return any(part.replace(" ", "").replace('"', "") == "return=representation" for part in preferences)


# --- status ----------------------------------------------------------------------------------------
#
# Errors as answers: a table from error classes to statuses, and problem+json.


PROBLEM_TYPE = "application/problem+json"
#: The content type of answers that never end.
EVENT_STREAM = "text/event-stream"
#: An event stream that was silent for this long sends the comment.
PING_S = 15.0
PING = b": ping\n\n"
#: Refers a client that gets an error to the description of the interface (RFC 8631).
PROBLEM_LINK = ("Link", '</openapi.json>; rel="service-desc"')
#: Looked up along the error's class hierarchy: the most specific entry wins.
STATUS_OF: dict[type[PlainsongError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    MethodNotAllowed: 405,
    Conflict: 409,
    Gone: 410,
    PreconditionFailed: 412,
    TooLarge: 413,
    UnsupportedMediaType: 415,
    QuotaExceeded: 429,
    Internal: 500,
    Unavailable: 503,
    PlainsongError: 500,
}


def status_of(error: PlainsongError) -> int:
    """Return the HTTP status of ``error``."""
    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)


def problem_of(error: PlainsongError) -> dict[str, str | int]:
    """Return ``error`` as the members of problem+json."""
    return {
        "type": f"/errors/{error.code}",
        "title": error.title,
        "status": status_of(error),
        "detail": error.detail,
        "code": error.code,
        "hint": error.hint,
        "outcome": error.outcome,
    }


def answer_for(error: PlainsongError, *, allow: Iterable[str] = ()) -> Answer:
    """Return ``error`` as problem+json. A 405 lists the methods in ``allow``."""
    problem = problem_of(error)
    status = status_of(error)
    headers = [PROBLEM_LINK]
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(error.retry_after_s)))
    if isinstance(error, Unauthenticated | Forbidden) and error.challenge:
        headers.append(("WWW-Authenticate", masked(error.challenge)))  # masked like the body: it contains the topic
    if isinstance(error, QuotaExceeded) and error.policy:
        headers += [("RateLimit-Policy", error.policy), ("RateLimit", error.state)]
    if status == 405:
        headers.append(("Allow", ", ".join(sorted(allow))))
    # Decoded text has no surrogates, but a detail may quote any text: encoding must never fail here.
    body = masked(json.dumps(problem, ensure_ascii=False)).encode("utf-8", "replace")
    return Answer(status, body, PROBLEM_TYPE, headers)


def ends_connection(error: BaseException) -> bool:
    """True if a refusal is about the connection itself, which must then be closed."""
    return isinstance(error, QuotaExceeded) and error.ends_connection


def only_plain(error: BaseException) -> PlainsongError | None:
    """Return ``error``, or the one error inside its groups, if it is a ``PlainsongError``; None if it is a bug."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, PlainsongError) else None


# --- conversation ----------------------------------------------------------------------------------
#
# The stream of one WebSocket, independent of any server: messages in, answers out, in order.


class Conversation(Protocol):
    """Requests of one connection, answered in order. One task calls ``take``, another ``answers``."""

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """Additional headers of the handshake's answer; known after ``opened``."""
        ...

    async def opened(self) -> None:
        """Open it; called before anything else. Raises PlainsongError: it failed, and must still be closed."""
        ...

    @property
    def waiting(self) -> bool:
        """True if there are unanswered requests."""
        ...

    @property
    def answered(self) -> int:
        """Number of requests answered, refusals included."""
        ...

    async def take(self, messages: Sequence[bytes]) -> None:
        """Accept all requests of these messages; wait while too much is in progress (backpressure).

        Raises:
          MalformedBody: something cannot be read; everything before it has been taken.
        """
        ...

    async def answers(self) -> bytes | None:
        """Return the next answers as soon as there are any; None once all are given and no more requests arrive."""
        ...

    def finish(self) -> None:
        """Accept no more requests; those already accepted are answered."""
        ...

    def close(self) -> None:
        """The connection has ended. Accepted requests still run; their answers are dropped."""
        ...


#: Begins a conversation, given namespace, topic, request id, the memory reservation of its unanswered requests, and the
#: sender. Raises ``PlainsongError`` if it cannot begin.
Begin: TypeAlias = Callable[[str, str, str, "Reservation", Identity], Conversation]


# --- request ids -----------------------------------------------------------------------------------
#
# The client's id if it is sane; else one that is unique among all daemons.


#: Ids that are longer, or have characters that could corrupt a log line, are replaced.
_SANE = re.compile(r"[\x21-\x7e]{1,128}")
_process = secrets.token_hex(5)
_numbers = count(1)


def new_request_id() -> str:
    """Return a unique request id: ten random hex digits of this process, and a counter."""
    return f"{_process}-{next(_numbers):x}"


def sane_request_id(sent: str | None) -> str | None:
    """Return ``sent`` if it is at most 128 visible ASCII characters and holds no credential, else None."""
    return sent if sent is not None and _SANE.fullmatch(sent) and not holds_credential(sent) else None
