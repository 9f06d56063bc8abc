"""Awaitable futures of messages and requests. ``plainsong/_sync/_futures.py`` is the twin for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from plainsong.messages import id_in
from plainsong.protocol.errors import PlainsongError
from plainsong.stream_queue import receipt_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from plainsong.messages import MessageId, MessageReceipt, Receipt
    from plainsong.producer_queue import Delivered

T = TypeVar("T")
R = TypeVar("R")


class Settling:
    """Shared state of a publisher's futures: none here, since each wakes its own tasks."""

    def renew(self) -> None:
        """For forked children of the synchronous client."""

    def wake_all(self) -> None:
        """Nothing to do: each future wakes its own tasks."""


class AsyncSettled(Generic[T]):
    """The base of the futures of messages; subclasses define the result."""

    __slots__ = ("_error", "_event", "_index", "_receipt", "retrieved")

    def __init__(self, settling: Settling) -> None:
        self._receipt: Any = None
        self._error: PlainsongError | None = None
        self._index = 0
        self._event: anyio.Event | None = None
        #: True once the caller has retrieved the outcome.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'finished' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """True if it is settled."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._outcome().__await__()

    async def _outcome(self) -> T:
        """The result, once settled."""
        self.retrieved = True
        if not self.done():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._result_at(self._receipt, self._index)

    def _result_at(self, receipt: Any, index: int) -> T:
        """The result of message ``index``, from the result of its request."""
        raise NotImplementedError


class AsyncSent(AsyncSettled["MessageId"]):
    """The future of a message: its id, once durable.

    Awaiting it raises the error of a failure, whose ``outcome`` says whether the message is in the topic. Several tasks
    may await it, several times, or not at all.
    """

    __slots__ = ()

    def _result_at(self, receipt: Receipt, index: int) -> MessageId:
        return id_in(receipt, index)


class AsyncProduced(AsyncSettled["MessageReceipt"]):
    """The future of a producer's message: as ``AsyncSent``, but its result is a ``MessageReceipt``."""

    __slots__ = ()

    def _result_at(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class AsyncProducedWhole(AsyncSettled["Receipt"]):
    """The future of messages that a producer publishes in one request."""

    __slots__ = ()

    def _result_at(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(
    settling: Settling, futures: Iterable[AsyncSettled[Any]], outcome: Receipt | Delivered | PlainsongError
) -> None:
    """Settles the futures of one batch, in order, and wakes the waiting tasks."""
    for index, future in enumerate(futures):
        if isinstance(outcome, BaseException):
            future._error = outcome
        else:
            future._receipt, future._index = outcome, index
        if future._event is not None:
            future._event.set()


class AsyncTicket(Generic[R]):
    """The future of a stream's request: its receipt, once durable.

    Awaiting it raises the error of a failure, whose ``outcome`` says whether the request happened. Several tasks may
    await it, several times, or not at all.
    """

    __slots__ = ("_answer", "_event", "messages", "number", "retrieved", "size")

    number: int
    size: int

    def __init__(self, settling: Settling, messages: int) -> None:
        self._answer: Any = None
        self._event: anyio.Event | None = None
        self.messages = messages
        #: True once the caller has retrieved the outcome.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<AsyncTicket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """True if its outcome is known."""
        return self._answer is not None

    def answered(self, status: int, fields: dict[str, Any]) -> None:
        """The daemon answered. The answer is decoded on retrieval."""
        self._answer = status, fields
        if self._event is not None:
            self._event.set()

    def _failure(self) -> PlainsongError:
        """The error of a request that failed. Does not count as retrieving it."""
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        return cast("PlainsongError", self._answer)

    def failed(self, error: PlainsongError) -> None:
        """The request will get no answer."""
        self._answer = error
        if self._event is not None:
            self._event.set()

    def __await__(self) -> Generator[Any, Any, R]:
        return self._wait().__await__()

    async def _wait(self) -> R:
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
        return cast("R", self._answer)
