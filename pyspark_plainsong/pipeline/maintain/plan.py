"""What of a topic may go, as ranges of keys: the daemon is asked, the core's rules decide, long ranges are cut.

One topic looked at: what may go from it, cut into parts, and what waits to go.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from plainsong.calls import Call, Request, topic_path
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import GenerationChanged, MalformedBody
from plainsong.protocol.ids import FIRST_BOUND, pack_position, parse_id, unpack_position
from plainsong.protocol.keys import generation_prefix, generations_range, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.upkeep import expired_range, older_generations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong import Client
    from plainsong.calls import Answer


@dataclass(frozen=True, slots=True)
class Look:
    """What was found."""

    limits: Limits
    waiting: Uncleaned
    parts: Sequence[KeyRange]


def look_at(client: Client, topic: str, parts: int) -> Look:
    """Ask about a topic, plan, and ask again whether it is still the same.

    Args:
      parts: into how many the range of expired messages is cut, by time.
    Raises:
      GenerationChanged, TopicNotFound: it is another one by now, and what was found is void.
    """
    limits = limits_of(client, topic)
    rows = waiting(client, topic)
    found = [part for whole in plan(limits) for part in _cut(whole, limits, rows.created_ms, parts)]
    check_unchanged(client, limits)
    return Look(limits, rows, found)


def _cut(whole: KeyRange, limits: Limits, created_ms: int, parts: int) -> list[KeyRange]:
    if whole.why != "expired":
        return [whole]
    prefix = generation_prefix(limits.name, limits.generation)
    last_ms, _ = unpack_position(whole.stop[len(prefix) :])
    return cut(whole, time_bounds(prefix, created_ms, last_ms, parts))


A = TypeVar("A")


# --- asking ----------------------------------------------------------------------------------------
#
# What the daemon is asked before anything may go, and once more before each part: is it still the same topic?


@dataclass(frozen=True, slots=True)
class Uncleaned:
    """Rows of a topic that nobody can see any more, and that are still there."""

    created_ms: int
    """When the generation was made."""
    expired: int
    """Expired messages."""
    estimated: bool
    """``expired`` is a lower bound: there were too many to count."""


def store_kind(client: Client) -> str:
    """What the daemon keeps its tables in: ``leveldb``, ``memory``."""
    return str(_run(client, Call(Request("GET", "/version"), _json)).get("store", ""))


def limits_of(client: Client, topic: str) -> Limits:
    """What may go, as ``Limits``; the topic notes its time on disk first. Raises TopicNotFound."""
    path = topic_path(client.namespace, topic, "/maintenance?longs=string")
    told = _run(client, Call(Request("POST", path), _json, "harmless"))
    return Limits.of(TopicName(client.namespace, topic), told)


def waiting(client: Client, topic: str) -> Uncleaned:
    """What the topic still holds for nobody. Raises TopicNotFound."""
    told = client.stats(topic, reader=FIRST_BOUND)
    reader = told["reader"]
    return Uncleaned(int(told["createdMs"]), int(reader["expiredUnread"]), bool(reader["estimated"]))


def check_unchanged(client: Client, limits: Limits) -> None:
    """Ask for the topic's generation again: a plan is of one generation, and void in any other.

    Raises:
      GenerationChanged, TopicNotFound: it has another one, or is gone.
      PlainsongError: nobody could be asked; the plan must not be carried out.
    """
    generation = int(client.properties(limits.name.topic)["generation"])
    if generation != limits.generation:
        raise GenerationChanged(f"topic {limits.name} is generation {generation} by now, not {limits.generation}")


def _run(client: Client, call: Call[A]) -> A:
    return client._channel.call(call)


def _json(answer: Answer) -> dict[str, Any]:
    return dict(json.loads(answer.body))


# --- plan ------------------------------------------------------------------------------------------
#
# What of a topic may go: the daemon's word, and the rules of the core, made into ranges of keys.
#
# The daemon answers ``/maintenance`` when what it says is durable, so a plan stays true for as long as the
# generation is the same: messages that have expired stay expired, and a generation that was left is never entered
# again.


_POSITION_BYTES = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What a daemon said of a topic when it was asked what may go."""

    name: TopicName
    generation: int
    expired_before_ms: int
    """What was published before, in milliseconds since 1970, has expired for good."""
    invalid: tuple[int, ...] | None
    """Write pointers of invalid transactions with messages here; None: nobody could say."""
    snapshot_position: bytes | None
    """An id: messages before it are needed no more to know what producers sent; None: there are no producers."""

    @classmethod
    def of(cls, name: TopicName, told: Mapping[str, Any]) -> Limits:
        """The answer of ``POST …/maintenance``. Raises MalformedBody: it is another one."""
        try:
            invalid, position = told["invalid"], told["snapshotPosition"]
            return cls(
                name,
                int(told["generation"]),
                int(told["expiredBefore"]),
                None if invalid is None else tuple(sorted(map(int, invalid))),
                None if position is None else parse_id(position),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedBody(f"an answer of /maintenance without what it needs: {error!r}") from error


def plan(limits: Limits) -> list[KeyRange]:
    """The ranges of a topic, none of which overlaps another of its table.

    Of older generations all messages and payloads. Of the living one the expired messages, each after the payload
    rows it refers to, up to where what producers sent is noted elsewhere. Of the rest those of invalid transactions
    are rolled back; where nobody can say whose they are, nothing is.
    """
    prefix = generation_prefix(limits.name, limits.generation)
    found: list[KeyRange] = []
    older = older_generations(limits.generation)
    if older is not None:
        start, stop = generations_range(limits.name, *older)
        found += [KeyRange(table, start, stop, "generation") for table in (Table.MESSAGE, Table.PAYLOAD)]
    start, stop = expired_range(prefix, limits.expired_before_ms)
    if limits.snapshot_position is not None:
        stop = min(stop, prefix + limits.snapshot_position[:_POSITION_BYTES])
    if start < stop:
        found.append(KeyRange(Table.MESSAGE, start, stop, "expired"))
    if limits.invalid:
        found.append(KeyRange(Table.MESSAGE, stop, stop_after(prefix), "invalid", limits.invalid))
    return found


# --- ranges ----------------------------------------------------------------------------------------
#
# Ranges of row keys, and how they are cut into parts that are worked on side by side.


#: ``expired``, ``generation``: every row of the range may be removed. ``invalid``: its rows that carry one of the
#: pointers are to be rolled back, and none is removed.
Why = Literal["expired", "generation", "invalid"]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """``start <= key < stop`` of one table, and why its rows are of interest."""

    table: Table
    start: bytes
    stop: bytes
    why: Why
    pointers: tuple[int, ...] = ()
    """Write pointers of invalid transactions, ascending; for ``invalid`` alone."""

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key < self.stop


def cut(whole: KeyRange, bounds: Iterable[bytes]) -> list[KeyRange]:
    """The range in parts, in key order: none overlaps another, none is empty, and together they are the whole.

    Args:
      bounds: keys at which parts begin, such as the start keys of a table's regions; in any order, those outside
        of the range count for nothing.
    """
    inside = sorted({bound for bound in bounds if whole.start < bound < whole.stop})
    starts = [whole.start, *inside]
    stops = [*inside, whole.stop]
    return [replace(whole, start=start, stop=stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def time_bounds(prefix: bytes, first_ms: int, last_ms: int, parts: int) -> list[bytes]:
    """Bounds that cut the message keys of one generation into ``parts`` of equal times, for a store without regions.

    Args:
      prefix: what the generation's keys start with.
      first_ms, last_ms: between which its messages were published.
    """
    length_ms = max(0, last_ms - first_ms)
    return [prefix + pack_position(first_ms + length_ms * part // parts, 0) for part in range(1, parts)]
