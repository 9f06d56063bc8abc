"""What the contract has and this version does not serve yet: refused in so many words, never half done.

Producers and attributes change what is stored, so taking such a request and leaving a part of it out would break
a promise its sender believes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from protocol.requests import PublishRequest

_HINT = "this version knows no producers and no attributes; leave it out, or wait for a later version"


def refuse_later(request: PublishRequest) -> None:
    """Raises InvalidParameter for fields of a publish or store that this version would have to ignore."""
    given = {
        "producer": request.producer is not None,
        "atomic": request.atomic,
        "routingKey": request.routing_key is not None,
        "attributes": request.attributes is not None and any(request.attributes),
    }
    for field, is_given in given.items():
        if is_given:
            raise InvalidParameter(f"{field} is not served yet", hint=_HINT)
    if request.segments is not None and request.write_pointer is None:
        raise InvalidParameter("segments without a write pointer", hint="they publish what was stored under one")
