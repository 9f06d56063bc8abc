"""Measures ranges of topics, and cuts them into the partitions that tasks read.

To measure, the daemon examines every message, about a million a second. So a long range is measured in several
requests, each of which stays within the request time-out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark_plainsong.calls import Calls, Extent, Isolation

#: Messages per measuring request.
STEP_MESSAGES = 5_000_000


def whole_extent(
    calls: Calls,
    topic: str,
    *,
    start: bytes,
    end: bytes | None,
    isolation: Isolation,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    splits: int | None = None,
    as_of_ms: int | None = None,
) -> Extent:
    """Return ``Calls.offsets`` for a range of any length, in as many requests as needed.

    Args:
      splits: parts of each step; the end of a step is a bound, too.
    Raises:
      BrokerError: the topic cannot be read.
    """

    def measured(at: bytes, messages: int, size_bytes: int) -> Extent:
        room = STEP_MESSAGES if max_messages is None else min(STEP_MESSAGES, max_messages - messages)
        return calls.offsets(
            topic,
            start=at,
            end=end,
            max_messages=room,
            max_bytes=None if max_bytes is None else max_bytes - size_bytes,
            splits=splits,
            isolation=isolation,
            as_of_ms=as_of_ms,
        )

    whole = measured(start, 0, 0)
    step = whole
    while step.messages == STEP_MESSAGES and whole.messages != max_messages and whole.size_bytes != max_bytes:
        step = measured(whole.end, whole.messages, whole.size_bytes)
        if step.generation != whole.generation or not step.messages:
            break
        if max_bytes is not None and whole.size_bytes + step.size_bytes > max_bytes:
            break  # the first message exceeds the remaining bytes
        whole = whole._replace(
            end=step.end,
            messages=whole.messages + step.messages,
            size_bytes=whole.size_bytes + step.size_bytes,
            splits=(*whole.splits, whole.end, *step.splits),
        )
    return whole


# --- partitions ------------------------------------------------------------------------------------

#: Parts that one request can cut a range into.
_MAX_SPLITS = 1_000
#: More tasks than this in one job mean that maxRecordsPerPartition is a mistake.
MAX_PARTITIONS = 100_000


@dataclass(frozen=True)
class TopicRange(InputPartition):
    """Messages of one topic, ``start <= id < end``. Every read of it returns the same rows, unless it ``grows``."""

    topic: str
    generation: int
    start: bytes
    end: bytes
    isolation: Isolation
    complete_from: bytes | None = None
    """No message from here on had expired when the range was made, so a missing one is a loss. None: messages may expire."""
    as_of_ms: int | None = None
    """Read what had been committed by this moment; None: by now."""
    grows: bool = False
    """Read up to the end of the topic when the task begins; ``end`` was its end when the range was made."""

    def from_to(self, start: bytes, end: bytes) -> TopicRange:
        """A part of the range."""
        complete_from = None if self.complete_from is None else max(start, self.complete_from)
        grows = self.grows and end == self.end
        return replace(self, start=start, end=end, complete_from=complete_from, grows=grows)


@dataclass(frozen=True)
class LaterTopics(InputPartition):
    """All messages of topics that match the pattern when the task begins, except the topics in ``known``."""

    known: frozenset[str]


class TooManyPartitions(ValueError):
    """The options ask for more partitions than a job can have."""


def splits_for(min_partitions: int | None) -> int | None:
    """Return into how many parts to measure ranges that are to be cut into partitions; None if they are not."""
    return None if min_partitions is None else min(_MAX_SPLITS, 4 * min_partitions)


def cut(
    calls: Calls,
    ranges: Sequence[TopicRange],
    min_partitions: int | None,
    max_records: int | None,
    measured: Mapping[TopicRange, Extent] | None = None,
) -> list[TopicRange]:
    """Cut ``ranges`` into ``min_partitions`` parts or more, of ``max_records`` messages each or fewer.

    A part may end between messages of one transaction or one batch.

    Args:
      measured: extents that are known, with ``splits_for(min_partitions)`` splits; the other ranges are measured.
    Raises:
      TooManyPartitions, BrokerError: nothing was read.
    """
    parts = list(ranges)
    if min_partitions is not None and parts and len(parts) < min_partitions:
        parts = _in_parts(calls, parts, min_partitions, measured or {})
    if max_records is not None:
        parts = _in_steps(calls, parts, max_records)
    return parts


def _in_parts(
    calls: Calls, ranges: Sequence[TopicRange], wanted: int, measured: Mapping[TopicRange, Extent]
) -> list[TopicRange]:
    """Cut each range into parts of about equal bytes, a very long one into parts of about equal counts.

    Larger ranges get more parts.
    """
    extents = [
        measured.get(each)
        or whole_extent(
            calls,
            each.topic,
            start=each.start,
            end=each.end,
            isolation=each.isolation,
            splits=splits_for(wanted),
            as_of_ms=each.as_of_ms,
        )
        for each in ranges
    ]
    total = sum(extent.size_bytes for extent in extents) or 1
    # Every range gets one part; the others are distributed by bytes, rounded up to reach the number wanted.
    left = wanted - len(ranges)
    found: list[TopicRange] = []
    for each, extent in zip(ranges, extents, strict=True):
        share = 1 - (-left * extent.size_bytes // total)
        bounds = [bound for bound in extent.splits if each.start < bound < each.end]
        chosen = [bounds[len(bounds) * part // share] for part in range(1, share)] if len(bounds) >= share else bounds
        found += _between(each, [each.start, *sorted(set(chosen)), each.end])
    return found


def _in_steps(calls: Calls, ranges: Sequence[TopicRange], max_records: int) -> list[TopicRange]:
    found: list[TopicRange] = []
    for each in ranges:
        for part in _steps(calls, each, max_records):
            if len(found) == MAX_PARTITIONS:
                raise TooManyPartitions(
                    f"maxRecordsPerPartition {max_records} makes more than {MAX_PARTITIONS} partitions: raise it"
                )
            found.append(part)
    return found


def _steps(calls: Calls, whole: TopicRange, max_records: int) -> Iterator[TopicRange]:
    if whole.start >= whole.end:
        yield whole
    at = whole.start
    while at < whole.end:
        extent = calls.offsets(
            whole.topic,
            start=at,
            end=whole.end,
            max_messages=max_records,
            isolation=whole.isolation,
            as_of_ms=whole.as_of_ms,
        )
        # A part that is not full is the last one: there are no more messages.
        stop = extent.end if extent.messages >= max_records else whole.end
        stop = min(stop, whole.end)
        yield whole.from_to(at, stop)
        at = stop


def _between(whole: TopicRange, bounds: Sequence[bytes]) -> Iterator[TopicRange]:
    for start, end in pairwise(bounds):
        yield whole.from_to(start, end)
