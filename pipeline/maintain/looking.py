"""One topic looked at: what may go from it, cut into parts, and what waits to go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.maintain.asking import Waiting, check_unchanged, limits_of, waiting
from pipeline.maintain.plan import Limits, plan
from pipeline.maintain.ranges import KeyRange, cut, time_bounds
from protocol.ids import unpack_position
from protocol.keys import generation_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client


@dataclass(frozen=True, slots=True)
class Look:
    """What was found."""

    limits: Limits
    waiting: Waiting
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
