"""Publishing without waiting, on an event loop: messages are gathered in a bounded buffer and sent by tasks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from plainsong.aio.sent import AsyncSent, settle
from plainsong.core.batches import attempt_of, bug_of, outcome_of
from plainsong.core.gathering import Batch, Bounds, Gathering, Lost
from plainsong.core.outcomes import Counts, DroppedMessage, Tally, tell_of_drops
from plainsong.errors import BufferFull, Closed, MessageDropped, NotSent
from plainsong.messages import Outgoing, parts_of
from plainsong.protocol.errors import InvalidParameter, PlainsongError
from plainsong.serializers import BYTES, SerializerLike, encoded, serializer_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from anyio.abc import TaskGroup

    from plainsong.core.effects import Answer, Failure, Send
    from plainsong.core.gathering import Overflow
    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt

log = logging.getLogger("plainsong.publisher")

#: After so many messages ``send`` lets others run, also when it need not wait.
BREATH = 256


class AsyncPublisher:
    """A buffer and the tasks that empty it; made by ``AsyncClient.publisher``, which explains the options.

    Only within ``async with``: its tasks live in that block. The order of calls of ``send`` is the order in the
    topic, for each topic, whatever is retried. A block that ends well, or by an error, is flushed (the latter
    for no longer than ``exit_timeout_s``); one that is cancelled gives up what waits, and says so in the log.
    """

    def __init__(
        self,
        operations: Operations,
        carry: Callable[[Send], Awaitable[Answer | Failure]],
        bounds: Bounds,
        *,
        topic: str | None,
        overflow: Overflow,
        connections: int,
        serializer: SerializerLike,
        on_drop: Callable[[DroppedMessage], object] | None,
        exit_timeout_s: float,
    ) -> None:
        self._operations = operations
        self._carry = carry
        self._bounds = bounds
        self._topic = topic
        self._overflow = overflow
        self._connections = connections
        self._serializer = serializer_for(serializer)
        self._as_it_is = self._serializer is BYTES
        self._on_drop = on_drop
        self._exit_timeout_s = exit_timeout_s
        self._tally = Tally[AsyncSent]()
        self._gathering: Gathering[AsyncSent] = Gathering(bounds, operations.random)
        self._tasks: TaskGroup | None = None
        self._senders = 0
        self._idle = 0
        self._work: anyio.Event | None = None
        self._progress: anyio.Event | None = None
        self._closed = True
        self._breath = 0

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._closed = False
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
            self._closed = True
            self._abandon(self._gathering.clear())
            under_way = self._gathering.pending
            self._tasks.cancel_scope.cancel()
            # The error, if any, is the block's own business: the tasks are gone, and it goes on.
            await self._tasks.__aexit__(None, None, None)
            if kind is not None and (failed is not None or under_way):
                left = failed or NotSent(0, under_way)
                log.warning("a block with a publisher was left by an error: %s", left.detail)
        if kind is None and failed is not None:
            raise failed

    # --- sending -------------------------------------------------------------------------------

    async def send(self, message: Any, *, topic: str | None = None) -> AsyncSent:
        """Hand over a message; what is returned may be awaited. Waits only for room, if ``overflow="wait"``.

        Args:
          message: what the serializer takes (bytes, if there is none), or an ``Outgoing`` around it.
          topic: where it goes; may be left out when the publisher was made for one.
        Raises:
          NotEncodable, BufferFull, Closed, InvalidParameter: nothing happened. In best effort never BufferFull.
        """
        self._breath += 1
        if self._breath % BREATH == 0:
            await anyio.lowlevel.checkpoint()
        if self._overflow != "wait":
            return self.send_nowait(message, topic=topic)
        while True:
            try:
                return self.send_nowait(message, topic=topic)
            except BufferFull:
                payload = message.value if type(message) is Outgoing else message
                if not self._gathering.fits(encoded(self._serializer, payload)):
                    raise
                await self._wait_for_progress()

    def send_nowait(self, message: Any, *, topic: str | None = None) -> AsyncSent:
        """As ``send``, but a full buffer raises BufferFull, unless messages are to be dropped."""
        ttl_s = attributes = None
        if type(message) is Outgoing:
            message, ttl_s, attributes = parts_of(message)
        payload = message if self._as_it_is and type(message) is bytes else encoded(self._serializer, message)
        name = topic or self._topic
        if name is None:
            raise InvalidParameter("no topic is named", hint="name it here, or when making the publisher")
        if self._closed:
            raise Closed("the publisher is closed", hint="use it within its async with block")
        sent = AsyncSent()
        lane = self._gathering.put(name, payload, ttl_s, sent, anyio.current_time(), attributes)
        if lane is None:
            return self._without_room(name, payload, sent)
        if self._gathering.wants_sender(lane):
            self._call_sender()
        return sent

    def _without_room(self, topic: str, payload: bytes, sent: AsyncSent) -> AsyncSent:
        full = self._gathering.full(payload)
        if self._overflow != "drop":
            raise full
        dropped = MessageDropped(full.detail, hint=full.hint)
        settle([sent], dropped)
        self._tally.dropped(1)
        tell_of_drops(self._on_drop, [DroppedMessage(topic, payload, dropped)])
        return sent

    # --- the end -------------------------------------------------------------------------------

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the buffer is empty, without lingering.

        Raises:
          NotSent: something is still waiting after ``timeout_s`` (None: no limit), or failed since the last
            flush and nobody awaited it. Nothing is given up by it. Never in best effort.
        """
        self._gathering.flushing = True
        self._call_sender()
        try:
            with anyio.move_on_after(timeout_s):
                while self._gathering.pending:
                    await self._wait_for_progress()
        finally:
            self._gathering.flushing = self._closed
        if self._bounds.mode == "reliable":
            self._tally.raise_if_unheard(self._gathering.pending)

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Flush, then give up what is left after ``timeout_s``. Idempotent.

        Args:
          timeout_s: None: as long as ``delivery_timeout_s`` allows; in best effort ``exit_timeout_s``.

        Raises:
          NotSent: as ``flush`` does; never in best effort.
        """
        if self._closed:
            return
        if timeout_s is None and self._bounds.mode == "best_effort":
            timeout_s = self._exit_timeout_s
        self._closed = True
        self._gathering.flushing = True
        self._call_sender()
        if self._progress is not None:
            self._progress.set()
        with anyio.move_on_after(timeout_s):
            while self._gathering.pending:
                await self._wait_for_progress()
        self._abandon(self._gathering.clear())
        if self._bounds.mode == "reliable":
            self._tally.raise_if_unheard(0, self._gathering.pending)

    @property
    def counts(self) -> Counts:
        """Messages that wait, were delivered, failed or were dropped so far."""
        return self._tally.counts(self._gathering.pending, self._gathering.pending_bytes)

    # --- the tasks -----------------------------------------------------------------------------

    def _call_sender(self) -> None:
        """Wake those that sleep, or start another."""
        if self._idle and self._work is not None:
            self._work.set()
        elif self._senders < self._connections and self._tasks is not None:
            self._senders += 1
            self._tasks.start_soon(self._run)

    async def _wait_for_progress(self) -> None:
        if self._progress is None or self._progress.is_set():
            self._progress = anyio.Event()
        await self._progress.wait()
        if self._closed and not self._gathering.flushing:
            raise Closed("the publisher was closed while this message waited for room")

    async def _run(self) -> None:
        gathering = self._gathering
        while True:
            now_s = anyio.current_time()
            self._abandon(gathering.overdue(now_s))
            batch = gathering.take(now_s)
            if batch is not None:
                if gathering.has_ready(now_s):
                    self._call_sender()
                await self._deliver(batch)
            else:
                await self._wait_for_work(gathering.next_s(), now_s)

    async def _wait_for_work(self, until_s: float | None, now_s: float) -> None:
        if self._work is None or self._work.is_set():
            self._work = anyio.Event()
        self._idle += 1
        try:
            with anyio.move_on_after(None if until_s is None else max(0.0, until_s - now_s)):
                await self._work.wait()
        finally:
            self._idle -= 1

    async def _deliver(self, batch: Batch[AsyncSent]) -> None:
        try:
            receipt, error = await self._attempt(batch)
        except BaseException:
            given_up = MessageDropped("the publisher was cancelled under way", outcome="unknown")
            self._abandon([self._gathering.abandoned(batch, given_up)])
            raise
        if error is not None:
            lost = self._gathering.failed(batch, error, anyio.current_time())
            self._abandon([] if lost is None else [lost])
            return
        assert receipt is not None
        self._gathering.settled(batch)
        self._tally.delivered(len(batch.items))
        settle([item.sent for item in batch.items], receipt)
        self._tell_of_progress()

    async def _attempt(self, batch: Batch[AsyncSent]) -> tuple[Receipt | None, PlainsongError | None]:
        try:
            left_s = self._gathering.left_s(batch, anyio.current_time())
            send, call = attempt_of(self._operations, batch, left_s)
            return outcome_of(self._operations, call, await self._carry(send), send.url)
        except PlainsongError as error:
            return None, error
        except Exception as bug:  # would end the user's block
            log.exception("a request could not be made")
            return None, bug_of(bug)

    def _abandon(self, given_up: list[Lost[AsyncSent]]) -> None:
        """Tell those who wait, the tally and ``on_drop``."""
        for lost in given_up:
            settle([item.sent for item in lost.items], lost.error)
            if self._bounds.mode == "reliable":
                self._tally.failed([item.sent for item in lost.items], lost.error)
                continue
            self._tally.dropped(len(lost.items))
            tell_of_drops(self._on_drop, [DroppedMessage(lost.topic, item.payload, lost.error) for item in lost.items])
        if given_up:
            self._tell_of_progress()

    def _tell_of_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
