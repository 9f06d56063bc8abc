"""A route: its name, method, path and handler, where it is answered, and whether it only reads."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import trio

from broker.http.messages import TOPIC_VERBS, HttpAnswer, ViewRequest
from broker.service import Service
from plainsong.protocol.codec import AVRO
from plainsong.protocol.errors import InvalidName
from plainsong.protocol.names import TopicName, topic_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.http.messages import HotRequest
    from plainsong.protocol.codec import Codec

#: The largest body of a request that only says what to do.
SMALL_BODY_BYTES = 64 << 10

View: TypeAlias = Callable[[Service, ViewRequest], Awaitable[HttpAnswer]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    name: str
    """Its one name: in metrics, in the description, in the application."""
    method: str
    path: str
    """As in the description: ``/v1/namespaces/{namespace}/topics``."""
    view: View
    max_body_bytes: int = 0
    """The largest body it reads; 0: it has none."""


def json_answer(value: Any, *, headers: list[tuple[str, str]] | None = None) -> HttpAnswer:
    """``value`` as an answer of status 200."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return HttpAnswer(200, body, "application/json", headers or [])


# --- routing ---------------------------------------------------------------------------------------
#
# Where a request belongs: to the owner of a topic, of the transactions, of the namespaces, or to whoever got it.


#: Whose name owns the transaction service, and whose the properties of namespaces: no topic has an empty namespace.
TRANSACTIONS = TopicName("", "transactions")
NAMESPACES = TopicName("", "namespaces")
#: ``topics``: each topic of the request has an owner of its own. ``here``: any instance answers it.
Place: TypeAlias = Literal["topic", "topics", "transactions", "namespaces", "here"]
_TOPIC = "/v1/namespaces/{namespace}/topics/{topic}"
_SERVICE = "/v1/transactions"
#: Routes that are not what their path says: a refusal of those who come without a WebSocket needs no owner.
_BY_NAME: Mapping[str, Place] = {"stream": "here", "poll_many": "topics", "set_namespace": "namespaces"}
#: They only look, by POST.
_LOOKING = frozenset(("offsets", "poll_many"))


def place_of(route: Route) -> Place:
    """Where the requests of a route that is not hot belong."""
    if route.name in _BY_NAME:
        return _BY_NAME[route.name]
    if route.path == _TOPIC or route.path.startswith(_TOPIC + "/"):
        return "topic"
    return "transactions" if route.path == _SERVICE or route.path.startswith(_SERVICE + "/") else "here"


def owned_name(place: Place, path: Mapping[str, str]) -> TopicName | None:
    """The name whose owner answers; None: whoever got the request does, as one whose path names no topic that can be.

    Of ``topics`` nothing is known from the path.
    """
    if place == "topic":
        try:
            return topic_name(path["namespace"], path["topic"])
        except InvalidName:
            return None
    if place == "transactions":
        return TRANSACTIONS
    return NAMESPACES if place == "namespaces" else None


def owned_name_of_hot(request: HotRequest) -> TopicName | None:
    """The same for a hot route."""
    if request.verb not in TOPIC_VERBS:
        return TRANSACTIONS
    try:
        return topic_name(request.namespace, request.topic)
    except InvalidName:
        return None


def only_looks(route: Route) -> bool:
    """Whether nothing happens by answering it, so that it may be asked again elsewhere."""
    return route.method == "GET" or route.name in _LOOKING


T = TypeVar("T")


# --- publish ---------------------------------------------------------------------------------------


#: Bodies longer than this are decoded off the event loop: everybody else would wait for them. Measured at
#: 10 ns a byte for JSON; version 1 of Avro is so much faster that only its very large bodies are worth a thread.
LOOP_BYTES = 256 * 1024
LOOP_AVRO_BYTES = 4 * 1024 * 1024


async def off_loop(size: int, codec: Codec, work: Callable[[], T]) -> T:
    """Do ``work`` here, or in a thread when it is about so many bytes that others would notice."""
    if size <= (LOOP_AVRO_BYTES if codec is AVRO else LOOP_BYTES):
        return work()
    return await trio.to_thread.run_sync(work)
