"""The future of one message: a ``concurrent.futures.Future`` at a tenth of the price.

An ordinary one makes a lock and a condition of its own, which is most of what sending a small message costs.
These share one condition among all messages of a publisher, and are settled a batch at a time.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.core.outcomes import id_in
from plainsong.core.producing.receipts import MessageReceipt
from plainsong.ids import MessageId
from plainsong.messages import Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from threading import Condition

    from plainsong.core.producing.receipts import Delivered
    from plainsong.protocol.errors import PlainsongError

T = TypeVar("T")


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
    asked = False

    def __init__(self, condition: Condition) -> None:
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
        return self._told(receipt, index)

    def _told(self, receipt: Any, index: int) -> T:
        """The result, in what was said of the whole request."""
        raise NotImplementedError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, once it is settled; None: nothing."""
        self._wait(timeout)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn`` when it is settled, in a thread of the publisher; at once, when it is already."""
        self.asked = True
        super().add_done_callback(fn)

    def _wait(self, timeout: float | None) -> None:
        self.asked = True
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

    def _told(self, receipt: Receipt, index: int) -> MessageId | None:
        return id_in(receipt, index)


class Produced(Settled[MessageReceipt]):
    """What becomes of a message of a producer: as ``Sent``, but the result is a ``MessageReceipt``."""

    def _told(self, receipt: Delivered, index: int) -> MessageReceipt:
        return receipt.of(index)


class ProducedWhole(Settled[Receipt]):
    """What becomes of messages that a producer sends together."""

    def _told(self, receipt: Delivered, index: int) -> Receipt:
        return receipt.whole()


def settle(condition: Condition, sents: Iterable[Settled[Any]], outcome: Receipt | Delivered | PlainsongError) -> None:
    """Settle the futures of one batch, in order, and tell whoever waits."""
    listened = []
    is_error = isinstance(outcome, BaseException)
    with condition:
        for index, sent in enumerate(sents):
            if is_error:
                sent._exception = outcome  # type: ignore[assignment]
            else:
                sent._result = (outcome, index)
            sent._state = FINISHED
            if len(vars(sent)) > 3:
                listened.append(sent)
        condition.notify_all()
    for sent in listened:
        for waiter in vars(sent).get("_waiters", ()):
            if is_error:
                waiter.add_exception(sent)
            else:
                waiter.add_result(sent)
        if "_done_callbacks" in vars(sent):
            sent._invoke_callbacks()  # type: ignore[attr-defined]
