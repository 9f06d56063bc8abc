"""Every route of the HTTP API. Listeners serve them, instances forward them, openapi.json describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.api.description import routes as description
from broker.api.messages import routes as messages
from broker.api.operations import routes as operations
from broker.api.topics import routes as topics
from broker.api.transactions import routes as transactions

if TYPE_CHECKING:
    from broker.http.route import Route

ROUTES: tuple[Route[Any], ...] = (
    *topics.ROUTES,
    *messages.ROUTES,
    *transactions.ROUTES,
    *operations.ROUTES,
    *description.ROUTES,
)
