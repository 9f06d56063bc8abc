"""What a compressed request is refused for before its body is decompressed: its name, its content type, its topic.

Who asks, and what they may, is looked at before (``broker.security.guard``), so that the order is that of any request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from broker.http.handlers import answer_of
from broker.http.messages import answer_for
from plainsong.protocol.codec import codec_for
from plainsong.protocol.codec.cloud_events import event_mode
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from broker.api.route import Endpoint, Route
    from broker.http.messages import Answer, Request

#: The route that says whether a topic is there, wherever its owner is.
_ASKS_FOR_TOPIC = "get_topic"
#: The one route whose topic need not be there.
_CREATES_TOPIC = "create_topic"
#: The one route whose body may be of any type, where headers say that it is an event's data.
_TAKES_EVENTS = "publish"


class Acceptance:
    """Asks for each request with a compressed body whether it can be accepted at all.

    A bomb is then no cheaper than any other request: to have it decompressed takes a topic, and the right to write there.
    """

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._show = next((each.handler for each in endpoints if each.route.name == _ASKS_FOR_TOPIC), None)

    async def refusal(self, route: Route[Any], request: Request) -> Answer | None:
        """The refusal of ``request``, whose body is not decompressed yet, or not even read; None: it is acceptable."""
        try:
            return await self._refusal(route, request)
        except PlainsongError as error:
            return answer_for(error)

    async def _refusal(self, route: Route[Any], request: Request) -> Answer | None:
        if "topic" in request.path:
            _ = request.name  # raises for one that is not allowed
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
