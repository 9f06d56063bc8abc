"""Requests on links to version 0.1: instances of both versions form one cluster during an upgrade.

Version 0.1 has two kinds of calls where we have one: ``hot`` for its hot routes, and ``view`` for all others. Both lack
the sender's identity, which 0.1 does not support. An instance first gets our kind of call; 0.1 refuses that before
anything happens, and gets its own kinds from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from broker.link.http_codec import encode_identity, encode_request
from broker.security.identity import ANONYMOUS
from plainsong.protocol.errors import BadRequest, Forbidden

if TYPE_CHECKING:
    from broker.http.messages import Request
    from broker.link.client import Link
    from broker.link.flow import Reply
    from broker.security.identity import Identity

REQUEST = "request"
HOT, VIEW = "hot", "view"
#: The hot routes of 0.1, which it calls verbs. All of them exist under these names in both versions.
VERBS = frozenset(("publish", "store", "rollback", "poll", "begin", "prepare", "commit", "abort"))
#: The refusal of an unknown kind ends with these words in both versions, which recognize it by them: they never change.
_UNKNOWN = "is nothing this version answers"


async def call_route(link: Link, route: str, request: Request) -> Reply:
    """Return the owner's answer to a request. Raises the same as ``Link.call``.

    Raises:
      Forbidden: the owner is of version 0.1, which could not check the rights of the sender.
    """
    if not link.is_0_1:
        try:
            return await link.call(REQUEST, encode_request(route, request), request.body)
        except BadRequest as refused:
            if not refused.detail.endswith(_UNKNOWN):
                raise
            link.is_0_1 = True
    if request.who != ANONYMOUS:
        raise Forbidden("the owner runs version 0.1, which has no authentication", hint="upgrade it first")
    if route not in VERBS:
        return await link.call(VIEW, _view(route, request), request.body)
    kept = _view(route, request)[3]
    path = request.path
    where = [route, path.get("namespace", ""), path.get("topic", ""), path.get("transaction", ""), request.query]
    return await link.call(HOT, [*where, kept, request.request_id, request.waited_ms], request.body)


def sender(who: Identity) -> list[Any]:
    """Return the end of a call that names its sender: nothing for ``anonymous``, since 0.1 refuses further values."""
    identity = encode_identity(who)
    return [] if identity is None else [identity]


def enlisted(pointer: int, value: object) -> tuple[int, ...]:
    """Return the pointers of an enlisted transaction from the answer to ``tx.enlist``; 0.1 answers only True."""
    return (pointer,) if value is True else tuple(map(int, cast("list[int]", value)))


def _view(route: str, request: Request) -> list[Any]:
    return encode_request(route, replace(request, page_bytes=None))[:6]


def hot_as_request(value: list[Any]) -> list[Any]:
    """Return a ``hot`` call as a ``request``; a ``view`` has that form already. Raises ValueError."""
    verb, namespace, topic, transaction, query, headers, request_id, waited_ms = value
    if verb not in VERBS:
        raise ValueError(f"{verb!r:.80} is not a hot route")
    places = {"namespace": namespace, "topic": topic, "transaction": transaction}
    path = {place: given for place, given in places.items() if given}
    return [verb, path, query, headers, request_id, waited_ms]
