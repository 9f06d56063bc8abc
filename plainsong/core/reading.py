"""Reading topics from end to end: where each stands, which to ask next, when to wait, and what to save.

A topic that has more is polled by itself, in frames; topics take turns. When all are at their end and the
reader follows, one poll waits for all of them. A page is handed out whole, and the position of its messages
moves only when the loop says that it is done with them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from plainsong.core import calls, polls
from plainsong.core.attempts import Backoff
from plainsong.core.effects import Now, Pause
from plainsong.core.operations import is_inclusive
from plainsong.messages import Message, Origin
from protocol import ids
from protocol.errors import InvalidParameter, PlainsongError, TopicNotFound, Unavailable
from protocol.names import topic_name
from protocol.requests import PollRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.messages import Page
    from plainsong.positions import Position
    from plainsong.serializers import Serializer
    from plainsong.starts import Start

#: How long one poll waits for something new.
WAIT_MS = 30_000
#: How often a pattern is compared with the topics there are.
REFRESH_S = 10.0
#: Topics that one waiting poll can name. Source: the HTTP contract, section 6.
MAX_TOPICS = 1_000
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read."""

    topics: tuple[str, ...]
    """Names and patterns."""
    start: Start
    until: Start
    follow: bool
    limit: int | None
    serializer: Serializer
    page_messages: int
    save_every: int
    save_interval_s: float

    def __post_init__(self) -> None:
        if not self.topics:
            raise InvalidParameter("no topic is named")
        if self.follow and self.until is not None:
            raise InvalidParameter("follow and until exclude each other", hint="without follow, reading ends there")
        for name, number in (
            ("limit", self.limit),
            ("page_messages", self.page_messages),
            ("save_every", self.save_every),
        ):
            if number is not None and number < 1:
                raise InvalidParameter(f"{name} is {number}", hint="use 1 or more")

    @property
    def patterns(self) -> list[str]:
        """Those that name topics by their looks."""
        return [topic for topic in self.topics if _WILD & set(topic)]


@dataclass(slots=True, eq=False)
class Track:
    """One topic of a reader."""

    origin: Origin
    start: bytes | int | None
    """Where the next poll starts: exclusively at an id, inclusively at a time."""
    until: bytes | None
    at_end: bool = False


class Reading:
    """The state of one reader."""

    def __init__(self, operations: Operations, plan: Plan, position: Position | None) -> None:
        for topic in plan.topics:
            if not _WILD & set(topic):
                topic_name(operations.namespace, topic)
        #: The message that the loop has been given and is not done with yet.
        self.at_hand: Message | None = None
        self.closed = False
        # Whoever follows waits for a daemon that is away; whoever leaves does not.
        self._operations = operations.without_end() if plan.follow else operations
        self._bounded = operations
        self._plan = plan
        self._position = position
        self._turns: deque[Track] = deque()
        self._left = plan.limit
        self._begun = False
        self._refresh_s = 0.0
        self._backoff = Backoff(operations.random)
        self._done: dict[str, bytes] = {}
        self._done_messages = 0
        self._saved_s: float | None = None

    # --- pages ---------------------------------------------------------------------------------

    def next_page(self) -> Steps[Sequence[Message] | None]:
        """The next messages; None at the end.

        Raises:
          PlainsongError: nothing happens by reading; what was not handed out comes again.
        """
        if not self._begun:
            yield from self._begin()
        while self._left is None or self._left > 0:
            track = self._next_track()
            if track is not None:
                messages = yield from self._poll(track, wait_ms=0)
            elif not self._plan.follow:
                return None
            else:
                yield from self.save(patiently=True)
                messages = yield from self._wait()
            if messages:
                if self._left is not None:
                    messages = messages[: self._left]
                    self._left -= len(messages)
                return messages
        return None

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
        return PollRequest(track.start, inclusive, limit, end_before=track.until)

    def _taken(self, track: Track, page: Page) -> Sequence[Message]:
        if page.last_id is not None:
            track.start = bytes(page.last_id)
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
        if len(self._turns) == 1 and not self._plan.patterns:
            return (yield from self._poll(self._turns[0], WAIT_MS))
        return (yield from self._wait_for_many())

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

    # --- positions -----------------------------------------------------------------------------

    @property
    def keeps_position(self) -> bool:
        """Whether ``done_with_message_at_hand`` has to be told."""
        return self._position is not None

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """The loop is done with it, and all before it; whether it is time to save."""
        message, self.at_hand = self.at_hand, None
        if message is None:
            return False
        self._done[message.topic] = message.id_bytes
        self._done_messages += 1
        if self._done_messages >= self._plan.save_every:
            return True
        return self._saved_s is not None and now_s - self._saved_s >= self._plan.save_interval_s

    def save(self, *, patiently: bool = False) -> Steps[None]:
        """Keep what the loop is done with.

        Args:
          patiently: wait for a daemon that is away, if the reader follows.
        Raises:
          PositionNotSaved, PositionChanged, DeadlineExceeded: what was read since the last save will come again.
        """
        if self._position is None or not self._done:
            return
        done, self._done, self._done_messages = self._done, {}, 0
        try:
            yield from self._position.save(self._operations if patiently else self._bounded, done)
        except BaseException:
            self._done = {**done, **self._done}
            raise
        self._saved_s = yield Now()
