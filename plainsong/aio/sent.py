"""What becomes of one message, for those who may await it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from plainsong.core.outcomes import id_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from plainsong.core.producing.receipts import Delivered, MessageReceipt
    from plainsong.ids import MessageId
    from plainsong.messages import Receipt
    from plainsong.protocol.errors import PlainsongError

T = TypeVar("T")


class AsyncSettled(Generic[T]):
    """What those that stand for messages have in common; what awaiting them gives, each of them says."""

    __slots__ = ("_error", "_event", "_index", "_receipt", "asked")

    def __init__(self) -> None:
        self._receipt: Any = None
        self._error: PlainsongError | None = None
        self._index = 0
        self._event: anyio.Event | None = None
        #: Whether anybody has asked what became of it.
        self.asked = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'finished' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether it is settled."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self.asked = True
        if not self.done():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._told(self._receipt, self._index)

    def _told(self, receipt: Any, index: int) -> T:
        """The result, in what was said of the whole request."""
        raise NotImplementedError


class AsyncSent(AsyncSettled["MessageId | None"]):
    """Await it for the id of the message, once it is durable (None when the daemon does not say it).

    It raises what went wrong, whose ``outcome`` says whether the message is in the topic. May be awaited by
    several tasks, several times, or not at all.
    """

    __slots__ = ()

    def _told(self, receipt: Receipt, index: int) -> MessageId | None:
        return id_in(receipt, index)


class AsyncProduced(AsyncSettled["MessageReceipt"]):
    """What becomes of a message of a producer: as ``AsyncSent``, but awaiting it gives a ``MessageReceipt``."""

    __slots__ = ()

    def _told(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class AsyncProducedWhole(AsyncSettled["Receipt"]):
    """What becomes of messages that a producer sends together."""

    __slots__ = ()

    def _told(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(sents: Iterable[AsyncSettled[Any]], outcome: Receipt | Delivered | PlainsongError) -> None:
    """Settle what stands for the messages of one batch, in order, and wake whoever waits."""
    for index, sent in enumerate(sents):
        if isinstance(outcome, BaseException):
            sent._error = outcome
        else:
            sent._receipt, sent._index = outcome, index
        if sent._event is not None:
            sent._event.set()
