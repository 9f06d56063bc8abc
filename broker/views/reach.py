"""How a poll of many topics gets at them: here, where all are this instance's, or each where its owner is.

A wait is one task for each topic, all of them in one nursery: the first that has something ends the others, and a
client that leaves ends them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from protocol.errors import PlainsongError
from protocol.topic.asks import Look

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.service import Service
    from protocol.names import TopicName
    from protocol.page import Page
    from protocol.topic.asks import Span
    from protocol.transactions.view import View


class Since(NamedTuple):
    """A topic, and from which id on it is wanted, inclusive."""

    name: TopicName
    since: bytes


class Reach(Protocol):
    """Spans and pages of topics. What is wrong with one is said of it alone, in its place."""

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """What there is of each, now."""
        ...

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """The same, as soon as it may be more for one of them, which is then not None; deadline on trio's clock."""
        ...

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """The next messages of a span. Raises StoreError."""
        ...


class Here:
    """All topics are this instance's; of one that is not, or not any more, its directory says NoOwner."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """See ``Reach.look``."""
        found: dict[int, Span | PlainsongError] = {}

        async def look(index: int, one: Since) -> None:
            found[index] = await self._ask(one.name, Look(one.since))

        async with trio.open_nursery() as nursery:
            for index, one in enumerate(wanted):
                nursery.start_soon(look, index, one)
        return [found[index] for index in range(len(wanted))]

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """See ``Reach.wait``."""
        found: list[Span | PlainsongError | None] = [None] * len(wanted)

        async def wait(index: int, one: Since) -> None:
            found[index] = await self._ask(one.name, Look(one.since, deadline_s=deadline_s))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index, one in enumerate(wanted):
                nursery.start_soon(wait, index, one)
        return found

    async def _ask(self, name: TopicName, look: Look) -> Span | PlainsongError:
        try:
            return await self._service.directory.ask(name, look)
        except PlainsongError as error:
            return error

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``Reach.page``."""
        return await self._service.read(name, span, limit=limit, max_bytes=max_bytes, view=view)
