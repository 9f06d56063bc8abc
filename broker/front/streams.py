"""Streams of publishes through a front end: both ends of the conversation that carries one to the owning process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from broker.cluster.away import AwayLeg
from broker.cluster.streaming import ANSWERED
from protocol.errors import MalformedBody
from protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from actors.ownership import Instance
    from broker.http.bodies import Holding
    from broker.http.conversation import Conversation
    from broker.peering.link import Channel
    from broker.peering.serving import ServedChannel

    Opens = Callable[[], Awaitable[Channel]]


async def serve_conversation(conversation: Conversation, channel: ServedChannel) -> None:
    """The owning process's end: ``conversation`` is what a WebSocket of its own would have behind it."""

    async def take() -> None:
        with suppress(MalformedBody):  # the front end has read it, too, and says so to the client
            while (message := await channel.receive()) is not None:
                await conversation.take([message])
        conversation.finish()

    channel.accept()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            while (answers := await conversation.answers()) is not None:
                await channel.send(ANSWERED.pack(conversation.answered) + answers)
            nursery.cancel_scope.cancel()
    finally:
        conversation.close()


class FrontStream:
    """A client's stream at a front end; a ``Conversation``.

    Args:
      opens: begins the conversation with the owning process, at the first request.
      owner: what stands for that process.
    """

    headers: Sequence[tuple[str, str]] = ()

    def __init__(self, opens: Opens, owner: Instance, namespace: str, topic: str, held: Holding) -> None:
        topic_name(namespace, topic)
        self._opens = opens
        self._owner = owner
        self._held = held
        self._leg: AwayLeg | None = None
        self._finished = False
        self._changed = trio.Event()

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return self._leg is not None and self._leg.waiting

    @property
    def answered(self) -> int:
        """Requests that have been answered."""
        return 0 if self._leg is None else self._leg.answered

    async def take(self, messages: Sequence[bytes]) -> None:
        """As ``Conversation.take`` says."""
        if self._leg is None and not self._finished:
            self._leg = AwayLeg(await self._opens(), self._owner, self._held)
            self._changed.set()
            if self._finished:
                self._leg.finish()
        if self._leg is not None:
            await self._leg.take(messages)

    async def answers(self) -> bytes | None:
        """As ``Conversation.answers`` says."""
        while self._leg is None:
            if self._finished:
                return None
            self._changed = trio.Event()
            await self._changed.wait()
        return await self._leg.answers()

    def finish(self) -> None:
        """As ``Conversation.finish`` says."""
        self._finished = True
        if self._leg is not None:
            self._leg.finish()
        self._changed.set()

    def close(self) -> None:
        """As ``Conversation.close`` says."""
        self.finish()
        if self._leg is not None:
            self._leg.close()
        self._held.release()
