"""Ranges of topics cut into the partitions that tasks read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from pyspark_plainsong.extents import whole_extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark_plainsong.calls import Calls, Isolation

#: Parts that the daemon cuts a range into at once.
_MAX_SPLITS = 1_000
#: Tasks of one job: beyond it maxRecordsPerPartition is a mistake.
MAX_PARTITIONS = 100_000


@dataclass(frozen=True)
class TopicRange(InputPartition):
    """Messages of one topic, ``start <= id < end``: the same rows whenever and however often it is read."""

    topic: str
    generation: int
    start: bytes
    end: bytes
    isolation: Isolation
    complete_from: bytes | None = None
    """From here on nothing may be missing: it had not expired when the range was made. None: expiry is expected."""

    def from_to(self, start: bytes, end: bytes) -> TopicRange:
        """A part of it."""
        complete_from = None if self.complete_from is None else max(start, self.complete_from)
        return replace(self, start=start, end=end, complete_from=complete_from)


class TooManyPartitions(ValueError):
    """The options ask for more partitions than a job can have."""


def cut(
    calls: Calls, ranges: Sequence[TopicRange], min_partitions: int | None, max_records: int | None
) -> list[TopicRange]:
    """``ranges`` in at least so many parts, as far as there are messages, of at most so many messages each.

    Parts may end inside what one transaction, or one batch, stored.

    Raises:
      TooManyPartitions, BrokerError: nothing was read.
    """
    parts = list(ranges)
    if min_partitions is not None and parts and len(parts) < min_partitions:
        parts = _in_parts(calls, parts, min_partitions)
    if max_records is not None:
        parts = _in_steps(calls, parts, max_records)
    return parts


def _in_parts(calls: Calls, ranges: Sequence[TopicRange], wanted: int) -> list[TopicRange]:
    """Each range in parts of about equal bytes (of very long ones: of about equal counts), more of them for the larger ones."""
    splits = min(_MAX_SPLITS, 4 * wanted)
    extents = [
        whole_extent(calls, each.topic, start=each.start, end=each.end, isolation=each.isolation, splits=splits)
        for each in ranges
    ]
    total = sum(extent.size_bytes for extent in extents) or 1
    # Every range has one; what is left is shared out by bytes, rounded up so that there are enough.
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
    at = whole.start
    while at < whole.end:
        extent = calls.offsets(
            whole.topic, start=at, end=whole.end, max_messages=max_records, isolation=whole.isolation
        )
        # What ends before it is full has no more messages: nothing is left for another part.
        stop = extent.end if extent.messages >= max_records else whole.end
        stop = min(stop, whole.end)
        yield whole.from_to(at, stop)
        at = stop


def _between(whole: TopicRange, bounds: Sequence[bytes]) -> Iterator[TopicRange]:
    for start, end in pairwise(bounds):
        yield whole.from_to(start, end)
