"""The stream's path for those who come without a WebSocket: what to come with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest


async def stream(service: Service, request: ViewRequest) -> HttpAnswer:
    """Refuses a request that is not for a WebSocket, whatever else it is. Raises InvalidParameter, InvalidName."""
    raise InvalidParameter(
        f"the stream of {request.name} is a WebSocket",
        hint="send Connection: Upgrade and Upgrade: websocket, over HTTP/1.1",
    )
