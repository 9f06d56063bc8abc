"""What of a topic may go: the daemon's word, and the rules of the core, made into ranges of keys.

The daemon answers ``/maintenance`` when what it says is durable, so a plan stays true for as long as the generation
is the same: messages that have expired stay expired, and a generation that was left is never entered again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.maintain.ranges import KeyRange
from protocol.effects import Table
from protocol.errors import MalformedBody
from protocol.ids import parse_id
from protocol.keys import generation_prefix, generations_range, stop_after
from protocol.topic.cleaning import expired_range, older_generations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.names import TopicName

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
