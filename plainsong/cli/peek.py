"""``plainsong peek``: looks at messages one by one: state, size, expiry, whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables
from plainsong.cli.say import echo_json, note
from plainsong.cli.shapes import harmless, payload_json
from plainsong.cli.times import Place, now_ms, show_length, show_time
from plainsong.cli.verb import Verb, json_option, one_line
from plainsong.cli.where import complete_topic, where_options
from protocol.ids import after

if TYPE_CHECKING:
    from plainsong import Seen
    from plainsong.cli.where import Where
    from plainsong.starts import Start

#: Shown unless somebody wants more. The daemon gives so many at once, at most.
DEFAULT_LIMIT = 10
MAX_LIMIT = 1_000


@click.command(
    cls=Verb,
    examples=[
        "plainsong peek orders",
        "plainsong peek orders --last 3",
        "plainsong peek orders --from -10m --limit 100 --json",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here; oldest by default.")
@click.option("--to", "until", type=Place(now="this computer's"), metavar="PLACE", help="End before this.")
@click.option("--last", type=click.IntRange(1, MAX_LIMIT), metavar="N", help="The last N messages.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=DEFAULT_LIMIT, show_default=True, metavar="N")
@json_option
@where_options
def peek(topic: str, start: Start, until: Start, last: int | None, limit: int, as_json: bool, where: Where) -> None:
    """Look at messages: state, size, expiry.

    A message with a producer is shown with its sequence id, one of an atomic
    batch with its place there, and attributes stand on a line of their own.
    Also shows what readers do not get: messages of open or rolled-back
    transactions, and rows that are damaged. Nothing is consumed.
    """
    if last is not None and start is not None:
        raise click.UsageError("--from and --last exclude each other")
    with where.client(topic) as client:
        if last is not None:
            at = client.position_of_last(topic, last)
            start, limit = (None if at is None else after(at)), last
        seen = client.messages(topic, start, until=until, limit=limit)
    now = now_ms()
    for each in seen:
        if as_json:
            echo_json(_as_json(each))
        else:
            tables.echo_lines(_lines(each, now))
    if not seen:
        note("there is nothing to see")


def _lines(seen: Seen, now: int) -> list[str]:
    """What is known of it, what it is, and then its request and its attributes, if it has any."""
    if seen.state == "damaged":
        return [f"{seen.id}  damaged", f"  {one_line(seen.detail)}"]
    expires = "" if seen.expires_ms is None else f"  expires in {show_length(max(0, seen.expires_ms - now))}"
    pointer = "" if seen.write_pointer is None else f" by {seen.write_pointer}"
    first = f"{seen.id}  {seen.state}{pointer}  {tables.show_bytes(seen.size)}{expires}"
    time = show_time(seen.publish_time_ms)
    shown = harmless(seen.payload[:1000].replace(b"\n", b" ").replace(b"\t", b" ")).decode("utf-8", "replace")
    lines = [first, f"  {time}  {tables.cut(shown, tables.width() - len(time) - 4)}".rstrip()]
    lines += [f"  {tables.cut(one_line(said), tables.width() - 2)}" for said in (_origin(seen), _strings(seen)) if said]
    return lines


def _origin(seen: Seen) -> str:
    """Producer, sequence id and place in a batch, as far as it has them."""
    parts = []
    if seen.producer is not None:
        parts.append(f"producer {seen.producer}")
    if seen.sequence_id is not None:
        parts.append(f"sequence id {seen.sequence_id}")
    if seen.batch is not None:
        parts.append(f"message {seen.batch.index + 1} of {seen.batch.count} in a batch")
    return ", ".join(parts)


def _strings(seen: Seen) -> str:
    return "  ".join(f"{name}={text}" for name, text in seen.attributes.items())


def _as_json(seen: Seen) -> dict[str, Any]:
    return {
        "id": str(seen.id),
        "publishTimeMs": seen.publish_time_ms,
        "expiresMs": seen.expires_ms,
        "state": seen.state,
        "writePointer": None if seen.write_pointer is None else str(seen.write_pointer),
        "size": seen.size,
        "payload": payload_json(seen.payload),
        "attributes": dict(seen.attributes),
        "producer": seen.producer,
        "sequenceId": seen.sequence_id,
        "batch": None if seen.batch is None else {"index": seen.batch.index, "count": seen.batch.count},
        **({"detail": seen.detail} if seen.detail else {}),
    }
