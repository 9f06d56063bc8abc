# Written by scripts/unasync.py from plainsong/_async/reading.py: change that, and run it (make sync).
"""A reader's work: what to poll next, when to wait, and when to save.

Topics that have more messages are polled one by one, in turn. When all are at their end and the reader follows, one poll
waits for all of them. Inside a transaction the polls read its snapshot, its end saves the position, and reading stops
early enough to leave time for the commit.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from plainsong import calls, tracing
from plainsong._sync._backend import ReaderStop
from plainsong._sync.progress import Progress
from plainsong._sync.tracks import MAX_TOPICS, REFRESH_S, Tracks
from plainsong.errors import DeadlineExceeded
from plainsong.messages import passed_rows
from plainsong.positions import PageBytes, is_inclusive
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import (
    InvalidParameter,
    PlainsongError,
    TopicNotFound,
    TransactionsUnavailable,
    Unavailable,
)
from plainsong.protocol.requests import PollRequest
from plainsong.retry import PAUSES_S, ReaderStopped, pause_after
from plainsong.wait_limits import WaitLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong._sync.retry import Channel
    from plainsong.messages import Message, Page
    from plainsong.positions import Plan, Position, Track
    from plainsong.protocol.page import Held
    from plainsong.protocol.requests import Isolation
    from plainsong.transactions import Transaction

T = TypeVar("T")

log = logging.getLogger("plainsong.reader")

#: How long one poll waits for new messages.
WAIT_MS = 30_000


#: How long a follower of committed messages waits for the transaction service to return.
UNAVAILABLE_S = 60.0


#: How long a reader of several topics waits for each of them inside a transaction.
TURN_MS = 1_000


#: The page with which ``get`` ends its wait: None instead of a message.
NOTHING: Any = [None]


class Reading:
    """The messages of a reader, page by page, and which of them the loop has finished.

    Args:
      transaction: returns the surrounding transaction, which a checkpoint replaces.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        position: Position | None,
        transaction: Callable[[], Transaction] | None = None,
    ) -> None:
        self.stop = ReaderStop()
        # A following reader waits for an unreachable daemon without a deadline. Its last save has one, and ignores ``stop``.
        self._channel = channel.for_reader(self.stop, endless=plan.follow and transaction is None)
        self._bounded = channel
        self._plan = plan
        self._transaction = transaction
        self._progress = Progress(position, plan.save_every, plan.save_interval_s)
        self._tracks = Tracks(self._channel, plan, self._progress)
        self._limits = WaitLimits(plan.idle_timeout_s)
        self.keeps_position = position is not None
        self.is_inside = transaction is not None
        self.closed = False
        #: The message that the loop has not finished yet.
        self.at_hand: Message[Any] | None = None
        self._left = plan.limit
        self._has_answer = False
        #: When a poll was first refused for lack of the transaction service, after the last answer.
        self._refused_s: float | None = None
        self._backoff = Backoff(PAUSES_S, channel.random)
        self._page: list[Message[Any]] = []
        self._page_bytes = PageBytes()

    # --- pages ---------------------------------------------------------------------------------

    def next_page(self) -> Sequence[Message[Any]] | None:
        """The next messages; ``NOTHING`` when the time of ``get`` is over; None at the end.

        Raises:
          PlainsongError: messages not yet returned will be read again.
        """
        self._limit_calls(idles=False)
        try:
            if not self._tracks.are_known:
                self._progress.begin(self._channel.now())
                self._tracks.begin()
            while (self._left is None or self._left > 0) and not self.is_time_up() and not self.stop.is_set:
                track = self._tracks.next_with_more()
                if track is None and not self._plan.follow:
                    return None
                self._limit_calls(idles=track is None)
                if track is None and self._limits.has_asked and self._is_over():
                    return self._nothing()
                self._limits.has_asked = True
                try:
                    messages = self._fetch(track)
                    self._has_answer, self._refused_s = True, None
                    self._limits.note_answer(self._channel.now())
                except TransactionsUnavailable as error:
                    messages = []
                    self._wait_for_service(error)
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
            self._pause(inf)  # calls to an unreachable daemon may end before the time is over
            return None if self.stop.is_set else self._nothing()
        return None

    def end(self) -> None:
        """Ends the loop after the message at hand, from any thread."""
        self.stop.set()
        self._page.clear()

    def _fetch(self, track: Track | None) -> Sequence[Message[Any]]:
        """Polls one topic, or waits for new messages when all topics are at their end."""
        if track is not None:
            return self._poll(track, wait_ms=0)
        if self._transaction is None:
            # Not ``self.save``, which would end the idle time: this wait is part of it.
            self._progress.save(self._channel)
        return self._wait()

    def _wait_for_service(self, error: TransactionsUnavailable) -> None:
        """Pauses while the service restarts. Raises ``error`` if the reader does not follow, or the service stays unavailable."""
        now_s = self._channel.now()
        if self._refused_s is None:
            self._refused_s = now_s  # not since the last answer: the loop may have spent time on its messages
        if not self._plan.follow or not self._has_answer or now_s - self._refused_s > UNAVAILABLE_S:
            raise error
        self._pause(pause_after(error, self._backoff))

    def is_time_up(self) -> bool:
        """True if 90 % of the surrounding transaction's time has passed."""
        return self._transaction is not None and self._transaction().reading_s <= 0

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll."""
        return self._tracks.held

    # --- limits ----------------------------------------------------------------------------------

    def begin_get(self, timeout_s: float | None) -> None:
        """Limits the wait for the next message. None: no limit."""
        self._limits.begin_get(timeout_s, self._channel.now())

    def end_get(self) -> None:
        """Ends the limit of ``get``."""
        self._limits.end_get()

    def _limit_calls(self, *, idles: bool) -> None:
        """Starts or ends the idle time, and limits the calls that follow."""
        now_s = self._channel.now()
        if idles:
            self._limits.begin_idling(now_s)
        else:
            self._limits.end_idling()
        self._channel.until_s = self._limits.calls_until_s(now_s)

    def _is_over(self) -> bool:
        return self._limits.is_over(self._channel.now())

    def _is_cut_off(self, error: PlainsongError) -> bool:
        """True if a call failed because the time of ``get`` or of idling was over; ``get`` gives the next one longer."""
        channel = self._channel
        # An endless call has no other deadline; a position that the caller implements may have one.
        if not self._is_over() and not (channel.endless and error is channel.passed):
            return False
        self._limits.has_asked = True
        # An attempt was cut off, not the pause after an attempt that failed by itself.
        if isinstance(error.__cause__, DeadlineExceeded) or channel.now() >= channel.until_s:
            self._limits.note_cut_off(channel.settings.request_timeout_s)
        return True

    def _pause(self, seconds: float) -> None:
        """Sleeps, at most until the time of ``get`` or of idling is over."""
        if (pause_s := min(seconds, self._limits.left_s(self._channel.now()))) > 0:
            self._channel.sleep(pause_s)

    def _nothing(self) -> Sequence[Message[Any]] | None:
        return None if self._limits.is_idle_over(self._channel.now()) else NOTHING

    def _wait_ms(self, most_ms: int) -> int:
        """Returns how long a poll may wait, at most ``most_ms``."""
        return self._limits.wait_ms(most_ms, self._channel.now())

    # --- polls -----------------------------------------------------------------------------------

    def _poll(self, track: Track, wait_ms: int) -> Sequence[Message[Any]]:
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
                page = self._channel.read(asked, self._plan.isolation)
            else:
                page = self._channel.call(self._fitting(poll))
        except TopicNotFound:
            if not self._tracks.forget_missing(track):
                raise
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

    def _wait(self) -> Sequence[Message[Any]]:
        """Waits for new messages of any topic; empty after the wait."""
        tracks = self._tracks
        tracks.refresh()
        if not tracks:
            self._channel.sleep(self._wait_ms(int(REFRESH_S * 1000)) / 1000)
            return []
        if self._transaction is not None:
            return self._wait_inside(self._transaction())
        if len(tracks) == 1 and not self._plan.patterns:
            return self._poll(tracks.next(), self._wait_ms(WAIT_MS))
        return self._wait_for_many()

    def _wait_inside(self, transaction: Transaction) -> Sequence[Message[Any]]:
        """Waits inside a transaction, whose snapshot shows few new messages: several topics take turns with short waits."""
        left_ms = min(WAIT_MS if len(self._tracks) == 1 else TURN_MS, int(transaction.reading_s * 1000))
        left_ms = self._wait_ms(left_ms)
        track = self._tracks.next()
        messages = self._poll(track, left_ms)
        if not messages and track.held is not None:
            # A blocked poll returns at once, and stays blocked in this snapshot.
            self._channel.sleep(left_ms / 1000)
        return messages

    def _wait_for_many(self) -> Sequence[Message[Any]]:
        tracks = self._tracks.next_many()
        wait_ms = int(REFRESH_S * 1000) if self._plan.patterns or len(self._tracks) > MAX_TOPICS else WAIT_MS
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
        pages = self._channel.read(asked, self._plan.isolation)
        self._note_arrival(began_s)
        found: list[Message[Any]] = []
        passing: PlainsongError | None = None
        for name, page in pages.items():
            if not isinstance(page, PlainsongError):
                tracing.received(self._channel.namespace, name, page, begun)
                found += self._taken(tracks[name], page)
            elif isinstance(page, Unavailable):
                passing = page
            elif isinstance(page, TopicNotFound) and self._tracks.forget_missing(tracks[name]):
                pass
            elif not found:
                raise page
        if passing is None:
            self._backoff.reset()
        elif not found:
            self._pause(pause_after(passing, self._backoff))
        return found

    # --- finished messages ----------------------------------------------------------------------

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """Marks the message at hand as finished. Returns True if it is time to save."""
        message, self.at_hand = self.at_hand, None
        return message is not None and self._progress.finish(message, now_s)

    def save(self, *, patiently: bool = False) -> None:
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
            self._progress.save(self._bounded)
            return
        # The wait before the message at hand had a separate limit, which may have passed.
        self._limit_calls(idles=False)
        try:
            self._progress.save(self._channel)
        except ReaderStopped:
            pass  # the loop ends now, and saves
        except (DeadlineExceeded, Unavailable) as error:
            if not self._is_cut_off(error):
                raise

    @property
    def transactional(self) -> bool:
        """True if the transaction's participants commit the position."""
        return self._progress.transactional

    def save_or_log(self) -> None:
        """Saves after the loop was left. Logs errors, which no caller would receive."""
        try:
            self.save()
        except PlainsongError as error:
            log.warning("a reader's position was not saved: %s", error.detail)

    def settle(self) -> None:
        """Saves at the end of the transaction. Raises the same as ``save``."""
        self._progress.save(self._bounded)


class ReadingBlock(Protocol):
    """The transaction that a reading is part of."""

    def _require(self, what: str) -> Transaction: ...

    def _enlist(self, reader: Reading) -> None: ...


def reading_in(context: ReadingBlock | None, channel: Channel, plan: Plan, position: Position | None) -> Reading:
    """A reading, part of a transaction if there is one.

    Raises:
      NoTransaction: it has ended. InvalidParameter: the plan has an isolation or a moment, but reads its snapshot.
    """
    if context is None:
        return Reading(channel, plan, position)
    if plan.isolation is not None:
        raise InvalidParameter("a transaction reads its own snapshot", hint="omit isolation, or use direct=True")
    context._require("reading")
    reading = Reading(channel, plan, position, lambda: context._require("reading"))
    context._enlist(reading)
    return reading
