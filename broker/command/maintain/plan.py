"""Plans the cleaning of a topic: ranges of keys, from the daemon's answer, by the same rules as its janitor.

The daemon answers ``POST …/maintenance`` once its answer is durable. So a plan stays valid while the topic has the same
generation: messages that have expired stay expired, and the topic never returns to an earlier generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from plainsong.cli.maintenance import maintenance
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import GenerationChanged, MalformedBody
from plainsong.protocol.ids import FIRST_BOUND, POSITION_BYTES, pack_position, parse_id, unpack_position
from plainsong.protocol.keys import generation_prefix, generations_range, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.upkeep import expired_range, older_generations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong import Client

#: ``expired``, ``generation``: every row of the range may be removed. ``invalid``: rows that carry one of the pointers
#: are rolled back, and none is removed.
Why = Literal["expired", "generation", "invalid"]


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The ranges of a topic that may be cleaned, and the rows that wait for it."""

    limits: Limits
    waiting: Uncleaned
    parts: Sequence[KeyRange]


@dataclass(frozen=True, slots=True)
class Uncleaned:
    """Stored rows of a topic that readers can no longer see."""

    created_ms: int
    """When the generation was created."""
    expired: int
    """Expired messages."""
    estimated: bool
    """True if ``expired`` is a lower bound, since there were too many to count."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A daemon's answer: the bounds of what may be removed from a topic."""

    name: TopicName
    generation: int
    expired_before_ms: int
    """Messages published before this, in milliseconds since 1970, have expired for good."""
    invalid: tuple[int, ...] | None
    """Write pointers of invalid transactions with messages here; None if the transaction service is unavailable."""
    snapshot_position: bytes | None
    """An id: the state of the producers does not depend on the messages before it; None if there are no producers."""

    @classmethod
    def of(cls, name: TopicName, answer: Mapping[str, Any]) -> Limits:
        """Parse the answer of ``POST …/maintenance``. Raises MalformedBody if a field is missing or malformed."""
        try:
            invalid, position = answer["invalid"], answer["snapshotPosition"]
            return cls(
                name,
                int(answer["generation"]),
                int(answer["expiredBefore"]),
                None if invalid is None else tuple(sorted(map(int, invalid))),
                None if position is None else parse_id(position),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedBody(f"the daemon's answer to /maintenance is incomplete: {error!r}") from error


@dataclass(frozen=True, slots=True)
class KeyRange:
    """``start <= key < stop`` of one table, and what may happen to its rows."""

    table: Table
    start: bytes
    stop: bytes
    why: Why
    pointers: tuple[int, ...] = ()
    """Write pointers of invalid transactions, ascending; only for ``invalid``."""

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key < self.stop


# --- asking the daemon -------------------------------------------------------------------------------


def plan_topic(client: Client, topic: str, parts: int) -> TopicPlan:
    """Ask the daemon about a topic, make a plan, and check that the topic has not changed since.

    Args:
      parts: number of parts to cut the range of expired messages into, by time.
    Raises:
      GenerationChanged, TopicNotFound: the topic has changed, and the plan is void.
    """
    limits = limits_of(client, topic)
    waiting = uncleaned(client, topic)
    found = [part for whole in plan(limits) for part in _cut_by_time(whole, limits, waiting.created_ms, parts)]
    check_unchanged(client, limits)
    return TopicPlan(limits, waiting, found)


def limits_of(client: Client, topic: str) -> Limits:
    """Ask for the bounds of a topic, which records its time on disk first. Raises TopicNotFound."""
    return Limits.of(TopicName(client.namespace, topic), maintenance(client, topic))


def uncleaned(client: Client, topic: str) -> Uncleaned:
    """Ask for the rows of a topic that no reader can see. Raises TopicNotFound."""
    stats = client.admin.stats(topic, reader=FIRST_BOUND)
    reader = stats["reader"]
    return Uncleaned(int(stats["createdMs"]), int(reader["expiredUnread"]), bool(reader["estimated"]))


def check_unchanged(client: Client, limits: Limits) -> None:
    """Check that the topic still has the plan's generation: in any other, the plan is void.

    Raises:
      GenerationChanged, TopicNotFound: the topic has another generation, or is gone.
      PlainsongError: the daemon does not answer; the plan must not be carried out.
    """
    generation = int(client.admin.properties(limits.name.topic)["generation"])
    if generation != limits.generation:
        raise GenerationChanged(f"topic {limits.name} is generation {generation} by now, not {limits.generation}")


# --- ranges ------------------------------------------------------------------------------------------


def plan(limits: Limits) -> list[KeyRange]:
    """Return the ranges of a topic to clean; those of one table do not overlap.

    All messages and payloads of older generations may be removed. Expired messages of the current generation may be
    removed unless the state of the producers depends on them, each after the payload rows it refers to. After that,
    messages of invalid transactions are rolled back, if it is known which transactions are invalid.
    """
    prefix = generation_prefix(limits.name, limits.generation)
    found: list[KeyRange] = []
    older = older_generations(limits.generation)
    if older is not None:
        start, stop = generations_range(limits.name, *older)
        found += [KeyRange(table, start, stop, "generation") for table in (Table.MESSAGE, Table.PAYLOAD)]
    start, stop = expired_range(prefix, limits.expired_before_ms)
    if limits.snapshot_position is not None:
        stop = min(stop, prefix + limits.snapshot_position[:POSITION_BYTES])
    if start < stop:
        found.append(KeyRange(Table.MESSAGE, start, stop, "expired"))
    if limits.invalid:
        found.append(KeyRange(Table.MESSAGE, stop, stop_after(prefix), "invalid", limits.invalid))
    return found


def cut(whole: KeyRange, bounds: Iterable[bytes]) -> list[KeyRange]:
    """Cut a range into parts, in key order: none overlaps another, none is empty, and together they are the whole.

    Args:
      bounds: keys at which parts begin, in any order; those outside of the range are ignored.
    """
    inside = sorted({bound for bound in bounds if whole.start < bound < whole.stop})
    starts = [whole.start, *inside]
    stops = [*inside, whole.stop]
    return [replace(whole, start=start, stop=stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def time_bounds(prefix: bytes, first_ms: int, last_ms: int, parts: int) -> list[bytes]:
    """Return bounds that cut the message keys of one generation into ``parts`` of equal duration.

    Args:
      prefix: the prefix of the generation's keys.
      first_ms, last_ms: when its first and its last message were published.
    """
    length_ms = max(0, last_ms - first_ms)
    return [prefix + pack_position(first_ms + length_ms * part // parts, 0) for part in range(1, parts)]


def _cut_by_time(whole: KeyRange, limits: Limits, created_ms: int, parts: int) -> list[KeyRange]:
    if whole.why != "expired":
        return [whole]
    prefix = generation_prefix(limits.name, limits.generation)
    last_ms, _ = unpack_position(whole.stop[len(prefix) :])
    return cut(whole, time_bounds(prefix, created_ms, last_ms, parts))
