"""Checks before a compressed body is decompressed: the names in the path, the content type, and the topic's existence.

Authentication and authorization run earlier (``broker.security.guard``), so that errors have the same precedence as
those of any other request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from broker.http.budgets import decoded_body, needs_decoding
from broker.http.handlers import answer_of
from broker.http.messages import answer_for
from plainsong.protocol.codec import codec_for
from plainsong.protocol.codec.cloud_events import event_mode
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from broker.http.budgets import Reservation
    from broker.http.messages import Answer, Request
    from broker.http.route import Endpoint, Route

#: The route that reports whether a topic exists, wherever its owner is.
_ASKS_FOR_TOPIC = "get_topic"
#: The only route whose topic need not exist.
_CREATES_TOPIC = "create_topic"
#: The only route whose body may have any content type, if its headers mark it as the data of an event.
_TAKES_EVENTS = "publish"


class Acceptance:
    """Decides whether a request with a compressed body can be accepted at all.

    A decompression bomb then costs its sender as much as any other request: it needs a topic, and the right to write to
    it.
    """

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._show = next((each.handler for each in endpoints if each.route.name == _ASKS_FOR_TOPIC), None)

    async def decode(
        self, route: Route[Any], request: Request, held: Reservation, max_bytes: int, timeout_s: float
    ) -> Answer | None:
        """Decompress the body if the request is acceptable; return the refusal if not."""
        if not needs_decoding(request.headers):
            return None
        try:
            refusal = await self._refusal(route, request)
            if refusal is None:
                request.body = await decoded_body(request.body, request.headers, max_bytes, held, timeout_s)
        except PlainsongError as error:
            return answer_for(error)
        return refusal

    async def _refusal(self, route: Route[Any], request: Request) -> Answer | None:
        if "topic" in request.path:
            _ = request.name  # raises for an invalid name
        elif "namespace" in request.path:
            _ = request.namespace
        if (
            route.body is not None
            and len(route.body.types) > 1
            and (route.name != _TAKES_EVENTS or event_mode(request.headers) is None)
        ):
            codec_for(request.headers.get("content-type"))
        if self._show is None or route.owner != "topic" or route.name == _CREATES_TOPIC:
            return None
        shown = await answer_of(self._show, replace(request, query="", headers={}, body=b"", room=None))
        return None if shown.status == 200 else shown
