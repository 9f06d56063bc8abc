"""The future of one message, for threads: a ``concurrent.futures.Future`` at a tenth of the price.

An ordinary one makes a lock and a condition of its own, which is most of what sending a small message costs.
These share one condition among all messages of a publisher, and are settled a batch at a time. The twin for tasks is
``plainsong/_async/_futures.py``.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from threading import Condition, RLock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plainsong.messages import MessageId, MessageReceipt, Receipt, id_in
from plainsong.protocol.errors import PlainsongError
from plainsong.streaming import receipt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.producing import Delivered
    from plainsong.protocol.requests import PublishResponse

T = TypeVar("T")


class Settling(Condition):
    """The condition that the futures of one publisher share: notified whenever some of them are settled."""

    def __init__(self) -> None:
        super().__init__(RLock())

    def renew(self) -> None:
        """In a forked child: a thread of the parent may hold the lock."""
        super().__init__(RLock())

    def wake_all(self) -> None:
        """Something was settled."""
        with self:
            self.notify_all()


class _ListOnDemand:
    """A list that is made when somebody first looks for it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> list[Any]:
        made: list[Any] = []
        vars(instance)[self._name] = made
        return made


class Settled(Future[T]):
    """What all of these futures have in common; what a result is, each of them says."""

    _state: str = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _waiters = _ListOnDemand()
    _done_callbacks = _ListOnDemand()
    #: Whether anybody has asked what became of it.
    retrieved = False

    def __init__(self, condition: Settling) -> None:
        self._condition = condition

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.lower()}>"

    def cancel(self) -> bool:
        """Always False: what was sent may be on its way."""
        return False

    def done(self) -> bool:
        """Whether it is settled."""
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> T:
        """What became of it, once it is settled."""
        self._wait(timeout)
        if self._exception is not None:
            raise self._exception
        receipt, index = self._result
        return self._result_at(receipt, index)

    def _outcome(self) -> T:
        return self.result()

    def _result_at(self, receipt: Any, index: int) -> T:
        """The result, in what was said of the whole request."""
        raise NotImplementedError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, once it is settled; None: nothing."""
        self._wait(timeout)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn`` when it is settled, in a thread of the publisher; at once, when it is already."""
        self.retrieved = True
        super().add_done_callback(fn)

    def _wait(self, timeout: float | None) -> None:
        self.retrieved = True
        if self._state == FINISHED:
            return
        with self._condition:
            if not self._condition.wait_for(self.done, timeout):
                raise TimeoutError


class Sent(Settled[MessageId | None]):
    """What becomes of a message.

    ``result(timeout)`` is its id once it is durable; None when the daemon does not say it. It raises what went
    wrong, whose ``outcome`` says whether the message is in the topic; ``TimeoutError`` when it is not settled
    in time. Works with ``concurrent.futures.wait`` and ``asyncio.wrap_future``. Cannot be cancelled.
    """

    def _result_at(self, receipt: Receipt, index: int) -> MessageId | None:
        return id_in(receipt, index)


class Produced(Settled[MessageReceipt]):
    """What becomes of a message of a producer: as ``Sent``, but the result is a ``MessageReceipt``."""

    def _result_at(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class ProducedWhole(Settled[Receipt]):
    """What becomes of messages that a producer sends together."""

    def _result_at(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(condition: Settling, futures: Iterable[Settled[Any]], outcome: Receipt | Delivered | PlainsongError) -> None:
    """Settle the futures of one batch, in order, and tell whoever waits."""
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


class Ticket:
    """What becomes of one request of a stream.

    ``result(timeout)`` is its receipt, once it is durable (its ``PublishResponse``, under a write pointer). It raises
    what went wrong, whose ``outcome`` says whether the request happened; ``TimeoutError`` when there is no answer yet.
    """

    __slots__ = ("_answer", "_condition", "messages", "number", "retrieved", "size")

    number: int
    size: int

    def __init__(self, condition: Settling, messages: int) -> None:
        self._condition = condition
        self._answer: Any = None
        self.messages = messages
        #: Whether anybody has asked what became of it.
        self.retrieved = False

    def __repr__(self) -> str:
        return f"<Ticket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether its fate is known."""
        return self._answer is not None

    def result(self, timeout: float | None = None) -> Receipt | PublishResponse:
        """The receipt, once there is one."""
        outcome = self._outcome(timeout)
        if isinstance(outcome, PlainsongError):
            raise outcome
        return outcome

    def exception(self, timeout: float | None = None) -> PlainsongError | None:
        """What went wrong, once its fate is known; None: nothing."""
        outcome = self._outcome(timeout)
        return outcome if isinstance(outcome, PlainsongError) else None

    def answered(self, status: int, fields: dict[str, Any]) -> None:
        """There is an answer; whoever reads it takes it apart."""
        self._answer = status, fields

    def failed(self, error: PlainsongError) -> None:
        """There will be none."""
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
