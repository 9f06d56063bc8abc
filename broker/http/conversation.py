"""A conversation: what stands behind one WebSocket, free of any server. Messages go in, answers come out, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from broker.http.bodies import BodyBudget, Holding
    from broker.http.settings import HttpSettings


class Conversation(Protocol):
    """Requests of one connection that are answered in their order. One task takes, another one answers."""

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """What its handshake is answered with besides; known once it is opened."""
        ...

    async def opened(self) -> None:
        """Opens it, before anything else is asked of it. Raises PlainsongError: it cannot be; close it all the same."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        ...

    @property
    def answered(self) -> int:
        """Requests that have been answered, refusals included."""
        ...

    async def take(self, messages: Sequence[bytes]) -> None:
        """Takes all requests of these messages; waits while too much is under way, which is the back-pressure.

        Raises:
          MalformedBody: something cannot be read; what stood before it has been taken.
        """
        ...

    async def answers(self) -> bytes | None:
        """The next answers, as soon as there are some; None once all is answered and no more is taken."""
        ...

    def finish(self) -> None:
        """Takes no more; what was taken is answered."""
        ...

    def close(self) -> None:
        """The connection has ended. What was taken still happens; nobody is told."""
        ...


#: Begins a conversation: namespace, topic, request id, and what its requests hold in memory until they are answered.
#: Raises ``PlainsongError`` for one that cannot be.
Begin: TypeAlias = Callable[[str, str, str, "Holding"], Conversation]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What all WebSockets of a server share."""

    begin: Begin
    settings: HttpSettings
    budget: BodyBudget
