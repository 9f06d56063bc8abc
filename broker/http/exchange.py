"""The request and the answer of a hot route, free of any server: what both doors and all handlers speak of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from broker.http.answers import AnswerRoom

#: What has a route of its own in the lane.
Verb = Literal["publish", "store", "rollback", "poll", "begin", "prepare", "commit", "abort"]
#: Those that end the path of a topic, and those that end the path of a transaction.
TOPIC_VERBS: frozenset[str] = frozenset(("publish", "store", "rollback", "poll"))
TRANSACTION_VERBS: frozenset[str] = frozenset(("prepare", "commit", "abort"))
_TOPIC = "/v1/namespaces/{namespace}/topics/{topic}/"
_TRANSACTION = "/v1/transactions/{transaction}/"
#: Where each is, by POST.
HOT_PATHS: Mapping[Verb, str] = {
    "publish": _TOPIC + "publish",
    "store": _TOPIC + "store",
    "rollback": _TOPIC + "rollback",
    "poll": _TOPIC + "poll",
    "begin": "/v1/transactions",
    "prepare": _TRANSACTION + "prepare",
    "commit": _TRANSACTION + "commit",
    "abort": _TRANSACTION + "abort",
}


#: Says on an answer that was forwarded where the owner is.
OWNER_HEADER = "Plainsong-Owner"


class BodyStream(Protocol):
    """A body that is made while it is sent, such as an async generator of bytes. Whoever holds one closes it."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Ends it, and frees what it holds; a second call does nothing."""


@dataclass(slots=True)
class HotRequest:
    """One request of a hot route, its body read, decompressed and within bounds."""

    verb: Verb
    #: Percent-decoded, but not validated; empty where the route has no topic.
    namespace: str
    topic: str
    #: The raw query string, without its question mark.
    query: str
    #: Lower-case names; a repeated header's values are joined by a comma and a space.
    headers: Mapping[str, str]
    body: bytes
    #: The client's ``X-Request-Id``, or one made here.
    request_id: str
    #: The id in the path of a transaction: percent-decoded, but not validated; else empty.
    transaction: str = ""
    #: How much of the wait it asks for is over already, at an instance that could not answer.
    waited_ms: int = 0
    #: What its answer holds until it has left; None: nobody counts.
    room: AnswerRoom | None = None


@dataclass(slots=True)
class HttpAnswer:
    """What goes back. The doors add ``Date``, ``X-Request-Id`` and the framing."""

    status: int
    #: All of it, or a stream, which is sent chunked and always closed.
    body: bytes | BodyStream = b""
    content_type: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    #: How many bytes a stream will have, where that is known: it is then sent as a whole body is, not chunked.
    length: int | None = None


#: Answers one request. It may raise ``PlainsongError``; anything else it raises is a bug, and answered as one.
HotHandler: TypeAlias = Callable[[HotRequest], Awaitable[HttpAnswer]]
HotHandlers: TypeAlias = Mapping[Verb, HotHandler]
