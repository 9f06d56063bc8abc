"""Reading inside a transaction: with its snapshot, in its time, and with a position that is part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core.reading import Reading
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from plainsong.core.operations import Operations
    from plainsong.core.plan import Plan
    from plainsong.positions import Position
    from plainsong.transactions.course import Course


def reading_in(course: Course | None, operations: Operations, plan: Plan, position: Position | None) -> Reading:
    """A reading, part of a transaction if there is one.

    Raises:
      NoTransaction: it has ended. InvalidParameter: an isolation is asked for beside its snapshot.
    """
    if course is None:
        return Reading(operations, plan, position)
    if plan.isolation is not None:
        raise InvalidParameter("a transaction reads its own snapshot", hint="leave isolation out, or say direct=True")
    course.needed("reading")
    reading = Reading(operations, plan, position, lambda: course.needed("reading"))
    course.enlist(reading)
    return reading
