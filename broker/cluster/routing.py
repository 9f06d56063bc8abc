"""Where a request belongs: to the owner of a topic, of the transactions, of the namespaces, or to whoever got it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from broker.http.exchange import TOPIC_VERBS
from protocol.errors import InvalidName
from protocol.names import TopicName, topic_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.http.exchange import HotRequest
    from broker.views.route import Route

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
