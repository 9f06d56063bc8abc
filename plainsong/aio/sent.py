"""What becomes of one message, for those who may await it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from plainsong.core.outcomes import id_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import Any

    from plainsong.ids import MessageId
    from plainsong.messages import Receipt
    from protocol.errors import PlainsongError


class AsyncSent:
    """Await it for the id of the message, once it is durable (None when the daemon does not say it).

    It raises what went wrong, whose ``outcome`` says whether the message is in the topic. May be awaited by
    several tasks, several times, or not at all.
    """

    __slots__ = ("_error", "_event", "_index", "_receipt", "asked")

    def __init__(self) -> None:
        self._receipt: Receipt | None = None
        self._error: PlainsongError | None = None
        self._index = 0
        self._event: anyio.Event | None = None
        #: Whether anybody has asked what became of it.
        self.asked = False

    def __repr__(self) -> str:
        return f"<AsyncSent {'finished' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether it is settled."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[Any, Any, MessageId | None]:
        return self._wait().__await__()

    async def _wait(self) -> MessageId | None:
        self.asked = True
        if not self.done():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return id_in(self._receipt, self._index)


def settle(sents: Iterable[AsyncSent], outcome: Receipt | PlainsongError) -> None:
    """Settle what stands for the messages of one batch, in order, and wake whoever waits."""
    for index, sent in enumerate(sents):
        if isinstance(outcome, BaseException):
            sent._error = outcome
        else:
            sent._receipt, sent._index = outcome, index
        if sent._event is not None:
            sent._event.set()
