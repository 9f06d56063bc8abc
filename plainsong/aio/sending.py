"""The task of a producer: one request at a time, in order, until each has come to its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio

from plainsong.aio.sent import AsyncSettled, settle
from plainsong.core.batches import bug_of
from plainsong.errors import Closed, MessageDropped, NotSent
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from anyio.abc import TaskGroup

    from plainsong.core.effects import Steps
    from plainsong.core.gathering import Overflow
    from plainsong.core.producing.producing import Producing
    from plainsong.core.producing.session import Session
    from plainsong.core.producing.waiting import Ended, Parcel, Waiting

log = logging.getLogger("plainsong.producer")

#: After so many messages ``send`` lets others run, also when it need not wait.
BREATH = 256


class AsyncSending:
    """What a producer does behind the calls of its users: opening, waiting for room, delivering, coming to an end.

    Args:
      run: carries steps out.
      opening, begun: steps that open the session, and what to make of it.
    """

    def __init__(
        self,
        run: Callable[[Any], Awaitable[Any]],
        opening: Steps[Session],
        begun: Callable[[Session], Producing[AsyncSettled[Any]]],
        *,
        overflow: Overflow,
        exit_timeout_s: float,
    ) -> None:
        self._run_steps = run
        self._opening: Steps[Session] | None = opening
        self._begun = begun
        self._opened: Producing[AsyncSettled[Any]] | None = None
        self._overflow = overflow
        self._exit_timeout_s = exit_timeout_s
        self._tasks: TaskGroup | None = None
        self._work: anyio.Event | None = None
        self._progress: anyio.Event | None = None
        self._breath = 0

    @property
    def _producing(self) -> Producing[AsyncSettled[Any]]:
        """Raises Closed: the block has not been entered."""
        if self._opened is None:
            raise Closed("the producer is not open", hint="use it within its async with block")
        return self._opened

    @property
    def _waiting(self) -> Waiting[AsyncSettled[Any]]:
        return self._producing.waiting

    async def __aenter__(self) -> Self:
        opening, self._opening = self._opening, None
        if opening is None:
            raise Closed("the producer was opened before", hint="ask the client for another one")
        self._opened = self._begun(await self._run_steps(opening))
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        assert self._tasks is not None
        failed: NotSent | None = None
        try:
            if kind is None:
                await self.aclose()
            elif issubclass(kind, Exception):
                await self.aclose(self._exit_timeout_s)
        except NotSent as not_sent:
            failed = not_sent
        finally:
            self._producing.closed = True
            self._producing.abort_open()
            self._give_up(self._waiting.clear())
            under_way = self._waiting.pending
            self._tasks.cancel_scope.cancel()
            # The error, if any, is the block's own business: the task is gone, and it goes on.
            await self._tasks.__aexit__(None, None, None)
            if kind is not None and (failed is not None or under_way):
                log.warning(
                    "a block with a producer was left by an error: %s", (failed or NotSent(0, under_way)).detail
                )
        if kind is None and failed is not None:
            raise failed

    # --- the end -------------------------------------------------------------------------------

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is durable, without lingering.

        Raises:
          NotSent: something still waits after ``timeout_s`` (None: no limit), or failed since the last flush and
            nobody awaited it. Nothing is given up by it.
        """
        await self._wait_until_empty(timeout_s)
        self._producing.tally.raise_if_unheard(self._waiting.pending)

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Abort an open transaction, flush, and give up what is left after ``timeout_s``. Idempotent.

        The name stays known to the topic, so that the next producer of it goes on.

        Raises:
          NotSent: as ``flush`` does.
        """
        if self._producing.closed:
            return
        self._producing.abort_open()
        self._producing.closed = True
        self._tell_of_progress()
        await self._wait_until_empty(timeout_s)
        self._give_up(self._waiting.clear())
        self._producing.tally.raise_if_unheard(0, self._waiting.pending)

    async def _wait_until_empty(self, timeout_s: float | None) -> None:
        self._waiting.flushing = True
        self._call_sender()
        try:
            with anyio.move_on_after(timeout_s):
                while self._waiting.pending:
                    await self._wait_for_progress()
        finally:
            self._waiting.flushing = self._producing.closed

    # --- the task ------------------------------------------------------------------------------

    async def _wait_for_room(self, size: int, messages: int) -> None:
        """Raises BufferFull, and why nothing is taken any more."""
        self._producing.check_usable()
        while not self._waiting.has_room(size, messages):
            if self._overflow != "wait":
                raise self._waiting.full(size)
            await self._wait_for_progress()
            self._producing.check_usable()

    def _call_sender(self) -> None:
        if self._work is not None:
            self._work.set()

    def _tell_of_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()

    async def _wait_for_progress(self) -> None:
        if self._progress is None or self._progress.is_set():
            self._progress = anyio.Event()
        await self._progress.wait()

    async def _run(self) -> None:
        while True:
            now_s = anyio.current_time()
            parcel, ended = self._producing.work(now_s)
            self._give_up(ended)
            if parcel is not None:
                assert self._tasks is not None  # this is one of them
                self._tasks.start_soon(self._deliver, parcel)  # meanwhile others may have waited too long
                continue
            until_s = self._producing.next_s()
            self._work = anyio.Event()
            with anyio.move_on_after(None if until_s is None else max(0.0, until_s - now_s)):
                await self._work.wait()

    async def _deliver(self, parcel: Parcel[AsyncSettled[Any]]) -> None:
        try:
            delivered = await self._run_steps(self._producing.steps(parcel))
        except PlainsongError as error:
            self._give_up(self._producing.failed(parcel, error))
        except Exception as bug:  # would end the user's block
            log.exception("a request could not be made")
            told = bug_of(bug)
            told.outcome = "unknown"
            self._give_up(self._producing.failed(parcel, told))
        except BaseException:
            given_up = MessageDropped("the producer was cancelled under way", outcome="unknown")
            self._give_up(self._producing.failed(parcel, given_up))
            raise
        else:
            ended = self._producing.delivered(parcel)
            settle(parcel.sents, delivered)
            self._give_up(ended)
        self._tell_of_progress()
        self._call_sender()

    def _give_up(self, ended: list[Ended[AsyncSettled[Any]]]) -> None:
        """Tell those who wait, and the tally."""
        for each in ended:
            settle(each.sents, each.error)
            self._producing.tally.failed(list(each.sents), each.error)
        if ended:
            self._tell_of_progress()
