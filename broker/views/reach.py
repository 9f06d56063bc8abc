"""How a poll of many topics gets at each of them: here, where all are this instance's, or wherever its owner is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from broker.service import Service
    from protocol.names import TopicName
    from protocol.page import Page
    from protocol.topic.asks import Look, Span
    from protocol.transactions.view import View


class Reach(Protocol):
    """Spans and pages of topics."""

    async def look(self, name: TopicName, look: Look) -> Span:
        """What there is; with a deadline, as soon as there is something. Raises as the topic's actor does."""
        ...

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """The next messages of a span. Raises StoreError, and NoOwner from elsewhere."""
        ...


class Here:
    """All topics are this instance's; of one that is not, or not any more, its directory raises NoOwner."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def look(self, name: TopicName, look: Look) -> Span:
        """See ``Reach.look``."""
        return await self._service.directory.ask(name, look)

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``Reach.page``."""
        return await self._service.read(name, span, limit=limit, max_bytes=max_bytes, view=view)
