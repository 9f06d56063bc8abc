"""One call of a link: its answer, the error instead of one, and whoever waits for either."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from broker.http.exchange import BodyStream
    from broker.peering.flow import Inflow, Outflow


class LinkBroken(Exception):
    """There is no answer, and will be none over this link.

    ``sent``: whether the peer may have got the request; False means that it certainly has not.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer: a value, and a body, whole or to be read as it comes. Whoever gets a stream closes it."""

    value: Any = None
    body: bytes | BodyStream = b""


class Waiting:
    """One call, and the task that waits for its answer."""

    __slots__ = ("answer", "inflow", "outflow", "pieces", "place", "size", "task", "value")

    def __init__(self, size: int) -> None:
        self.size = size
        #: Of its last frame, after which the peer has all it needs to act.
        self.place: float = inf
        self.task: trio.lowlevel.Task | None = None
        self.answer: Any = None
        #: Of an answer that comes in pieces and is had as one.
        self.value: Any = None
        self.pieces: list[bytes] | None = None
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None

    def settle(self, answer: Any) -> None:
        """Gives the answer, or the exception instead of one. Only the first counts."""
        if self.answer is None:
            self.answer = answer
            if self.task is not None:
                trio.lowlevel.reschedule(self.task)
                self.task = None

    async def wait(self) -> Any:
        """The answer; raises what came instead."""
        if self.answer is None:
            self.task = trio.lowlevel.current_task()

            def abort(_: object) -> trio.lowlevel.Abort:
                self.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer
