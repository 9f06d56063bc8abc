"""What the contract has and this version does not serve yet: refused in so many words, never half done.

Transactions, producers and attributes change what is stored, so taking such a request and leaving a part of
it out would break a promise its sender believes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter, TransactionsUnavailable

if TYPE_CHECKING:
    from broker.http.exchange import HotRequest, HttpAnswer
    from protocol.requests import PollRequest, PublishRequest

_HINT = "this version serves plain publishes and uncommitted polls; leave it out, or wait for a later version"


def refuse_later_publish(request: PublishRequest) -> None:
    """Raises for fields that this version would have to ignore; nothing happened."""
    if request.write_pointer is not None:
        raise TransactionsUnavailable("publishing under a write pointer is not served yet", hint=_HINT)
    given = {
        "producer": request.producer is not None,
        "atomic": request.atomic,
        "routingKey": request.routing_key is not None,
        "segments": request.segments is not None,
        "attributes": request.attributes is not None and any(request.attributes),
    }
    for field, is_given in given.items():
        if is_given:
            raise InvalidParameter(f"{field} is not served yet", hint=_HINT)


def refuse_later_poll(request: PollRequest) -> None:
    """Raises for isolation that this version cannot give."""
    if request.transaction is not None or request.isolation == "committed":
        raise TransactionsUnavailable("transactional polls are not served yet", hint=_HINT)


async def refuse_transactional(request: HotRequest) -> HttpAnswer:
    """Store and rollback: raises TransactionsUnavailable."""
    raise TransactionsUnavailable(f"{request.verb} is not served yet", hint=_HINT)
