"""Following topics: waiting for news of them, going forward within bounds, and noticing what was lost on the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pyspark_plainsong.calls import MAX_AWAITED
from pyspark_plainsong.measuring import Wanted, measure
from pyspark_plainsong.offsets import FIRST, ID_BYTES, Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark_plainsong.answers import Extent
    from pyspark_plainsong.calls import Calls
    from pyspark_plainsong.loss import Losses
    from pyspark_plainsong.measuring import Trigger
    from pyspark_plainsong.subscription import Subscription


class _CaughtUp(NamedTuple):
    """At this time there was nothing from this position on."""

    position: Position
    at_s: float


class Following:
    """What one query's source has learnt of its topics. All of it may be lost: it only saves questions and alarms."""

    def __init__(self, calls: Calls, subscription: Subscription, losses: Losses) -> None:
        self._calls = calls
        self._subscription = subscription
        self._losses = losses
        self._turn = 0
        #: Where to look on: between a stream's position and this there is nothing to be read, now or ever.
        self._looked: dict[str, tuple[Position, bytes]] = {}
        self._caught_up: dict[str, _CaughtUp] = {}
        #: Before which, from a stream's position on, nothing was published, whatever has expired.
        self._complete_from: dict[str, tuple[bytes, bytes]] = {}
        #: The position behind what is to be read, as far as it is known.
        self.newest: dict[str, Position] = {}

    def advance(
        self, known: Mapping[str, Position], trigger: Trigger, targets: Mapping[str, bytes] | None, *, wait_ms: int
    ) -> dict[str, Position]:
        """The positions after the next micro-batch: ``known`` and new topics, moved as far as ``trigger`` allows.

        Args:
          targets: nothing is read behind these, nor of other topics, and nothing is waited for.
          wait_ms: how long to wait when there is nothing.
        Raises:
          BrokerError, DataLoss: nothing was moved.
        """
        found = dict(known)
        topics = self._subscription.topics() if targets is None else sorted(targets)
        for topic in topics:
            if topic not in found:
                generation = self._subscription.generation(topic)
                if generation is not None:
                    found[topic] = Position(generation, FIRST)  # it joined later, so all of it is new
        for topic in known:
            if topic not in topics and self._subscription.has(topic):
                self._losses.deleted(topic)
        followed = {topic: found[topic] for topic in topics if topic in found}
        if targets is None:
            wanted = {topic: Wanted(self._look_from(topic, found), None) for topic in self._news(followed, wait_ms)}
        else:
            wanted = {
                topic: Wanted(each.next, targets[topic])
                for topic, each in followed.items()
                if each.next < targets[topic]
            }
        self._turn += 1
        measured = measure(self._calls, wanted, self._subscription.isolation, trigger, self._turn)
        for topic, each in measured.items():
            if each is None:
                self._losses.deleted(topic)
                continue
            found[topic] = self._moved(topic, found[topic], each.extent)
            self.newest[topic] = (
                Position(found[topic].generation, self._subscription.newest(topic)) if each.is_cut else found[topic]
            )
        self.newest = {topic: self.newest.get(topic, position) for topic, position in found.items()}
        return found

    def complete_from(self, topic: str, start: bytes) -> bytes:
        """From where on a range that starts at ``start`` has to be complete."""
        position, later = self._complete_from.get(topic, (start, start))
        return max(start, later) if position == start else start

    # --- waiting -------------------------------------------------------------------------------

    def _look_from(self, topic: str, positions: Mapping[str, Position]) -> bytes:
        position, later = self._looked.get(topic, (None, FIRST))
        return later if position == positions[topic] else positions[topic].next

    def _news(self, positions: Mapping[str, Position], wait_ms: int) -> list[str]:
        """Topics with something to read, or about which something is to be said."""
        names = sorted(positions)
        asked_at_once = [names[first : first + MAX_AWAITED] for first in range(0, len(names), MAX_AWAITED)]
        found: list[str] = []
        for some in asked_at_once:
            begun_s = time.monotonic()
            answer = self._calls.wait_for_news(
                {topic: self._look_from(topic, positions) for topic in some},
                isolation=self._subscription.isolation,
                wait_ms=wait_ms if len(asked_at_once) == 1 else 0,
            )
            found += [*answer.topics, *answer.unreadable]
            for topic, later in answer.quiet.items():
                position = positions[topic]
                self._caught_up[topic] = _CaughtUp(position, begun_s)
                self._looked[topic] = (position, max(position.next, later))
        if not found and len(asked_at_once) != 1:
            time.sleep(wait_ms / 1000)
        return found

    # --- going forward -------------------------------------------------------------------------

    def _moved(self, topic: str, position: Position, extent: Extent) -> Position:
        """The position behind an extent; a new generation is read from its start, next time. Raises DataLoss."""
        if extent.generation != position.generation:
            self._losses.recreated(topic, position.generation, extent.generation)
            return Position(extent.generation, FIRST)
        if not extent.messages:
            return position
        if position.next != FIRST and position.next < extent.earliest:
            self._check_expiry(topic, position, extent)
        return Position(position.generation, extent.end)

    def _check_expiry(self, topic: str, position: Position, extent: Extent) -> None:
        """Messages expired behind this position. Whether there were any is certain while we have been looking on."""
        seen = self._caught_up.get(topic)
        if seen and seen.position == position and time.monotonic() - seen.at_s < self._calls.describe(topic).ttl_s:
            # What has come since then has not been there for long enough to expire: its first message is there.
            self._complete_from[topic] = (position.next, self._first_id(topic, position.next, extent.end))
        else:
            self._losses.expired(topic, position.next, extent.earliest)

    def _first_id(self, topic: str, start: bytes, end: bytes) -> bytes:
        page = self._calls.poll_frames(
            topic, start=start, end_before=end, limit=1, isolation=self._subscription.isolation
        )
        return page.body[:ID_BYTES] if page.last_id is not None else start
