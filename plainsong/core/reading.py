"""Reading topics from end to end: where each stands, which to ask next, when to wait, and what to save.

A topic that has more is polled by itself, in frames; topics take turns. When all are at their end and the
reader follows, one poll waits for all of them. A page is handed out whole, and the position of its messages
moves only when the loop says that it is done with them. Inside a transaction the polls see its snapshot, the
position is kept with its end, and reading ends by itself while there is time left for the commit.
"""

from __future__ import annotations

from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from plainsong.core import calls, polls
from plainsong.core.attempts import Backoff
from plainsong.core.effects import Now, Pause
from plainsong.core.keeping import Keeping
from plainsong.core.operations import is_inclusive
from plainsong.core.plan import WILD, Plan, Track
from plainsong.messages import Origin
from plainsong.protocol import ids
from plainsong.protocol.errors import PlainsongError, TopicNotFound, TransactionsUnavailable, Unavailable
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PollRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.messages import Held, Message, Page
    from plainsong.positions import Position
    from plainsong.starts import Start
    from plainsong.transactions.values import Transaction

#: How long one poll waits for something new.
WAIT_MS = 30_000
#: How often a pattern is compared with the topics there are.
REFRESH_S = 10.0
#: How long a follower of committed messages waits for the transaction service to come back.
UNAVAILABLE_S = 60.0
#: How long one of several topics is waited for inside a transaction.
TURN_MS = 1_000
#: Topics that one waiting poll can name. Source: the HTTP contract, section 6.
MAX_TOPICS = 1_000


class Reading(Keeping):
    """The state of one reader.

    Args:
      transaction: the one it is part of, asked for each time, since a checkpoint changes it.
    """

    def __init__(
        self,
        operations: Operations,
        plan: Plan,
        position: Position | None,
        transaction: Callable[[], Transaction] | None = None,
    ) -> None:
        for topic in plan.topics:
            if not WILD & set(topic):
                topic_name(operations.namespace, topic)
        # Whoever follows waits for a daemon that is away; whoever leaves does not.
        waits = plan.follow and transaction is None
        super().__init__(operations.without_end() if waits else operations, operations, plan, position, transaction)
        self.closed = False
        self._turns: deque[Track] = deque()
        self._left = plan.limit
        self._begun = False
        self._refresh_s = 0.0
        self._answered_s: float | None = None
        self._backoff = Backoff(operations.random)

    # --- pages ---------------------------------------------------------------------------------

    def next_page(self) -> Steps[Sequence[Message] | None]:
        """The next messages; None at the end.

        Raises:
          PlainsongError: nothing happens by reading; what was not handed out comes again.
        """
        if not self._begun:
            yield from self._begin()
        while (self._left is None or self._left > 0) and not self.is_time_up():
            track = self._next_track()
            if track is None and not self._plan.follow:
                return None
            try:
                messages = yield from self._asked(track)
                self._answered_s = yield Now()
            except TransactionsUnavailable as error:
                messages = []
                yield from self._outlast(error)
            if messages:
                if self._left is not None:
                    messages = messages[: self._left]
                    self._left -= len(messages)
                return messages
        return None

    def _asked(self, track: Track | None) -> Steps[Sequence[Message]]:
        """What one topic has, or what comes after all of them are at their end."""
        if track is not None:
            return (yield from self._poll(track, wait_ms=0))
        yield from self.save(patiently=True)
        return (yield from self._wait())

    def _outlast(self, error: TransactionsUnavailable) -> Steps[None]:
        """Who follows outlasts a service that is being loaded again, but not one that was never there."""
        now_s: float = yield Now()
        if not self._plan.follow or self._answered_s is None or now_s - self._answered_s > UNAVAILABLE_S:
            raise error
        yield Pause(self._backoff.next_s(error))

    def _begin(self) -> Steps[None]:
        names = yield from self._matching()
        now_s: float = yield Now()
        self._refresh_s = now_s + REFRESH_S
        self._saved_s = now_s
        yield from self._add(names, self._plan.start)
        self._begun = True

    def _matching(self) -> Steps[list[str]]:
        """The topics that are meant, now."""
        patterns = self._plan.patterns
        names = [topic for topic in self._plan.topics if topic not in patterns]
        if patterns:
            there = yield from self._operations.call(calls.list_topics(self._operations.namespace))
            names += [topic for topic in there if any(fnmatchcase(topic, pattern) for pattern in patterns)]
        return list(dict.fromkeys(names))

    def _add(self, names: list[str], start: Start) -> Steps[None]:
        """Take topics in, at their saved positions or at ``start``, which is kept for those that have none."""
        operations, position = self._operations, self._position
        saved = (yield from position.load(operations, names)) if position is not None else {}
        first: dict[str, bytes] = {}
        for name in names:
            at: bytes | int | None = saved.get(name)
            if at is None:
                at = yield from operations.resolve(name, start)
                # A start that moves with the clock or the topic would skip after a crash.
                if (
                    at is not None
                    and (bound := at if isinstance(at, bytes) else ids.before(ids.bound_at(at))) is not None
                ):
                    first[name] = bound
            until = yield from operations.resolve_end(name, self._plan.until)
            origin = Origin(name, self._plan.serializer)
            self._turns.append(Track(origin, at, until))
        if position is not None and first:
            yield from position.save(operations, first)

    def _next_track(self) -> Track | None:
        """Another one each time, of those that have more."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if not self._turns[-1].at_end:
                return self._turns[-1]
        return None

    def _poll(self, track: Track, wait_ms: int) -> Steps[Sequence[Message]]:
        request = self._request(track)
        request.wait_ms = wait_ms or None
        call = polls.poll(self._operations.namespace, track.origin, request)
        try:
            page = yield from self._operations.call(call)
        except TopicNotFound:
            if not self._plan.patterns or track.origin.topic in self._plan.topics:
                raise
            self._turns.remove(track)
            return []
        return self._taken(track, page)

    def _request(self, track: Track) -> PollRequest:
        limit = self._plan.page_messages if self._left is None else min(self._plan.page_messages, self._left)
        inclusive = is_inclusive(track.start, None)
        request = PollRequest(track.start, inclusive, limit, end_before=track.until)
        if self._transaction is None:
            request.isolation = self._plan.isolation
        else:
            request.transaction = self._transaction().snapshot
        return request

    def _taken(self, track: Track, page: Page) -> Sequence[Message]:
        if page.last_id is not None:
            track.start = bytes(page.last_id)
        track.held = page.held
        track.at_end = page.end != "more"
        return page.messages

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self) -> Steps[Sequence[Message]]:
        """What comes next, from any topic; nothing when the time is over. Then all are asked again."""
        if self._plan.patterns:
            yield from self._refresh()
        if not self._turns:
            yield Pause(REFRESH_S)
            return []
        if self._transaction is not None:
            return (yield from self._wait_inside(self._transaction()))
        if len(self._turns) == 1 and not self._plan.patterns:
            return (yield from self._poll(self._turns[0], WAIT_MS))
        return (yield from self._wait_for_many())

    def _wait_inside(self, transaction: Transaction) -> Steps[Sequence[Message]]:
        """A snapshot shows little that is new: topics take turns, with short waits where there are several."""
        left_ms = min(WAIT_MS if len(self._turns) == 1 else TURN_MS, int(transaction.reading_s * 1000))
        self._turns.rotate(-1)
        track = self._turns[-1]
        messages = yield from self._poll(track, left_ms)
        if not messages and track.held is not None:
            yield Pause(left_ms / 1000)  # what is held stays held in this snapshot, so nobody waited for it
        return messages

    def _wait_for_many(self) -> Steps[Sequence[Message]]:
        tracks = {track.origin.topic: track for track in list(self._turns)[:MAX_TOPICS]}
        if len(self._turns) > MAX_TOPICS:
            self._turns.rotate(-MAX_TOPICS)
        wait_ms = int(REFRESH_S * 1000) if self._plan.patterns or len(self._turns) > MAX_TOPICS else WAIT_MS
        limit = self._plan.page_messages if self._left is None else min(self._plan.page_messages, self._left)
        call = polls.poll_many(
            self._operations.namespace,
            {name: track.origin for name, track in tracks.items()},
            {name: self._request(track) for name, track in tracks.items()},
            wait_ms=wait_ms,
            limit=limit,
            isolation=self._plan.isolation,
        )
        pages = yield from self._operations.call(call)
        found: list[Message] = []
        passing: PlainsongError | None = None
        for name, page in pages.items():
            if not isinstance(page, PlainsongError):
                found += self._taken(tracks[name], page)
            elif isinstance(page, Unavailable):
                passing = page
            elif isinstance(page, TopicNotFound) and name not in self._plan.topics:
                self._turns.remove(tracks[name])
            elif not found:
                raise page
        if passing is None:
            self._backoff.count = 0
        elif not found:
            yield Pause(self._backoff.next_s(passing))
        return found

    def _refresh(self) -> Steps[None]:
        now_s: float = yield Now()
        if now_s < self._refresh_s:
            return
        self._refresh_s = now_s + REFRESH_S
        known = {track.origin.topic for track in self._turns}
        new = [name for name in (yield from self._matching()) if name not in known]
        # They were created since: all of them is new.
        yield from self._add(new, None)

    def is_time_up(self) -> bool:
        """Whether it is part of a transaction 90 % of whose time are over."""
        return self._transaction is not None and self._transaction().reading_s <= 0

    @property
    def is_inside(self) -> bool:
        """Whether it is part of a transaction."""
        return self._transaction is not None

    @property
    def held(self) -> dict[str, Held]:
        """Who holds up which topic, as of the last poll of each."""
        return {track.origin.topic: track.held for track in self._turns if track.held is not None}
