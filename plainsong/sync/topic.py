"""One topic of a client: its methods without the name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.protocol.names import topic_name
from plainsong.starts import OLDEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.ids import MessageId
    from plainsong.messages import Page, Receipt, Seen
    from plainsong.starts import Start
    from plainsong.sync.client import Client
    from plainsong.sync.producer import Producer
    from plainsong.sync.publisher import Publisher
    from plainsong.sync.reader import Reader
    from plainsong.sync.stream import Stream
    from plainsong.transactions.values import Transaction


class Topic:
    """A topic of a client. Every method is the client's of the same name, and raises what that raises."""

    def __init__(self, client: Client, name: str) -> None:
        topic_name(client.namespace, name)
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<Topic {self._client.namespace}:{self.name}>"

    def publish(self, messages: Any = (), **options: Any) -> Receipt:
        """``Client.publish``."""
        return self._client.publish(self.name, messages, **options)

    def store(self, messages: Any, transaction: Transaction | int, **options: Any) -> None:
        """``Client.store``."""
        self._client.store(self.name, messages, transaction, **options)

    def rollback(self, transaction: Transaction | int) -> None:
        """``Client.rollback``."""
        self._client.rollback(self.name, transaction)

    def publisher(self, **options: Any) -> Publisher:
        """``Client.publisher``."""
        return self._client.publisher(self.name, **options)

    def stream(self, **options: Any) -> Stream:
        """``Client.stream``."""
        return self._client.stream(self.name, **options)

    def producer(self, name: str | None = None, **options: Any) -> Producer:
        """``Client.producer``."""
        return self._client.producer(self.name, name, **options)

    def publish_atomic(self, routing_key: str, messages: Any, **options: Any) -> Receipt:
        """``Client.publish_atomic``."""
        return self._client.publish_atomic(self.name, routing_key, messages, **options)

    def producers(self, **options: Any) -> dict[str, Any]:
        """``Client.producers``."""
        return self._client.producers(self.name, **options)

    def poll(self, start: Start = OLDEST, **options: Any) -> Page:
        """``Client.poll``."""
        return self._client.poll(self.name, start, **options)

    def read(self, start: Start = OLDEST, **options: Any) -> Reader:
        """``Client.read``."""
        return self._client.read(self.name, start, **options)

    def messages(self, start: Start = OLDEST, *, until: Start = None, limit: int | None = None) -> Sequence[Seen]:
        """``Client.messages``."""
        return self._client.messages(self.name, start, until=until, limit=limit)

    def position_of_last(self, count: int) -> MessageId | None:
        """``Client.position_of_last``."""
        return self._client.position_of_last(self.name, count)

    def properties(self) -> dict[str, str]:
        """``Client.properties``."""
        return self._client.properties(self.name)

    def set_properties(self, *, ttl_s: int | None = None, **properties: Any) -> None:
        """``Client.set_properties``."""
        self._client.set_properties(self.name, ttl_s=ttl_s, **properties)

    def stats(self, *, reader: str | bytes | None = None) -> dict[str, Any]:
        """``Client.stats``."""
        return self._client.stats(self.name, reader=reader)

    def readers(self) -> list[dict[str, Any]]:
        """``Client.readers``."""
        return self._client.readers(self.name)

    def delete(self) -> None:
        """``Client.delete_topic``."""
        self._client.delete_topic(self.name)

    def undelete(self) -> None:
        """``Client.undelete_topic``."""
        self._client.undelete_topic(self.name)
