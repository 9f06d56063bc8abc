"""Looking after topics, on an event loop: make, change, look into and delete them, and keep positions in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from plainsong.aio.topic import AsyncTopic
from plainsong.core import calls, polls
from plainsong.core.operations import Operations, checked_properties
from plainsong.starts import OLDEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.shell import AsyncShell
    from plainsong.ids import MessageId
    from plainsong.messages import Seen
    from plainsong.starts import Start


class AsyncAdministration:
    """What ``AsyncClient`` can do besides publishing and reading messages."""

    _shell: AsyncShell
    _operations: Operations

    @property
    def namespace(self) -> str:
        """The namespace of all topics of this client."""
        return self._operations.namespace

    def topic(self, name: str) -> AsyncTopic:
        """A topic to work with; nothing is asked of the daemon. Raises InvalidName."""
        return AsyncTopic(cast("AsyncClient", self), name)

    async def topics(self) -> list[str]:
        """The names of all topics of the namespace, sorted."""
        return await self._shell.run(self._operations.call(calls.list_topics(self.namespace)))

    async def create_topic(
        self, name: str, *, ttl_s: int | None = None, if_not_exists: bool = False, **properties: Any
    ) -> AsyncTopic:
        """Make a topic.

        Args:
          ttl_s: seconds a message lives; None: the daemon's default, seven days.
          if_not_exists: be content with a topic of equal properties; then a lost answer is asked for again.
          properties: ``transactional``, ``deduplication``, ``max_bytes``, as the daemon knows them.
        Raises:
          TopicExists, InvalidName, InvalidProperty: nothing happened.
          ConnectionLost, DeadlineExceeded: unknown; look with ``topics``, or repeat with ``if_not_exists``.
        """
        given = checked_properties(properties, ttl_s)
        call = calls.create_topic(self.namespace, name, given, if_not_exists=if_not_exists)
        await self._shell.run(self._operations.call(call))
        return AsyncTopic(cast("AsyncClient", self), name)

    async def properties(self, topic: str) -> dict[str, str]:
        """The topic's properties, its generation among them, every value a string. Raises TopicNotFound."""
        return await self._shell.run(self._operations.call(calls.describe_topic(self.namespace, topic)))

    async def set_properties(self, topic: str, *, ttl_s: int | None = None, **properties: Any) -> None:
        """Replace all properties; what is not given has its default again. Raises TopicNotFound, InvalidProperty."""
        given = checked_properties(properties, ttl_s)
        await self._shell.run(self._operations.call(calls.set_properties(self.namespace, topic, given)))

    async def delete_topic(self, topic: str) -> None:
        """The topic and its messages are gone for every reader.

        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown.
        """
        await self._shell.run(self._operations.call(calls.delete_topic(self.namespace, topic)))

    async def undelete_topic(self, topic: str) -> None:
        """Bring a deleted topic back. Raises TopicExists, TopicNotFound, PartlyCleaned: nothing happened."""
        await self._shell.run(self._operations.call(calls.undelete_topic(self.namespace, topic)))

    async def stats(self, topic: str, *, reader: str | bytes | None = None) -> dict[str, Any]:
        """Numbers of a topic as the daemon tells them (``messages``, ``bytes``, ``oldestId``, ``newestId``, …).

        Args:
          reader: an id: how much stands after it, as ``reader``.
        Raises:
          TopicNotFound.
        """
        at = reader.hex() if isinstance(reader, bytes) else reader
        return await self._shell.run(self._operations.call(calls.topic_stats(self.namespace, topic, at)))

    async def messages(
        self, topic: str, start: Start = OLDEST, *, until: Start = None, limit: int | None = None
    ) -> Sequence[Seen]:
        """Look at messages, each with its state, without consuming them (``start <= id < until``).

        Args:
          limit: at most so many, 100 if it is None, 1 000 at most.
        Raises:
          TopicNotFound, InvalidParameter.
        """
        since = await self._shell.run(self._operations.resolve(topic, start))
        end = await self._shell.run(self._operations.resolve(topic, until))
        return await self._shell.run(self._operations.call(polls.look(self.namespace, topic, since, end, limit)))

    async def position_of_last(self, topic: str, count: int) -> MessageId | None:
        """The id after which the last ``count`` messages stand; None: start at the oldest. Raises TopicNotFound."""
        return await self._shell.run(self._operations.position_of_last(topic, count))

    # --- readers that the daemon keeps -----------------------------------------------------------

    async def readers(self, topic: str) -> list[dict[str, Any]]:
        """All positions kept for a topic: ``name``, ``position``, ``changedMs``, ``expiresMs``. Raises TopicNotFound."""
        return await self._shell.run(self._operations.call(calls.list_readers(self.namespace, topic)))

    async def reader(self, topic: str, name: str) -> dict[str, Any]:
        """One of them. Raises NotFound (there is none of that name), TopicNotFound."""
        return await self._shell.run(self._operations.call(calls.show_reader(self.namespace, topic, name)))

    async def set_reader(self, topic: str, name: str, position: bytes | str) -> None:
        """Put a position in place, whatever was there. Raises TopicNotFound, InvalidMessageId."""
        call = calls.set_reader(self.namespace, topic, name, calls.checked_position(position))
        await self._shell.run(self._operations.call(call))

    async def delete_reader(self, topic: str, name: str) -> None:
        """Forget a position. Raises NotFound, TopicNotFound: nothing happened."""
        await self._shell.run(self._operations.call(calls.delete_reader(self.namespace, topic, name)))
