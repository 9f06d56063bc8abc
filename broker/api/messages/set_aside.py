"""Setting rows aside over HTTP: the remedy when damaged rows stop the readers of a topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.api.change import change_answer
from broker.api.messages.readers import message_id
from broker.http.messages import flag
from plainsong.protocol.errors import InvalidParameter, MalformedBody
from plainsong.protocol.ids import shown_id, unpack_position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.set_aside import SetAsideRange, SetAsides
    from broker.http.messages import Answer, Request
    from plainsong.protocol.answers.messages import ShownMessage
    from plainsong.protocol.records import SetAside

#: The header with the number of set-aside rows that a page passed.
HEADER = "Plainsong-Set-Aside"
_FIELDS = {"from": ("first", message_id), "to": ("last", message_id)}


@dataclass(frozen=True, slots=True)
class SettingAside:
    """The route that takes rows out of a topic's order."""

    set_asides: SetAsides

    async def set_aside(self, request: Request) -> Answer:
        """Move the rows between two ids, both included, to a file; readers skip them from then on.

        Raises:
          TopicNotFound, NotFound (there are no rows between them), InvalidMessageId, LowSpace: nothing happened.
        """
        name = request.name
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        given = request.fields(_FIELDS)
        if len(given) < len(_FIELDS):
            raise MalformedBody(
                "from and to must be ids", hint='send {"from": "<40 hex digits>", "to": "<40 hex digits>"}'
            )
        if given["last"] < given["first"]:
            raise InvalidParameter("from is after to", hint="send the lower id as from")
        found = await self.set_asides.set_aside(name, given["first"], given["last"], dry_run=dry_run)
        after = {
            "state": "set-aside",
            "from": shown_id(found.first),
            "to": shown_id(found.last),
            "rows": found.known_rows,
            "file": found.file,
        }
        effect = {
            "removes": {
                "messages": found.messages,
                "bytes": found.bytes,
                "estimated": bool(found.gaps),
                "oldestMs": unpack_position(found.first)[0],
                "newestMs": unpack_position(found.last)[0],
            },
            "damagedRows": found.damaged,
            "unreadable": len(found.gaps),
        }
        return change_answer(
            "topic.set-aside", str(name), None, after, dry_run=dry_run, effect=effect, warnings=_warnings(found)
        )


def _warnings(found: SetAsideRange) -> list[str]:
    whole = found.rows - found.damaged
    if whole:
        return [f"{whole} of these rows are intact: readers lose them too"]
    return []


def rows_of(stretches: Iterable[SetAside]) -> int:
    """Return the number of rows in these ranges; a range whose rows could not be counted is one."""
    return sum(1 if each.rows is None else each.rows for each in stretches)


def passed(stretches: Iterable[SetAside]) -> list[tuple[str, str]]:
    """Return the header of a page that passed these ranges."""
    count = rows_of(stretches)
    return [(HEADER, str(count))] if count else []


def entry(stretch: SetAside) -> ShownMessage:
    """Return a range as an entry among messages."""
    return {
        "state": "set-aside",
        "from": shown_id(stretch.first),
        "to": shown_id(stretch.last),
        "rows": stretch.rows,
    }
