"""``plainsong poll``: reads messages of one topic, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from plainsong.cli.isolation import isolation_option, why_held
from plainsong.cli.printer import Printer, printing_options
from plainsong.cli.say import note
from plainsong.cli.times import Length, Place
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong import Client, Page
    from plainsong.cli.shapes import Shape
    from plainsong.cli.where import Where
    from plainsong.starts import Start
    from protocol.requests import Isolation

#: Fetched at once when all of a topic is read: what is held in memory.
PAGE_MESSAGES = 10_000
#: The daemon's own bound on one wait.
MAX_WAIT_MS = 60_000


@click.command(
    cls=Verb,
    examples=[
        "plainsong poll greetings",
        "plainsong poll greetings --last 10 -f '%T %i %p'",
        "plainsong poll orders --from -10m --until-empty --json",
        "plainsong poll orders --from 2026-01-31 --to 2026-02-01 --until-empty",
        "plainsong poll orders --from now --wait 30s",
        "plainsong poll orders --isolation committed --until-empty",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here; oldest by default.")
@click.option("--after", type=Place(), metavar="ID", help="Start just behind this message.")
@click.option("--to", "until", type=Place(now="this computer's"), metavar="PLACE", help="End before this.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N messages.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N messages.")
@click.option("--until-empty", is_flag=True, help="Page by page, to the end.")
@click.option("--wait", "wait_ms", type=Length(0.001), metavar="TIME", help="If there is none, wait for one.")
@isolation_option
@printing_options
@json_option
@where_options
def poll(
    topic: str,
    start: Start,
    after: Start,
    until: Start,
    last: int | None,
    limit: int | None,
    until_empty: bool,
    wait_ms: int | None,
    isolation: Isolation | None,
    shape: Shape | None,
    null: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Read messages of a topic and stop.

    Prints one page: as much as the daemon gives at once. --until-empty, --last
    and --limit read on for as long as it takes. Nothing is consumed: reading
    again reads the same.

    A PLACE is an id, a time (2026-01-31T12:00Z, or milliseconds since 1970),
    that long ago (-10m, -2h, -7d), oldest or now. --from an id begins with that
    message, --after it with the next.

    With --isolation committed it ends at the first message whose transaction is
    undecided.
    """
    if sum(each is not None for each in (start, after, last)) > 1:
        raise click.UsageError("--from, --after and --last exclude each other")
    printer = Printer(shape, null=null, as_json=as_json)
    with where.client(topic) as client:
        begin: Start = after if after is not None else start
        inclusive: bool | None = None
        if isinstance(start, bytes):
            inclusive = True
        if last is not None:
            begin = client.position_of_last(topic, last)
        page: Page | None = None
        bounds = Bounds(inclusive, until, isolation, limit, wait_ms or 0)
        pages = _pages(client, topic, begin, bounds)
        for page in pages:
            printer.write(page)
            if not (until_empty or last or limit):
                break
    if page is not None and page.end == "more" and printer.count != limit:
        note(f"there is more: --until-empty reads on, --after {page.last_id} begins there")
    if page is not None and page.end == "held":
        note(why_held(topic, page.held))
    elif not printer.count:
        note("there are no messages here" if start is None else "there are no messages from there on")


class Bounds(NamedTuple):
    """What is read of a topic."""

    inclusive: bool | None
    until: Start
    isolation: Isolation | None
    limit: int | None
    wait_ms: int


def _pages(client: Client, topic: str, start: Start, bounds: Bounds) -> Iterator[Page]:
    """Pages until the end, or until there were ``limit`` messages."""
    inclusive, until, isolation, left, wait_left_ms = bounds
    while left is None or left > 0:
        at_once = PAGE_MESSAGES if left is None else min(left, PAGE_MESSAGES)
        wait_now_ms = min(wait_left_ms, MAX_WAIT_MS)
        page = client.poll(
            topic,
            start,
            inclusive=inclusive,
            limit=at_once,
            until=until,
            wait_ms=wait_now_ms or None,
            isolation=isolation,
        )
        wait_left_ms -= wait_now_ms
        if page.last_id is not None:
            start, inclusive = page.last_id, False
        if len(page) or wait_left_ms <= 0:
            yield page
            if page.end != "more":
                return
            left = None if left is None else left - len(page)
            wait_left_ms = 0
