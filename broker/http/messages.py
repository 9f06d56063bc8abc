"""The request and the answer of every route, free of any server; parameters, errors as answers, streams, request ids."""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias
from urllib.parse import parse_qsl

from broker.http.peer import NO_PEER, Peer
from broker.security.identity import ANONYMOUS, Identity
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

    from broker.http.budgets import AnswerRoom, BodyBudget, HttpSettings, Reservation
    from broker.http.origin_check import OriginCheck
    from broker.security.guard import Guard
    from plainsong.protocol.codec.json_values import Kind

#: Says on an answer that was forwarded where the owner is.
OWNER_HEADER = "Plainsong-Owner"


class BodyStream(Protocol):
    """A body that is made while it is sent, such as an async generator of bytes. Its holder closes it."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Ends it, and frees what it holds; a second call does nothing."""


class BodyPieces:
    """A large body that has been made, in pieces, each of which is let go of as it is sent. A ``BodyStream``."""

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


@dataclass(slots=True)
class Request:
    """One request, its body read, decompressed and within bounds."""

    path: Mapping[str, str]
    """What stands in the places of the route's path: percent-decoded, not validated."""
    query: str
    """The raw query string, without its question mark."""
    headers: Mapping[str, str]
    """Lower-case names; a repeated header's values are joined by a comma and a space."""
    body: bytes = b""
    request_id: str = ""
    """The client's ``X-Request-Id``, or one made here."""
    waited_ms: int = 0
    """How much of the wait it asks for is over already, at an instance that could not answer."""
    room: AnswerRoom | None = None
    """What its answer holds until it has left; None: nothing is counted."""
    who: Identity = ANONYMOUS
    """Who asks; ``anonymous`` while authentication is off."""
    rights: Rights = EVERYTHING
    """What the name may, by the grants of this instance; everything while authentication is off."""
    messages: int = 0
    """How many it publishes or stores, once its body was decoded."""
    decoded: Any = None
    """The decoded body, kept by whatever decodes it first: forwarding may look into it before the handler does."""
    peer: Peer = NO_PEER
    """Who is at the other end of the connection it came by."""
    page_bytes: int | None = None
    """How many bytes a page may have by the quotas of the name; None: as many as any."""
    prepare: Callable[[Answer], object] | None = None
    """May be called with the answer that is about to be given, if all goes well, so that less is left to do then."""
    on_cancel: Callable[[], object] | None = None
    """Cancels what waits for something in order to answer it; None while nothing does."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Its answer is not wanted any more: what would wait for one ends. What an actor has received still happens."""
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
        """The query's parameters. Raises InvalidParameter for one that is not among ``known``."""
        if self.query and not known:
            raise InvalidParameter("this route has no query parameters", hint="leave out what stands after the ?")
        return parse_query(self.query, known)

    def json(self) -> Any:
        """The body as JSON, whatever its ``Content-Type``; None when there is none. Raises MalformedBody."""
        if self.decoded is None and self.body.strip():
            self.decoded = parse_json(self.body)
        return self.decoded

    def fields(self, kinds: Mapping[str, tuple[str, Kind]]) -> dict[str, Any]:
        """The body as a record: our name → value. Raises MalformedBody, UnknownField."""
        return fields_of(as_object(self.json()), kinds) if self.body.strip() else {}


@dataclass(slots=True)
class Answer:
    """What goes back. The listeners add ``Date``, ``X-Request-Id`` and the framing."""

    status: int
    #: All of it, or a stream, which is sent chunked and always closed.
    body: bytes | BodyStream = b""
    content_type: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    #: How many bytes a stream will have, where that is known: it is then sent as a whole body is, not chunked.
    length: int | None = None


#: Takes the answer to a request, or the error instead of one: ``PlainsongError``, ``RequestCancelled`` after
#: ``Request.cancel``, or a bug, which is answered as one. It neither waits nor raises.
Answered: TypeAlias = Callable[[Answer | Exception], None]
#: Answers one request: calls ``Answered`` once, before it returns or later. It neither waits nor raises.
Handler: TypeAlias = Callable[[Request, Answered], None]
#: A handler that waits for something, for ``broker.http.handlers.RequestTasks``; it may raise.
AsyncHandler: TypeAlias = Callable[[Request], Awaitable[Answer]]


# --- query -----------------------------------------------------------------------------------------
#
# The few there are, each given once; an unknown one is refused with the nearest known name.


#: Parameters one request may have; ours are a handful.
MAX_PARAMETERS = 32


def parse_query(query: str, known: Collection[str]) -> dict[str, str]:
    """The parameters of a raw query string.

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
    """A parameter that is a whole number, None when it is not given. Raises InvalidParameter."""
    text = parameters.get(key)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        return int(text)
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use a whole number")


def one_of(parameters: dict[str, str], key: str, allowed: Sequence[str], default: str) -> str:
    """A parameter with few values. Raises InvalidParameter."""
    text = parameters.get(key, default)
    if text in allowed:
        return text
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use one of: " + ", ".join(allowed))


def flag(parameters: dict[str, str], key: str) -> bool:
    """A parameter that is ``true`` or ``false`` (the default). Raises InvalidParameter."""
    return one_of(parameters, key, ("true", "false"), "false") == "true"


def wants_representation(prefer: str) -> bool:
    """Whether a ``Prefer`` header asks to be told what came of the request (RFC 7240)."""
    preferences = (part.split(";")[0].strip().lower() for part in prefer.split(","))
    return any(part.replace(" ", "").replace('"', "") == "return=representation" for part in preferences)


# --- status ----------------------------------------------------------------------------------------
#
# Errors as answers: one table from error classes to statuses, and their form as problem+json.


PROBLEM_TYPE = "application/problem+json"
#: Of answers without an end.
EVENT_STREAM = "text/event-stream"
#: How long a stream of events says nothing, and what it says then.
PING_S = 15.0
PING = b": ping\n\n"
#: Where a client that meets an error finds the whole interface (RFC 8631).
PROBLEM_LINK = ("Link", '</openapi.json>; rel="service-desc"')
#: The most specific class of an error that stands here decides.
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
    """The HTTP status that ``error`` is answered with."""
    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)


def problem_of(error: PlainsongError) -> dict[str, str | int]:
    """``error`` under the names of problem+json."""
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
    """``error`` as problem+json; ``allow`` are the methods that a 405 names instead."""
    problem = problem_of(error)
    status = status_of(error)
    headers = [PROBLEM_LINK]
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(error.retry_after_s)))
    if isinstance(error, Unauthenticated | Forbidden) and error.challenge:
        headers.append(("WWW-Authenticate", masked(error.challenge)))  # it names the topic, as the body does
    if isinstance(error, QuotaExceeded) and error.policy:
        headers += [("RateLimit-Policy", error.policy), ("RateLimit", error.state)]
    if status == 405:
        headers.append(("Allow", ", ".join(sorted(allow))))
    # surrogateescape cannot occur in what we decode ourselves, but a detail may quote anything: never fail here.
    body = masked(json.dumps(problem, ensure_ascii=False)).encode("utf-8", "replace")
    return Answer(status, body, PROBLEM_TYPE, headers)


def ends_connection(error: BaseException) -> bool:
    """Whether a refusal is about the connection itself, which then has to end."""
    return isinstance(error, QuotaExceeded) and error.ends_connection


def only_plain(error: BaseException) -> PlainsongError | None:
    """The ``PlainsongError`` that ``error`` is, or that a nursery wrapped alone; None when it is, or holds, a bug."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, PlainsongError) else None


# --- conversation ----------------------------------------------------------------------------------
#
# What stands behind one WebSocket, free of any server: messages go in, answers come out, in order.


class Conversation(Protocol):
    """Requests of one connection that are answered in their order. One task takes, another one answers."""

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """What its handshake is answered with besides; known once it is opened."""
        ...

    async def opened(self) -> None:
        """Opens it, before anything else is asked of it. Raises PlainsongError: it cannot be; close it all the same."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        ...

    @property
    def answered(self) -> int:
        """Requests that have been answered, refusals included."""
        ...

    async def take(self, messages: Sequence[bytes]) -> None:
        """Takes all requests of these messages; waits while too much is under way, which is the back-pressure.

        Raises:
          MalformedBody: something cannot be read; what stood before it has been taken.
        """
        ...

    async def answers(self) -> bytes | None:
        """The next answers, as soon as there are some; None once all is answered and no more is taken."""
        ...

    def finish(self) -> None:
        """Takes no more; what was taken is answered."""
        ...

    def close(self) -> None:
        """The connection has ended. What was taken still happens, unanswered."""
        ...


#: Begins a conversation: namespace, topic, request id, what its requests hold in memory until they are answered, who asks.
#: Raises ``PlainsongError`` for one that cannot be.
Begin: TypeAlias = Callable[[str, str, str, "Reservation", Identity], Conversation]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What all WebSockets of a server share."""

    begin: Begin
    settings: HttpSettings
    budget: BodyBudget
    check: OriginCheck
    guard: Guard


# --- request ids -----------------------------------------------------------------------------------
#
# The client's own if it is sane, else one that is unique among the daemons of a fleet.


#: Longer ones, and ones a log line could choke on, are replaced.
_SANE = re.compile(r"[\x21-\x7e]{1,128}")
_process = secrets.token_hex(5)
_numbers = count(1)


def new_request_id() -> str:
    """A request id that no other request has: ten random digits of this process, and a number."""
    return f"{_process}-{next(_numbers):x}"


def sane_request_id(sent: str | None) -> str | None:
    """``sent`` if it is at most 128 visible ASCII characters, and no credential, else None."""
    return sent if sent is not None and _SANE.fullmatch(sent) and not holds_credential(sent) else None
