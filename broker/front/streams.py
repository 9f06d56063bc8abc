"""Streams of publishes through a front end: both ends of the conversation that carries one to the owning process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.cluster.away import AwayLeg
from broker.cluster.streaming import converse
from broker.peering.answers import LinkBroken
from protocol.errors import Internal, ShuttingDown
from protocol.names import topic_name
from protocol.peering.vocabulary import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from actors.ownership import Instance
    from broker.http.bodies import Holding
    from broker.http.conversation import Conversation
    from broker.peering.channels import Channel, ServedChannel

    Opens = Callable[[], Awaitable[Channel]]


async def serve_conversation(conversation: Conversation, channel: ServedChannel) -> None:
    """The owning process's end: ``conversation`` is what a WebSocket of its own would have behind it."""

    try:
        await channel.send(VOCABULARY.pack([list(each) for each in conversation.headers]))
        await converse(conversation, channel)
    finally:
        conversation.close()


class FrontStream:
    """A client's stream at a front end; a ``Conversation``.

    Args:
      opens: begins the conversation with the owning process.
      owner: what stands for that process.
    """

    def __init__(self, opens: Opens, owner: Instance, namespace: str, topic: str, held: Holding) -> None:
        topic_name(namespace, topic)
        self.headers: Sequence[tuple[str, str]] = ()
        self._opens = opens
        self._owner = owner
        self._held = held
        self._opened: AwayLeg | None = None

    async def opened(self) -> None:
        """As ``Conversation.opened`` says. The first that the owning process says are its headers."""
        try:
            channel = await self._opens()
            self._opened = AwayLeg(channel, self._owner, self._held)
            said = await channel.receive()
        except LinkBroken as broken:
            raise ShuttingDown("the daemon is not there any more") from broken
        if said is None:
            raise Internal("a stream ended as it began")
        self.headers = [(name, value) for name, value in VOCABULARY.unpack(said)]

    @property
    def _leg(self) -> AwayLeg:
        assert self._opened is not None  # whoever holds it has opened it
        return self._opened

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return self._leg.waiting

    @property
    def answered(self) -> int:
        """Requests that have been answered."""
        return self._leg.answered

    async def take(self, messages: Sequence[bytes]) -> None:
        """As ``Conversation.take`` says."""
        await self._leg.take(messages)

    async def answers(self) -> bytes | None:
        """As ``Conversation.answers`` says."""
        return await self._leg.answers()

    def finish(self) -> None:
        """As ``Conversation.finish`` says."""
        self._leg.finish()

    def close(self) -> None:
        """As ``Conversation.close`` says."""
        if self._opened is not None:
            self._opened.close()
        self._held.release()
