"""How far the next micro-batch goes in each topic: what is there, within the bounds of a trigger, fair between topics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark_plainsong.extents import whole_extent
from pyspark_plainsong.shares import fair_shares
from pyspark_plainsong.wire_errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark_plainsong.answers import Extent
    from pyspark_plainsong.calls import Calls, Isolation


class Wanted(NamedTuple):
    """What is looked for in one topic."""

    start: bytes
    end: bytes | None
    """Exclusive; None: all there is."""


@dataclass(frozen=True)
class Trigger:
    """The bounds of a micro-batch, over all topics."""

    max_messages: int | None
    max_bytes: int | None
    """One message may be larger, if it is alone."""


class Measured(NamedTuple):
    """What was found in one topic."""

    extent: Extent
    is_cut: bool
    """The trigger's bounds left something for a later batch."""


def measure(
    calls: Calls, wanted: Mapping[str, Wanted], isolation: Isolation, trigger: Trigger, turn: int
) -> dict[str, Measured | None]:
    """The extents to read now; None: there is no such topic (any more).

    Topics that get nothing this time have an extent without messages, at their start.

    Raises:
      BrokerError: a topic cannot be read.
    """
    extents: dict[str, Extent] = {}
    found: dict[str, Measured | None] = {}
    for topic, each in wanted.items():
        extent = _extent_or_none(calls, topic, each, isolation, trigger)
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
            extent = _within(calls, topic, wanted[topic], isolation, message_shares[topic], byte_shares[topic])
            found[topic] = Measured(extent, is_cut=True)
        size = extent.size_bytes
        if trigger.max_bytes is not None and used_bytes and used_bytes + size > trigger.max_bytes:
            # Its first message alone is larger than its share, and others have taken the room: another time.
            found[topic] = Measured(_nothing(extent, wanted[topic].start), is_cut=True)
            continue
        used_bytes += size
    return found


def _within(
    calls: Calls, topic: str, wanted: Wanted, isolation: Isolation, max_messages: int, max_bytes: int
) -> Extent:
    """A share of a topic; of bytes one message is the least."""
    trigger = Trigger(max(1, max_messages), max(1, max_bytes))
    extent = _extent(calls, topic, wanted, isolation, trigger)
    return extent if max_messages else _nothing(extent, wanted.start)


def _nothing(extent: Extent, start: bytes) -> Extent:
    return extent._replace(end=start, messages=0, size_bytes=0, splits=())


def _extent_or_none(calls: Calls, topic: str, wanted: Wanted, isolation: Isolation, trigger: Trigger) -> Extent | None:
    try:
        return _extent(calls, topic, wanted, isolation, trigger)
    except BrokerError as error:
        if error.code == "topic_not_found":
            return None
        raise


def _extent(calls: Calls, topic: str, wanted: Wanted, isolation: Isolation, trigger: Trigger) -> Extent:
    return whole_extent(
        calls,
        topic,
        start=wanted.start,
        end=wanted.end,
        max_messages=trigger.max_messages,
        max_bytes=trigger.max_bytes,
        isolation=isolation,
    )


def _is_full(extent: Extent, trigger: Trigger) -> bool:
    """Whether there may be more than the bounds allow."""
    if trigger.max_messages is not None and extent.messages >= trigger.max_messages:
        return True
    return trigger.max_bytes is not None and extent.messages > 0


def _in_turn(topics: Mapping[str, int], turn: int) -> list[str]:
    names = sorted(topics)
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]
