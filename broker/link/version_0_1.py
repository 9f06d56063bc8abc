"""How version 0.1 says a request on a link: instances of both versions form one cluster while it is upgraded.

Version 0.1 has two kinds of calls where we have one: ``hot``, for the routes of its lane, and ``view`` for all others. Both
are without the caller's name, since it knows none. An instance is asked in our way first; one of 0.1 refuses that before
anything happens, and is asked in its own way from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from broker.link.http_codec import encode_request
from broker.security.identity import ANONYMOUS
from plainsong.protocol.errors import BadRequest, Forbidden

if TYPE_CHECKING:
    from broker.http.messages import Request
    from broker.link.client import Link
    from broker.link.flow import Reply

REQUEST = "request"
HOT, VIEW = "hot", "view"
#: The routes of its lane, which it calls verbs. It has no others that we forward by these names.
VERBS = frozenset(("publish", "store", "rollback", "poll", "begin", "prepare", "commit", "abort"))
#: Both versions end the refusal of a kind that they do not know with these words.
_UNKNOWN = "is nothing this version answers"


async def call_route(link: Link, route: str, request: Request) -> Reply:
    """The owner's answer to a request. Raises as ``Link.call``; Forbidden: an owner of version 0.1 could not ask what the name may."""
    if not link.is_0_1:
        try:
            return await link.call(REQUEST, encode_request(route, request), request.body)
        except BadRequest as refused:
            if not refused.detail.endswith(_UNKNOWN):
                raise
            link.is_0_1 = True
    if request.who != ANONYMOUS:
        raise Forbidden("the owner is of version 0.1, which knows no names", hint="upgrade it first")
    if route not in VERBS:
        return await link.call(VIEW, _view(route, request), request.body)
    kept = _view(route, request)[3]
    path = request.path
    where = [route, path.get("namespace", ""), path.get("topic", ""), path.get("transaction", ""), request.query]
    return await link.call(HOT, [*where, kept, request.request_id, request.waited_ms], request.body)


def _view(route: str, request: Request) -> list[Any]:
    return encode_request(route, replace(request, page_bytes=None))[:6]


def hot_as_request(value: list[Any]) -> list[Any]:
    """A ``hot`` call as a ``request``; a ``view`` is one already. Raises ValueError."""
    verb, namespace, topic, transaction, query, headers, request_id, waited_ms = value
    if verb not in VERBS:
        raise ValueError(f"{verb!r:.80} is no route of the lane")
    places = {"namespace": namespace, "topic": topic, "transaction": transaction}
    path = {place: given for place, given in places.items() if given}
    return [verb, path, query, headers, request_id, waited_ms]
