"""One topic of a client: its methods without the name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.protocol.names import topic_name
from plainsong.starts import OLDEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.producer import AsyncProducer
    from plainsong.aio.publisher import AsyncPublisher
    from plainsong.aio.reader import AsyncReader
    from plainsong.aio.stream import AsyncStream
    from plainsong.ids import MessageId
    from plainsong.messages import Page, Receipt, Seen
    from plainsong.starts import Start
    from plainsong.transactions.values import Transaction


class AsyncTopic:
    """A topic of a client. Every method is the client's of the same name, and raises what that raises."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        topic_name(client.namespace, name)
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<AsyncTopic {self._client.namespace}:{self.name}>"

    async def publish(self, messages: Any = (), **options: Any) -> Receipt:
        """``AsyncClient.publish``."""
        return await self._client.publish(self.name, messages, **options)

    async def store(self, messages: Any, transaction: Transaction | int, **options: Any) -> None:
        """``AsyncClient.store``."""
        await self._client.store(self.name, messages, transaction, **options)

    async def rollback(self, transaction: Transaction | int) -> None:
        """``AsyncClient.rollback``."""
        await self._client.rollback(self.name, transaction)

    def publisher(self, **options: Any) -> AsyncPublisher:
        """``AsyncClient.publisher``."""
        return self._client.publisher(self.name, **options)

    def stream(self, **options: Any) -> AsyncStream:
        """``AsyncClient.stream``."""
        return self._client.stream(self.name, **options)

    def producer(self, name: str | None = None, **options: Any) -> AsyncProducer:
        """``AsyncClient.producer``."""
        return self._client.producer(self.name, name, **options)

    async def publish_atomic(self, routing_key: str, messages: Any, **options: Any) -> Receipt:
        """``AsyncClient.publish_atomic``."""
        return await self._client.publish_atomic(self.name, routing_key, messages, **options)

    async def producers(self, **options: Any) -> dict[str, Any]:
        """``AsyncClient.producers``."""
        return await self._client.producers(self.name, **options)

    async def poll(self, start: Start = OLDEST, **options: Any) -> Page:
        """``AsyncClient.poll``."""
        return await self._client.poll(self.name, start, **options)

    def read(self, start: Start = OLDEST, **options: Any) -> AsyncReader:
        """``AsyncClient.read``."""
        return self._client.read(self.name, start, **options)

    async def messages(self, start: Start = OLDEST, *, until: Start = None, limit: int | None = None) -> Sequence[Seen]:
        """``AsyncClient.messages``."""
        return await self._client.messages(self.name, start, until=until, limit=limit)

    async def position_of_last(self, count: int) -> MessageId | None:
        """``AsyncClient.position_of_last``."""
        return await self._client.position_of_last(self.name, count)

    async def properties(self) -> dict[str, str]:
        """``AsyncClient.properties``."""
        return await self._client.properties(self.name)

    async def set_properties(self, *, ttl_s: int | None = None, **properties: Any) -> None:
        """``AsyncClient.set_properties``."""
        await self._client.set_properties(self.name, ttl_s=ttl_s, **properties)

    async def stats(self, *, reader: str | bytes | None = None) -> dict[str, Any]:
        """``AsyncClient.stats``."""
        return await self._client.stats(self.name, reader=reader)

    async def readers(self) -> list[dict[str, Any]]:
        """``AsyncClient.readers``."""
        return await self._client.readers(self.name)

    async def delete(self) -> None:
        """``AsyncClient.delete_topic``."""
        await self._client.delete_topic(self.name)

    async def undelete(self) -> None:
        """``AsyncClient.undelete_topic``."""
        await self._client.undelete_topic(self.name)
