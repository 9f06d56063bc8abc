"""Access to the handlers of endpoints, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.http.route import Endpoint


def subject_of(endpoint: Endpoint) -> Any:
    """Return the object whose method answers a route, unwrapped."""
    bound: Any = endpoint.handler
    return bound.args[0].__self__
