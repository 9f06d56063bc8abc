"""What becomes of one message, for tasks that may await it. ``plainsong/_sync/_futures.py`` is its twin for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from plainsong.messages import id_in
from plainsong.protocol.errors import PlainsongError
from plainsong.streaming import receipt_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from plainsong.messages import MessageId, MessageReceipt, Receipt
    from plainsong.producing import Delivered
    from plainsong.protocol.requests import PublishResponse

T = TypeVar("T")


class Settling:
    """What the futures of one publisher share: nothing, since each wakes its own tasks."""

    def renew(self) -> None:
        """In a forked child."""

    def wake_all(self) -> None:
        """Something was settled."""


class AsyncSettled(Generic[T]):
    """What those that stand for messages have in common; what awaiting them gives, each of them says."""

    __slots__ = ("_error", "_event", "_index", "_receipt", "retrieved")

    def __init__(self, settling: Settling) -> None:
        self._receipt: Any = None
        self._error: PlainsongError | None = None
        self._index = 0
        self._event: anyio.Event | None = None
        #: Whether anybody has asked what became of it.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'finished' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether it is settled."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._outcome().__await__()

    async def _outcome(self) -> T:
        """What became of it, once it is settled."""
        self.retrieved = True
        if not self.done():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._result_at(self._receipt, self._index)

    def _result_at(self, receipt: Any, index: int) -> T:
        """The result, in what was said of the whole request."""
        raise NotImplementedError


class AsyncSent(AsyncSettled["MessageId | None"]):
    """Await it for the id of the message, once it is durable (None when the daemon does not say it).

    It raises what went wrong, whose ``outcome`` says whether the message is in the topic. May be awaited by
    several tasks, several times, or not at all.
    """

    __slots__ = ()

    def _result_at(self, receipt: Receipt, index: int) -> MessageId | None:
        return id_in(receipt, index)


class AsyncProduced(AsyncSettled["MessageReceipt"]):
    """What becomes of a message of a producer: as ``AsyncSent``, but awaiting it gives a ``MessageReceipt``."""

    __slots__ = ()

    def _result_at(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class AsyncProducedWhole(AsyncSettled["Receipt"]):
    """What becomes of messages that a producer sends together."""

    __slots__ = ()

    def _result_at(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(
    settling: Settling, futures: Iterable[AsyncSettled[Any]], outcome: Receipt | Delivered | PlainsongError
) -> None:
    """Settle what stands for the messages of one batch, in order, and wake whoever waits."""
    for index, future in enumerate(futures):
        if isinstance(outcome, BaseException):
            future._error = outcome
        else:
            future._receipt, future._index = outcome, index
        if future._event is not None:
            future._event.set()


class AsyncTicket:
    """What becomes of one request of a stream; await it for its receipt, once it is durable.

    It raises what went wrong, whose ``outcome`` says whether the request happened. May be awaited by several tasks,
    several times, or not at all.
    """

    __slots__ = ("_answer", "_event", "messages", "number", "retrieved", "size")

    number: int
    size: int

    def __init__(self, settling: Settling, messages: int) -> None:
        self._answer: Any = None
        self._event: anyio.Event | None = None
        self.messages = messages
        #: Whether anybody has asked what became of it.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<AsyncTicket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether its fate is known."""
        return self._answer is not None

    def answered(self, status: int, fields: dict[str, Any]) -> None:
        """There is an answer; whoever reads it takes it apart."""
        self._answer = status, fields
        if self._event is not None:
            self._event.set()

    def failed(self, error: PlainsongError) -> None:
        """There will be none."""
        self._answer = error
        if self._event is not None:
            self._event.set()

    def __await__(self) -> Generator[Any, Any, Receipt | PublishResponse]:
        return self._wait().__await__()

    async def _wait(self) -> Receipt | PublishResponse:
        self.retrieved = True
        if self._answer is None:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        if isinstance(self._answer, PlainsongError):
            raise self._answer
        return cast("Receipt | PublishResponse", self._answer)
