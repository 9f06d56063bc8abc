"""Readers: the position in each topic, the topic to poll next, when to wait, and when to save.

Topics that have more messages are polled one by one, in turn. When all are at their end and the reader follows, one poll
waits for all of them. A position moves only past messages that the loop has finished. Inside a transaction the polls read
its snapshot, its end saves the position, and reading stops early enough to leave time for the commit.
"""

from __future__ import annotations

import logging
from collections import deque
from fnmatch import fnmatchcase
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from plainsong import calls, tracing
from plainsong._async._backend import Messages, ReaderStop, is_running, now, run_blocking, run_from_worker, shielded
from plainsong.errors import Closed, DeadlineExceeded
from plainsong.messages import Origin, passed_rows
from plainsong.positions import WILD, PageBytes, Plan, Track, is_inclusive
from plainsong.protocol import ids
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import (
    InvalidParameter,
    PlainsongError,
    TopicNotFound,
    TransactionsUnavailable,
    Unavailable,
)
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PollRequest
from plainsong.retry import PAUSES_S, ReaderStopped, pause_after
from plainsong.serializers import V

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Self

    from plainsong._async.retry import AsyncChannel
    from plainsong.messages import Message, Page
    from plainsong.positions import Position, Start
    from plainsong.protocol.page import Held
    from plainsong.protocol.requests import Isolation
    from plainsong.transactions import Transaction

T = TypeVar("T")

log = logging.getLogger("plainsong.reader")

#: How long a save may take when an exception or a cancellation leaves the block.
_LAST_SAVE_S = 5.0
#: How long one poll waits for new messages.
WAIT_MS = 30_000


#: How often a pattern is matched against the existing topics.
REFRESH_S = 10.0


#: How long a follower of committed messages waits for the transaction service to return.
UNAVAILABLE_S = 60.0


#: How long a reader of several topics waits for each of them inside a transaction.
TURN_MS = 1_000


#: How much longer than its wait the last poll before a time-out may take. For ``get`` it grows if answers take longer.
GRACE_S = 0.25


#: The page with which ``get`` ends its wait: None instead of a message.
NOTHING: Any = [None]


#: Topics that one waiting poll can name, as docs/http.md says.
MAX_TOPICS = 1_000


class BlockingChannel:
    """The daemon for positions: each call blocks its thread until the answer."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self.namespace = channel.namespace

    def call(self, call: calls.Call[T]) -> T:
        """The answer, after as many attempts as are allowed."""
        answer: T = run_from_worker(self._channel.call, call)
        return answer


class AsyncReading:
    """A reader's place in each topic, and the messages its loop has finished.

    Args:
      transaction: returns the surrounding transaction, which a checkpoint replaces.
    """

    def __init__(
        self,
        channel: AsyncChannel,
        plan: Plan,
        position: Position | None,
        transaction: Callable[[], Transaction] | None = None,
    ) -> None:
        for topic in plan.topics:
            if not WILD & set(topic):
                topic_name(channel.namespace, topic)
        self.stop = ReaderStop()
        # A following reader waits for an unreachable daemon without a deadline. Its last save has one, and ignores ``stop``.
        self._channel = channel.for_reader(self.stop, endless=plan.follow and transaction is None)
        self._bounded = channel
        self._plan = plan
        self._position = position
        self._transaction = transaction
        self.keeps_position = position is not None
        self.is_inside = transaction is not None
        self.closed = False
        #: The message that the loop has not finished yet.
        self.at_hand: Message[Any] | None = None
        self._done: dict[str, bytes] = {}
        self._done_messages = 0
        self._saved_s: float | None = None
        self._turns: deque[Track] = deque()
        self._left = plan.limit
        self._begun = False
        self._refresh_s = 0.0
        self._has_answer = False
        #: When a poll was first refused for lack of the transaction service, after the last answer.
        self._refused_s: float | None = None
        self._backoff = Backoff(PAUSES_S, channel.random)
        #: When ``get`` gives up waiting.
        self._get_until_s = inf
        self._get_grace_s = GRACE_S
        #: True if ``get`` has asked the daemon, which it does once even if its time is over. True between calls of ``get``.
        self._has_asked = True
        self._idle_until_s = inf
        self._page: list[Message[Any]] = []
        self._page_bytes = PageBytes()

    # --- pages ---------------------------------------------------------------------------------

    async def next_page(self) -> Sequence[Message[Any]] | None:
        """The next messages; ``NOTHING`` when the time of ``get`` is over; None at the end.

        Raises:
          PlainsongError: messages not yet returned will be read again.
        """
        self._idle(begins=False)
        try:
            if not self._begun:
                await self._begin()
            while (self._left is None or self._left > 0) and not self.is_time_up() and not self.stop.is_set:
                track = self._next_track()
                if track is None and not self._plan.follow:
                    return None
                self._idle(begins=track is None)
                if track is None and self._has_asked and self._is_over():
                    return self._nothing()
                self._has_asked = True
                try:
                    messages = await self._fetch(track)
                    self._has_answer, self._refused_s = True, None
                    # If this answer was later than that, keep the longer limit: the next one may be as late.
                    if self._channel.now() <= self._get_until_s + GRACE_S:
                        self._get_grace_s = GRACE_S
                except TransactionsUnavailable as error:
                    messages = []
                    await self._wait_for_service(error)
                    if self._is_over():
                        return self._nothing()
                if messages:
                    if self._left is not None:
                        messages = messages[: self._left]
                        self._left -= len(messages)
                    # ``end`` empties this very list.
                    self._page = messages if isinstance(messages, list) else list(messages)
                    return self._page
        except ReaderStopped:
            return None
        except (DeadlineExceeded, Unavailable) as error:
            if not self._is_cut_off(error):
                raise
            await self._pause(inf)  # calls to an unreachable daemon may end before the time is over
            return None if self.stop.is_set else self._nothing()
        return None

    def end(self) -> None:
        """Ends the loop after the message at hand, from any thread (of the asynchronous client: any task)."""
        self.stop.set()
        self._page.clear()

    def begin_get(self, timeout_s: float | None) -> None:
        """Limits the wait for the next message. None: no limit."""
        self._get_until_s = inf if timeout_s is None else self._channel.now() + timeout_s
        self._has_asked = False

    def end_get(self) -> None:
        """Ends the limit of ``get``."""
        self._get_until_s = inf
        self._has_asked = True

    def _idle(self, *, begins: bool) -> None:
        """Starts or ends the idle time. It begins once all topics are at their end: reading a backlog is not idling."""
        idle_s = self._plan.idle_timeout_s
        if not begins or idle_s is None:
            self._idle_until_s = inf
        elif self._idle_until_s == inf:
            self._idle_until_s = self._channel.now() + idle_s
        get_s = max(self._get_until_s, self._channel.now()) + self._get_grace_s
        self._channel.until_s = min(get_s, self._idle_until_s + GRACE_S)

    def _is_over(self) -> bool:
        """True if the time of ``get`` or of idling is over."""
        return self._channel.now() >= min(self._get_until_s, self._idle_until_s)

    def _is_cut_off(self, error: PlainsongError) -> bool:
        """True if a call failed because the time of ``get`` or of idling was over; ``get`` gives the next one longer."""
        channel = self._channel
        # An endless call has no other deadline; a position that the caller implements may have one.
        if not self._is_over() and not (channel.endless and error is channel.passed):
            return False
        self._has_asked = True
        # An attempt was cut off, not the pause after an attempt that failed by itself.
        if isinstance(error.__cause__, DeadlineExceeded) or channel.now() >= channel.until_s:
            most_s = max(GRACE_S, channel.settings.request_timeout_s)
            self._get_grace_s = min(2 * self._get_grace_s, most_s)
        return True

    async def _pause(self, seconds: float) -> None:
        """Sleeps, at most until the time of ``get`` or of idling is over."""
        left_s = min(self._get_until_s, self._idle_until_s) - self._channel.now()
        if (pause_s := min(seconds, left_s)) > 0:
            await self._channel.sleep(pause_s)

    def _nothing(self) -> Sequence[Message[Any]] | None:
        return NOTHING if self._channel.now() < self._idle_until_s else None

    def _wait_ms(self, most_ms: int) -> int:
        """Returns how long a poll may wait, at most ``most_ms``."""
        left_s = min(self._get_until_s, self._idle_until_s) - self._channel.now()
        return min(most_ms, max(0, ceil(left_s * 1000))) if left_s < inf else most_ms

    async def _fetch(self, track: Track | None) -> Sequence[Message[Any]]:
        """Polls one topic, or waits for new messages when all topics are at their end."""
        if track is not None:
            return await self._poll(track, wait_ms=0)
        if self._transaction is None:
            await self._save(patiently=True)  # not ``save``, which would end the idle time, and this wait is part of it
        return await self._wait()

    async def _wait_for_service(self, error: TransactionsUnavailable) -> None:
        """Pauses while the service restarts. Raises ``error`` if the reader does not follow, or the service stays unavailable."""
        now_s = self._channel.now()
        if self._refused_s is None:
            self._refused_s = now_s  # not since the last answer: the loop may have spent time on its messages
        if not self._plan.follow or not self._has_answer or now_s - self._refused_s > UNAVAILABLE_S:
            raise error
        await self._pause(pause_after(error, self._backoff))

    async def _begin(self) -> None:
        names = await self._matching()
        now_s = self._channel.now()
        self._refresh_s = now_s + REFRESH_S
        self._saved_s = now_s
        await self._add(names, self._plan.start)
        self._begun = True

    async def _matching(self) -> list[str]:
        """The topics that the names and patterns match now."""
        patterns = self._plan.patterns
        names = [topic for topic in self._plan.topics if topic not in patterns]
        if patterns:
            there = await self._channel.call(calls.list_topics(self._channel.namespace))
            names += [topic for topic in there if any(fnmatchcase(topic, pattern) for pattern in patterns)]
        return list(dict.fromkeys(names))

    async def _add(self, names: list[str], start: Start) -> None:
        """Adds topics at their saved positions, or at ``start``, which is then saved: all of them, or none after an error."""
        channel, position = self._channel, self._position
        daemon = BlockingChannel(channel)
        saved = {} if position is None else await run_blocking(position.load, daemon, names)
        first: dict[str, bytes] = {}
        tracks: list[Track] = []
        for name in names:
            at: bytes | int | None = saved.get(name)
            if at is None:
                at = await channel.resolve(name, start)
                # Unsaved, a start that moves with the clock or the topic would skip messages after a crash.
                if (
                    at is not None
                    and (bound := at if isinstance(at, bytes) else ids.before(ids.bound_at(at))) is not None
                ):
                    first[name] = bound
            until = await channel.resolve_end(name, self._plan.until)
            origin = Origin(name, self._plan.serializer)
            tracks.append(Track(origin, at, until))
        if position is not None and first:
            await run_blocking(position.save, daemon, first)
        # Only now: work that an error or the time of ``get`` cut off is repeated, and a topic that was here twice would
        # be delivered twice.
        self._turns.extend(tracks)

    def _next_track(self) -> Track | None:
        """The next topic in turn that has more messages."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if not self._turns[-1].at_end:
                return self._turns[-1]
        return None

    async def _poll(self, track: Track, wait_ms: int) -> Sequence[Message[Any]]:
        request = self._request(track)
        request.wait_ms = wait_ms or None

        def poll(max_bytes: int | None) -> calls.Call[Page[Any]]:
            request.max_bytes = max_bytes
            return calls.poll(self._channel.namespace, track.origin, request)

        def asked(isolation: Isolation) -> calls.Call[Page[Any]]:
            request.isolation = isolation
            return self._fitting(poll)

        begun, began_s = tracing.begun_ns(), self._channel.now()
        try:
            if self._transaction is None:
                page = await self._channel.read(asked, self._plan.isolation)
            else:
                page = await self._channel.call(self._fitting(poll))
        except TopicNotFound:
            if not self._plan.patterns or track.origin.topic in self._plan.topics:
                raise
            self._turns.remove(track)
            return []
        self._backoff.reset()
        self._note_arrival(began_s)
        tracing.received(self._channel.namespace, track.origin.topic, page, begun)
        return self._taken(track, page)

    def _fitting(self, make: Callable[[int | None], calls.Call[T]]) -> calls.Call[T]:
        """A poll for no more bytes than can arrive in time; after a time-out, the retry asks for fewer."""

        def again(error: PlainsongError) -> calls.Call[T] | None:
            if not isinstance(error, DeadlineExceeded):
                return None
            self._page_bytes.timed_out()
            return self._fitting(make)

        call = make(self._page_bytes.most)
        return call._replace(again=again, in_pieces=self._page_bytes.is_least)

    def _note_arrival(self, began_s: float) -> None:
        """Records the arrival of the answer to a poll that began at ``began_s``."""
        channel = self._channel
        limit_s = min(channel.settings.request_timeout_s, channel.until_s - began_s)
        self._page_bytes.came(channel.now() - began_s, limit_s)

    def _request(self, track: Track) -> PollRequest:
        limit = self._plan.page_messages if self._left is None else min(self._plan.page_messages, self._left)
        inclusive = is_inclusive(track.start, None)
        request = PollRequest(track.start, inclusive, limit, end_before=track.until, as_of_ms=self._plan.as_of_ms)
        if self._transaction is not None:
            request.transaction = self._transaction().snapshot
        return request

    def _taken(self, track: Track, page: Page[Any]) -> Sequence[Message[Any]]:
        if page.last_id is not None:
            track.start = bytes(page.last_id)
        track.held = page.held
        track.at_end = page.end != "more"
        if page.set_aside:
            log.warning("%s", passed_rows(track.origin.topic, page.set_aside))
        return page.messages

    # --- waiting -------------------------------------------------------------------------------

    async def _wait(self) -> Sequence[Message[Any]]:
        """Waits for new messages of any topic; empty after the wait."""
        if self._plan.patterns:
            await self._refresh()
        if not self._turns:
            await self._channel.sleep(self._wait_ms(int(REFRESH_S * 1000)) / 1000)
            return []
        if self._transaction is not None:
            return await self._wait_inside(self._transaction())
        if len(self._turns) == 1 and not self._plan.patterns:
            return await self._poll(self._turns[0], self._wait_ms(WAIT_MS))
        return await self._wait_for_many()

    async def _wait_inside(self, transaction: Transaction) -> Sequence[Message[Any]]:
        """Waits inside a transaction, whose snapshot shows few new messages: several topics take turns with short waits."""
        left_ms = min(WAIT_MS if len(self._turns) == 1 else TURN_MS, int(transaction.reading_s * 1000))
        left_ms = self._wait_ms(left_ms)
        self._turns.rotate(-1)
        track = self._turns[-1]
        messages = await self._poll(track, left_ms)
        if not messages and track.held is not None:
            await self._channel.sleep(
                left_ms / 1000
            )  # a blocked poll returns at once, and stays blocked in this snapshot
        return messages

    async def _wait_for_many(self) -> Sequence[Message[Any]]:
        tracks = {track.origin.topic: track for track in list(self._turns)[:MAX_TOPICS]}
        if len(self._turns) > MAX_TOPICS:
            self._turns.rotate(-MAX_TOPICS)
        wait_ms = int(REFRESH_S * 1000) if self._plan.patterns or len(self._turns) > MAX_TOPICS else WAIT_MS
        wait_ms = self._wait_ms(wait_ms)
        limit = self._plan.page_messages if self._left is None else min(self._plan.page_messages, self._left)

        def asked(isolation: Isolation) -> calls.Call[dict[str, Page[Any] | PlainsongError]]:
            return self._fitting(
                lambda max_bytes: calls.poll_many(
                    self._channel.namespace,
                    {name: track.origin for name, track in tracks.items()},
                    {name: self._request(track) for name, track in tracks.items()},
                    wait_ms=wait_ms,
                    limit=limit,
                    max_bytes=max_bytes,
                    isolation=isolation,
                )
            )

        begun, began_s = tracing.begun_ns(), self._channel.now()
        pages = await self._channel.read(asked, self._plan.isolation)
        self._note_arrival(began_s)
        found: list[Message[Any]] = []
        passing: PlainsongError | None = None
        for name, page in pages.items():
            if not isinstance(page, PlainsongError):
                tracing.received(self._channel.namespace, name, page, begun)
                found += self._taken(tracks[name], page)
            elif isinstance(page, Unavailable):
                passing = page
            elif isinstance(page, TopicNotFound) and name not in self._plan.topics:
                self._turns.remove(tracks[name])
            elif not found:
                raise page
        if passing is None:
            self._backoff.reset()
        elif not found:
            await self._pause(pause_after(passing, self._backoff))
        return found

    async def _refresh(self) -> None:
        now_s = self._channel.now()
        if now_s < self._refresh_s:
            return
        self._refresh_s = now_s + REFRESH_S
        known = {track.origin.topic for track in self._turns}
        new = [name for name in (await self._matching()) if name not in known]
        # They are newer than the last refresh, so all their messages are new.
        await self._add(new, None)

    def is_time_up(self) -> bool:
        """True if 90 % of the surrounding transaction's time has passed."""
        return self._transaction is not None and self._transaction().reading_s <= 0

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll."""
        return {track.origin.topic: track.held for track in self._turns if track.held is not None}

    # --- finished messages ----------------------------------------------------------------------

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """Marks the message at hand as finished. Returns True if it is time to save."""
        message, self.at_hand = self.at_hand, None
        if message is None:
            return False
        self._done[message.topic] = message.id_bytes
        self._done_messages += 1
        if self._done_messages >= self._plan.save_every:
            return True
        return self._saved_s is not None and now_s - self._saved_s >= self._plan.save_interval_s

    async def save(self, *, patiently: bool = False) -> None:
        """Saves the position of the finished messages; a no-op inside a transaction, whose end saves (``settle``).

        Args:
          patiently: between two messages of a loop: wait for an unreachable daemon, if the reader follows; what ``stop``
            or the time of ``get`` cuts off is left to the next save.
        Raises:
          PositionNotSaved, PositionChanged, DeadlineExceeded: messages since the last save will be delivered again.
        """
        if self._transaction is not None:
            return
        if not patiently:
            await self._save(patiently=False)
            return
        self._idle(begins=False)  # the wait before the message at hand had a separate limit, which may have passed
        try:
            await self._save(patiently=True)
        except ReaderStopped:
            pass  # the loop ends now, and saves
        except (DeadlineExceeded, Unavailable) as error:
            if not self._is_cut_off(error):
                raise

    @property
    def transactional(self) -> bool:
        """True if the transaction's participants commit the position."""
        return bool(getattr(self._position, "transactional", False))

    async def save_or_log(self) -> None:
        """Saves after the loop was left. Logs errors, which no caller would receive."""
        try:
            await self.save()
        except PlainsongError as error:
            log.warning("a reader's position was not saved: %s", error.detail)

    async def settle(self) -> None:
        """Saves at the end of the transaction. Raises the same as ``save``."""
        await self._save(patiently=False)

    async def _save(self, *, patiently: bool) -> None:
        if self._position is None or not self._done:
            return
        done, self._done, self._done_messages = self._done, {}, 0
        try:
            channel = self._channel if patiently else self._bounded
            await run_blocking(self._position.save, BlockingChannel(channel), done)
        except BaseException:
            self._done = {**done, **self._done}
            raise
        self._saved_s = self._channel.now()


class ReadingBlock(Protocol):
    """The transaction that a reading is part of."""

    def _require(self, what: str) -> Transaction: ...

    def _enlist(self, reader: AsyncReading) -> None: ...


def reading_in(
    context: ReadingBlock | None, channel: AsyncChannel, plan: Plan, position: Position | None
) -> AsyncReading:
    """A reading, part of a transaction if there is one.

    Raises:
      NoTransaction: it has ended. InvalidParameter: the plan has an isolation or a moment, but reads its snapshot.
    """
    if context is None:
        return AsyncReading(channel, plan, position)
    if plan.isolation is not None:
        raise InvalidParameter("a transaction reads its own snapshot", hint="omit isolation, or use direct=True")
    context._require("reading")
    reading = AsyncReading(channel, plan, position, lambda: context._require("reading"))
    context._enlist(reading)
    return reading


class AsyncReader(Generic[V]):
    """The messages of one or several topics, in order; made by ``AsyncClient.read``, which explains the options.

    Iterate over it once, in one task. With a position, a message is finished when the loop asks for the next one. Use
    it in an ``async with`` block: its normal end finishes the message at hand and saves the position; after an
    exception that message is delivered again. Without a block, a loop left early saves nothing more, and messages since
    the last save are delivered again.
    """

    def __init__(self, reading: AsyncReading) -> None:
        self._reading = reading
        self._messages = Messages(reading)
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return self._messages

    async def __anext__(self) -> Message[V]:
        return await self._messages.__anext__()

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll; only for committed or transactional reads."""
        return self._reading.held

    @property
    def is_time_up(self) -> bool:
        """True if reading ends because 90 % of its transaction's time has passed."""
        return self._reading.is_time_up()

    async def get(self, timeout_s: float | None = None) -> Message[V] | None:
        """The next message. A loop over the reader and calls of ``get`` may take turns.

        Args:
          timeout_s: how long to wait for one, while following; None: as long as it takes. The daemon is asked once, even
            if it is 0. The answer may be late by a quarter of a second. If answers take longer, each ``get`` that ends
            before its answer doubles this allowance, up to ``request_timeout_s``.
        Returns:
          None: no message arrived in time, or the reader has ended (``has_ended`` tells which).
        Raises:
          as the loop does.
        """
        reading = self._reading
        reading.begin_get(timeout_s)
        try:
            return await self._messages.__anext__()
        except StopAsyncIteration:
            self._has_ended = True
            return None
        finally:
            reading.end_get()

    @property
    def has_ended(self) -> bool:
        """True once ``get`` has returned None because no more messages will follow."""
        return self._has_ended

    def stop(self) -> None:
        """Ends the loop after the message at hand, as at the end of the topic: its position is saved. Idempotent.

        Other tasks call it while the loop waits.
        """
        self._reading.end()

    async def save(self) -> None:
        """Finishes the message at hand and saves now (in a transaction: at its end).

        Raises:
          PositionNotSaved, PositionChanged: messages since the last save will be delivered again.
        """
        self._reading.done_with_message_at_hand(now())
        await self._reading.save()

    async def aclose(self) -> None:
        """Saves the position of the finished messages, and ends. Idempotent. Raises the same as ``save``.

        While the loop waits elsewhere this is ``stop``: the loop ends, and saves.
        """
        if self._reading.closed:
            return
        if is_running(self._messages):
            self._reading.end()
            return
        self._reading.closed = True
        await self._messages.aclose()
        await self._reading.save()

    async def __aenter__(self) -> Self:
        if self._reading.closed:
            raise Closed("the reader is closed")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reading.done_with_message_at_hand(now())
            await self.aclose()
            return
        with shielded(_LAST_SAVE_S):
            try:
                await self.aclose()
            except PlainsongError as error:
                log.warning("a reader's position was not saved after an error: %s", error.detail)
