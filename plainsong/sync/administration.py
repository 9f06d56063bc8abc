"""Looking after topics: make, change, look into and delete them, and keep positions in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from plainsong.core import calls, polls
from plainsong.core.operations import Operations, checked_properties
from plainsong.starts import OLDEST
from plainsong.sync.topic import Topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.ids import MessageId
    from plainsong.messages import Seen
    from plainsong.starts import Start
    from plainsong.sync.client import Client
    from plainsong.sync.shell import Shell


class Administration:
    """What ``Client`` can do besides publishing and reading messages."""

    _shell: Shell
    _operations: Operations

    @property
    def namespace(self) -> str:
        """The namespace of all topics of this client."""
        return self._operations.namespace

    def topic(self, name: str) -> Topic:
        """A topic to work with; nothing is asked of the daemon. Raises InvalidName."""
        return Topic(cast("Client", self), name)

    def topics(self) -> list[str]:
        """The names of all topics of the namespace, sorted."""
        return self._shell.run(self._operations.call(calls.list_topics(self.namespace)))

    def create_topic(
        self, name: str, *, ttl_s: int | None = None, if_not_exists: bool = False, **properties: Any
    ) -> Topic:
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
        self._shell.run(self._operations.call(call))
        return Topic(cast("Client", self), name)

    def properties(self, topic: str) -> dict[str, str]:
        """The topic's properties, its generation among them, every value a string. Raises TopicNotFound."""
        return self._shell.run(self._operations.call(calls.describe_topic(self.namespace, topic)))

    def set_properties(self, topic: str, *, ttl_s: int | None = None, **properties: Any) -> None:
        """Replace all properties; what is not given has its default again. Raises TopicNotFound, InvalidProperty."""
        given = checked_properties(properties, ttl_s)
        self._shell.run(self._operations.call(calls.set_properties(self.namespace, topic, given)))

    def delete_topic(self, topic: str) -> None:
        """The topic and its messages are gone for every reader.

        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown.
        """
        self._shell.run(self._operations.call(calls.delete_topic(self.namespace, topic)))

    def undelete_topic(self, topic: str) -> None:
        """Bring a deleted topic back. Raises TopicExists, TopicNotFound, PartlyCleaned: nothing happened."""
        self._shell.run(self._operations.call(calls.undelete_topic(self.namespace, topic)))

    def stats(self, topic: str, *, reader: str | bytes | None = None) -> dict[str, Any]:
        """Numbers of a topic as the daemon tells them (``messages``, ``bytes``, ``oldestId``, ``newestId``, …).

        Args:
          reader: an id: how much stands after it, as ``reader``.
        Raises:
          TopicNotFound.
        """
        at = reader.hex() if isinstance(reader, bytes) else reader
        return self._shell.run(self._operations.call(calls.topic_stats(self.namespace, topic, at)))

    def messages(
        self, topic: str, start: Start = OLDEST, *, until: Start = None, limit: int | None = None
    ) -> Sequence[Seen]:
        """Look at messages, each with its state, without consuming them (``start <= id < until``).

        Args:
          limit: at most so many, 100 if it is None, 1 000 at most.
        Raises:
          TopicNotFound, InvalidParameter.
        """
        since = self._shell.run(self._operations.resolve(topic, start))
        end = self._shell.run(self._operations.resolve(topic, until))
        return self._shell.run(self._operations.call(polls.look(self.namespace, topic, since, end, limit)))

    def position_of_last(self, topic: str, count: int) -> MessageId | None:
        """The id after which the last ``count`` messages stand; None: start at the oldest. Raises TopicNotFound."""
        return self._shell.run(self._operations.position_of_last(topic, count))

    # --- readers that the daemon keeps -----------------------------------------------------------

    def readers(self, topic: str) -> list[dict[str, Any]]:
        """All positions kept for a topic: ``name``, ``position``, ``changedMs``, ``expiresMs``. Raises TopicNotFound."""
        return self._shell.run(self._operations.call(calls.list_readers(self.namespace, topic)))

    def reader(self, topic: str, name: str) -> dict[str, Any]:
        """One of them. Raises NotFound (there is none of that name), TopicNotFound."""
        return self._shell.run(self._operations.call(calls.show_reader(self.namespace, topic, name)))

    def set_reader(self, topic: str, name: str, position: bytes | str) -> None:
        """Put a position in place, whatever was there. Raises TopicNotFound, InvalidMessageId."""
        call = calls.set_reader(self.namespace, topic, name, calls.checked_position(position))
        self._shell.run(self._operations.call(call))

    def delete_reader(self, topic: str, name: str) -> None:
        """Forget a position. Raises NotFound, TopicNotFound: nothing happened."""
        self._shell.run(self._operations.call(calls.delete_reader(self.namespace, topic, name)))
