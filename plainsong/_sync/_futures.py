"""The future of one message, for threads: a ``concurrent.futures.Future`` at a tenth of the cost.

A standard future creates a lock and a condition, which is most of the cost of sending a small message. These futures
share one condition for all messages of a publisher, and are settled a batch at a time. The twin for tasks is
``plainsong/_async/_futures.py``.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from threading import Condition, RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from plainsong.messages import MessageId, MessageReceipt, Receipt, id_in
from plainsong.protocol.errors import PlainsongError
from plainsong.stream_queue import receipt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.producer_queue import Delivered
    from plainsong.protocol.requests import PublishResponse

T = TypeVar("T")
R = TypeVar("R")


class Settling(Condition):
    """The condition shared by the futures of one publisher, notified when any of them is settled."""

    def __init__(self) -> None:
        super().__init__(RLock())

    def renew(self) -> None:
        """For a forked child: a thread of the parent may hold the lock."""
        super().__init__(RLock())

    def wake_all(self) -> None:
        """Wakes all threads that wait for one of the futures."""
        with self:
            self.notify_all()


class _ListOnDemand:
    """A list attribute created on first access: few futures need theirs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> list[Any]:
        made: list[Any] = []
        vars(instance)[self._name] = made
        return made


class Settled(Future[T]):
    """The base of the futures of messages; subclasses define the result."""

    _state: str = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _waiters = _ListOnDemand()
    _done_callbacks = _ListOnDemand()
    #: Whether the caller has retrieved the outcome.
    retrieved = False

    def __init__(self, condition: Settling) -> None:
        self._condition = condition

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.lower()}>"

    def cancel(self) -> bool:
        """Always False: the message may already be under way."""
        return False

    def done(self) -> bool:
        """True if it is settled."""
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> T:
        """The result, once settled."""
        self._wait(timeout)
        if self._exception is not None:
            raise self._exception
        receipt, index = self._result
        return self._result_at(receipt, index)

    def _outcome(self) -> T:
        return self.result()

    def _result_at(self, receipt: Any, index: int) -> T:
        """The result of message ``index``, from the result of its request."""
        raise NotImplementedError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, once settled; None after a success."""
        self._wait(timeout)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Calls ``fn`` when it is settled, in a thread of the publisher; at once if it already is."""
        self.retrieved = True
        super().add_done_callback(fn)

    def _wait(self, timeout: float | None) -> None:
        self.retrieved = True
        if self._state == FINISHED:
            return
        with self._condition:
            if not self._condition.wait_for(self.done, timeout):
                raise TimeoutError


class Sent(Settled[MessageId]):
    """The future of a message.

    ``result(timeout)`` is its id once durable. It raises the error of a failure,
    whose ``outcome`` says whether the message is in the topic; ``TimeoutError`` if it is not settled in time. Works with ``concurrent.futures.wait`` and ``asyncio.wrap_future``. Cannot be cancelled.
    """

    def _result_at(self, receipt: Receipt, index: int) -> MessageId:
        return id_in(receipt, index)


class Produced(Settled[MessageReceipt]):
    """The future of a producer's message: as ``Sent``, but its result is a ``MessageReceipt``."""

    def _result_at(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class ProducedWhole(Settled[Receipt]):
    """The future of messages that a producer publishes in one request."""

    def _result_at(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(condition: Settling, futures: Iterable[Settled[Any]], outcome: Receipt | Delivered | PlainsongError) -> None:
    """Settles the futures of one batch, in order, and wakes the waiting threads."""
    listened = []
    is_error = isinstance(outcome, BaseException)
    with condition:
        for index, future in enumerate(futures):
            if is_error:
                future._exception = outcome  # type: ignore[assignment]
            else:
                future._result = (outcome, index)
            future._state = FINISHED
            if len(vars(future)) > 3:
                listened.append(future)
        condition.notify_all()
    for future in listened:
        for waiter in vars(future).get("_waiters", ()):
            if is_error:
                waiter.add_exception(future)
            else:
                waiter.add_result(future)
        if "_done_callbacks" in vars(future):
            future._invoke_callbacks()  # type: ignore[attr-defined]


class Ticket(Generic[R]):
    """The future of a stream's request.

    ``result(timeout)`` is its receipt, once it is durable (its ``PublishResponse``, under a write pointer). It raises
    the error of a failure, whose ``outcome`` says whether the request happened; ``TimeoutError`` without an answer in time.
    """

    __slots__ = ("_answer", "_condition", "messages", "number", "retrieved", "size")

    number: int
    size: int

    def __init__(self, condition: Settling, messages: int) -> None:
        self._condition = condition
        self._answer: Any = None
        self.messages = messages
        #: Whether the caller has retrieved the outcome.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<Ticket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """True if its outcome is known."""
        return self._answer is not None

    def result(self, timeout: float | None = None) -> R:
        """The receipt, once there is one."""
        outcome = self._outcome(timeout)
        if isinstance(outcome, PlainsongError):
            raise outcome
        return cast("R", outcome)

    def exception(self, timeout: float | None = None) -> PlainsongError | None:
        """The error, once the outcome is known; None after a success."""
        outcome = self._outcome(timeout)
        return outcome if isinstance(outcome, PlainsongError) else None

    def answered(self, status: int, fields: dict[str, Any]) -> None:
        """The daemon answered. The answer is decoded on retrieval."""
        self._answer = status, fields

    def _failure(self) -> PlainsongError:
        """The error of a request that failed. Does not count as retrieving it."""
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        return cast("PlainsongError", self._answer)

    def failed(self, error: PlainsongError) -> None:
        """The request will get no answer."""
        self._answer = error

    def _outcome(self, timeout: float | None) -> Receipt | PublishResponse | PlainsongError:
        self.retrieved = True
        if self._answer is None:
            with self._condition:
                if not self._condition.wait_for(self.done, timeout):
                    raise TimeoutError
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        return cast("Receipt | PublishResponse | PlainsongError", self._answer)
