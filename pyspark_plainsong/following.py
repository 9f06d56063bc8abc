"""Follows topics for a stream: waits for new messages, and decides how far the next micro-batch goes in each topic.

It shares the trigger's bounds between the topics, and detects lost messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark_plainsong.calls import MAX_AWAITED
from pyspark_plainsong.offsets import FIRST, Position
from pyspark_plainsong.partitions import whole_extent
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark_plainsong.calls import Calls, Extent, Isolation
    from pyspark_plainsong.subscription import Losses, Subscription


class Following:
    """The state that one query's source caches about its topics.

    All of it may be lost: it only saves requests and prevents false reports of loss.

    Args:
      splits: the number of parts in which to measure topics; None: as a whole.
    """

    def __init__(self, calls: Calls, subscription: Subscription, losses: Losses, splits: int | None = None) -> None:
        self._calls = calls
        self._splits = splits
        self._subscription = subscription
        self._losses = losses
        self._turn = 0
        #: By topic, the stream's position and a later one; no message will ever appear between the two.
        self._empty_to: dict[str, tuple[Position, bytes]] = {}
        #: Positions of topics without new messages that were already checked for losses.
        self._complete_at: dict[str, Position] = {}
        #: By topic, the latest known position after all messages to read.
        self.newest: dict[str, Position] = {}
        #: By topic, about how many messages are left for later micro-batches; a topic without any may be missing.
        self.behind: dict[str, int] = {}
        #: By topic, where the newest micro-batch begins, and what it has from there on.
        self._measured: dict[str, tuple[bytes, Extent]] = {}
        self._backlog = Backlog(calls)

    def advance(
        self, known: Mapping[str, Position], trigger: Trigger, targets: Mapping[str, bytes] | None, *, wait_ms: int
    ) -> dict[str, Position]:
        """Return the positions after the next micro-batch: ``known`` and new topics, advanced as ``trigger`` allows.

        Args:
          targets: read only these topics, at most up to these positions, and do not wait.
          wait_ms: how long to wait for the first new message.
        Raises:
          BrokerError, DataLoss: no position has changed.
        """
        found = dict(known)
        topics = self._subscription.topics() if targets is None else sorted(targets)
        for topic in topics:
            if topic not in found:
                generation = self._subscription.generation(topic)
                if generation is not None:
                    found[topic] = Position(generation, FIRST)  # a topic that joined later is read from its start
        for topic in known:
            if topic not in topics and self._subscription.has(topic):
                self._losses.deleted(topic)
        followed = {topic: found[topic] for topic in topics if topic in found}
        if targets is None:
            wanted = {
                topic: Wanted(self._look_from(topic, found), None) for topic in self._news(found, followed, wait_ms)
            }
        else:
            wanted = {}
            for topic, position in followed.items():
                if position.next < targets[topic]:
                    wanted[topic] = Wanted(position.next, targets[topic])
                else:
                    found[topic] = self._quiet(topic, position, targets[topic])
        counted = self._backlog.counted(wanted, self._subscription.isolation, trigger) if targets is None else None
        if counted is not None:
            self.newest, self.behind = dict(found), counted
            time.sleep(min(wait_ms / 1000, self._backlog.left_s(trigger)))
            return found
        self._turn += 1
        measured = measure(self._calls, wanted, self._subscription.isolation, trigger, self._turn, self._splits)
        self.behind, self._measured = {}, {}
        for topic, each in measured.items():
            if each is None:
                self._losses.deleted(topic)
                continue
            self._measured[topic] = found[topic].next, each.extent
            found[topic] = self._moved(topic, found[topic], each.extent)
            self.newest[topic] = found[topic]
            if each.is_cut:
                newest, self.behind[topic] = self._subscription.after(topic, found[topic].next)
                self.newest[topic] = Position(found[topic].generation, newest)
        self.newest = {topic: self.newest.get(topic, position) for topic, position in found.items()}
        return found

    def extent(self, topic: str, generation: int, start: bytes, end: bytes) -> Extent | None:
        """Return the extent of a range, with its splits; None unless the newest micro-batch was found to have it."""
        began, found = self._measured.get(topic, (b"", None))
        is_same = found is not None and (began, found.end, found.generation) == (start, end, generation)
        return found if is_same else None

    def complete_from(self, topic: str, start: bytes) -> bytes:
        """Return the position from which a range from ``start`` on must be complete; there was no message before it."""
        position, later = self._empty_to.get(topic, (None, FIRST))
        return later if position is not None and position.next == start else start

    # --- waiting -------------------------------------------------------------------------------

    def _look_from(self, topic: str, positions: Mapping[str, Position]) -> bytes:
        position, later = self._empty_to.get(topic, (None, FIRST))
        return later if position == positions[topic] else positions[topic].next

    def _news(self, found: dict[str, Position], followed: Mapping[str, Position], wait_ms: int) -> list[str]:
        """Return topics with messages to read, and unreadable ones; advance the positions of the others in ``found``."""
        names = sorted(followed)
        asked_at_once = [names[first : first + MAX_AWAITED] for first in range(0, len(names), MAX_AWAITED)]
        news: list[str] = []
        for some in asked_at_once:
            answer = self._calls.wait_for_news(
                {topic: self._look_from(topic, followed) for topic in some},
                isolation=self._subscription.isolation,
                wait_ms=wait_ms if len(asked_at_once) == 1 else 0,
            )
            news += [*answer.topics, *answer.unreadable]
            for topic, later in answer.quiet.items():
                found[topic] = self._quiet(topic, followed[topic], later)
        if not news and len(asked_at_once) != 1:
            time.sleep(wait_ms / 1000)
        return news

    def _quiet(self, topic: str, position: Position, later: bytes) -> Position:
        """Return the position of a topic without messages up to ``later``, after one check that none was lost.

        Raises:
          DataLoss: with failOnDataLoss.
        """
        look_from = self._look_from(topic, {topic: position})
        if self._complete_at.get(topic) == position and later <= look_from:
            return position
        try:
            standing = self._calls.standing(topic, look_from)
        except BrokerError as error:
            if error.code != "topic_not_found":
                raise
            self._losses.deleted(topic)
            return position
        checked_position = self._checked(topic, position, standing)
        if checked_position.next == FIRST:
            # The topic was empty when the stream began. A message that is published and expires from now on is a loss.
            checked_position = Position(checked_position.generation, max(later, standing.earliest))
        self._complete_at[topic] = checked_position
        self._empty_to[topic] = (checked_position, max(checked_position.next, later))
        return checked_position

    # --- going forward -------------------------------------------------------------------------

    def _moved(self, topic: str, position: Position, extent: Extent) -> Position:
        """Return the position after an extent; if the topic was created again, its start. Raises DataLoss."""
        checked = self._checked(topic, position, extent)
        if checked != position:
            return checked
        if extent.messages or position.next == FIRST:
            return Position(position.generation, max(position.next, extent.end))
        return position

    def _checked(self, topic: str, position: Position, extent: Extent) -> Position:
        """Check that no message after the position was lost.

        Returns:
          the position; if the topic was created again, its start.
        Raises:
          DataLoss: with failOnDataLoss.
        """
        if extent.generation != position.generation:
            self._losses.recreated(topic, position.generation, extent.generation)
            return Position(extent.generation, FIRST)
        if extent.expired and position.next != FIRST:
            self._losses.expired(topic, position.next, extent.earliest)
        return position


# --- measuring -------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """The range of one topic to measure."""

    start: bytes
    end: bytes | None
    """Exclusive; None: the end of the topic."""


@dataclass(frozen=True)
class Trigger:
    """The bounds of a micro-batch, over all topics."""

    max_messages: int | None
    max_bytes: int | None
    """Soft: one message is always read, however large."""
    min_messages: int | None = None
    """Wait until there are this many messages, for ``max_delay_s`` after the first of them was seen."""
    max_delay_s: float = 0.0


class Backlog:
    """Delays a micro-batch until enough messages have arrived for it.

    Args:
      clock: a monotonic clock in seconds.
    """

    def __init__(self, calls: Calls, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._clock = clock
        self._since_s: float | None = None
        #: By topic, where counting began, where it ended, and the number of messages between the two.
        self._counted: dict[str, tuple[bytes, bytes, int]] = {}

    def counted(self, wanted: Mapping[str, Wanted], isolation: Isolation, trigger: Trigger) -> dict[str, int] | None:
        """Return by topic how many messages wait for more to arrive; None if it is time for a micro-batch or none wait.

        Raises:
          BrokerError: a topic cannot be read.
        """
        if trigger.min_messages is None:
            return None
        found: dict[str, int] = {}
        for topic, each in wanted.items():
            messages = self._messages(topic, each.start, isolation, trigger.min_messages - sum(found.values()))
            if messages is None or sum(found.values()) + messages >= trigger.min_messages:
                self._reset()
                return None
            found[topic] = messages
        if any(found.values()):
            if self._since_s is None:
                self._since_s = self._clock()
            if self.left_s(trigger) > 0:
                return found
        self._reset()
        return None

    def left_s(self, trigger: Trigger) -> float:
        """Return how long the messages may still wait."""
        return trigger.max_delay_s - (self._clock() - self._since_s) if self._since_s is not None else 0.0

    def _reset(self) -> None:
        self._since_s = None
        self._counted.clear()

    def _messages(self, topic: str, start: bytes, isolation: Isolation, most: int) -> int | None:
        """Count the messages from ``start`` on, continuing an earlier count; None if some may be lost."""
        began, end, messages = self._counted.get(topic, (start, start, 0))
        if began != start:
            end, messages = start, 0
        room = Trigger(most - messages, None)
        extent = _extent_or_none(self._calls, topic, Wanted(end, None), isolation, room) if messages < most else None
        if extent is None or extent.expired:
            return None  # enough, or a loss that the micro-batch reports
        self._counted[topic] = start, max(end, extent.end), messages + extent.messages
        return messages + extent.messages


class Measured(NamedTuple):
    """One topic's part of a micro-batch."""

    extent: Extent
    is_cut: bool
    """True if the trigger's bounds leave messages for a later batch."""


def measure(
    calls: Calls,
    wanted: Mapping[str, Wanted],
    isolation: Isolation,
    trigger: Trigger,
    turn: int,
    splits: int | None = None,
) -> dict[str, Measured | None]:
    """Return the extents to read now; None if the topic does not exist.

    A topic without a share in this batch has an empty extent at its start.

    Args:
      splits: the number of parts of each extent.
    Raises:
      BrokerError: a topic cannot be read.
    """
    extents: dict[str, Extent] = {}
    found: dict[str, Measured | None] = {}
    for topic, each in wanted.items():
        extent = _extent_or_none(calls, topic, each, isolation, trigger, splits)
        if extent is None:
            found[topic] = None
        else:
            extents[topic] = extent
            found[topic] = Measured(extent, _is_full(extent, trigger))
    messages = {topic: extent.messages for topic, extent in extents.items() if extent.messages}
    sizes = {topic: extents[topic].size_bytes for topic in messages}
    message_shares = messages if trigger.max_messages is None else fair_shares(trigger.max_messages, messages, turn)
    byte_shares = sizes if trigger.max_bytes is None else fair_shares(trigger.max_bytes, sizes, turn)
    used_bytes = 0
    for topic in _in_turn(messages, turn):
        extent = extents[topic]
        if message_shares[topic] < messages[topic] or byte_shares[topic] < sizes[topic]:
            if not message_shares[topic]:
                found[topic] = Measured(_nothing(extent, wanted[topic].start), is_cut=True)
                continue
            share = Trigger(message_shares[topic], max(1, byte_shares[topic]))  # at least one message
            extent = _extent(calls, topic, wanted[topic], isolation, share, splits)
            found[topic] = Measured(extent, is_cut=True)
        size = extent.size_bytes
        if trigger.max_bytes is not None and used_bytes and used_bytes + size > trigger.max_bytes:
            # Its first message exceeds its share, and the other topics have used the rest: defer it to a later batch.
            found[topic] = Measured(_nothing(extent, wanted[topic].start), is_cut=True)
            continue
        used_bytes += size
    return found


def _nothing(extent: Extent, start: bytes) -> Extent:
    return extent._replace(end=start, messages=0, size_bytes=0, splits=())


def _extent_or_none(
    calls: Calls, topic: str, wanted: Wanted, isolation: Isolation, trigger: Trigger, splits: int | None = None
) -> Extent | None:
    try:
        return _extent(calls, topic, wanted, isolation, trigger, splits)
    except BrokerError as error:
        if error.code == "topic_not_found":
            return None
        raise


def _extent(
    calls: Calls, topic: str, wanted: Wanted, isolation: Isolation, trigger: Trigger, splits: int | None
) -> Extent:
    return whole_extent(
        calls,
        topic,
        start=wanted.start,
        end=wanted.end,
        max_messages=trigger.max_messages,
        max_bytes=trigger.max_bytes,
        splits=splits,
        isolation=isolation,
    )


def _is_full(extent: Extent, trigger: Trigger) -> bool:
    """True if the topic may have more than the bounds allow."""
    if trigger.max_messages is not None and extent.messages >= trigger.max_messages:
        return True
    return trigger.max_bytes is not None and extent.messages > 0


def _in_turn(topics: Mapping[str, int], turn: int) -> list[str]:
    names = sorted(topics)
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def fair_shares(room: int, wanted: Mapping[str, int], turn: int) -> dict[str, int]:
    """Divide ``room`` equally; no topic gets more than it wants, and the others share the rest.

    Args:
      wanted: by topic, more than 0 each.
      turn: rotates which topics get the remainder, so that none starves.
    """
    names = sorted(wanted)
    first = turn % len(names) if names else 0
    waiting = names[first:] + names[:first]
    shares = dict.fromkeys(names, 0)
    while waiting and room >= len(waiting):
        each = room // len(waiting)
        for name in waiting:
            more = min(each, wanted[name] - shares[name])
            shares[name] += more
            room -= more
        waiting = [name for name in waiting if shares[name] < wanted[name]]
    for name in waiting[:room]:
        shares[name] += 1
    return shares
