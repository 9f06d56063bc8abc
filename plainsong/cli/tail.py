"""``plainsong tail``: follows topics, also such as come later, and prints their messages as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.isolation import isolation_option
from plainsong.cli.patterns import chosen, is_pattern
from plainsong.cli.printer import Printer, printing_options
from plainsong.cli.say import note
from plainsong.cli.times import Place
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options
from plainsong.starts import NEWEST
from protocol.ids import before

if TYPE_CHECKING:
    from plainsong.cli.shapes import Shape
    from plainsong.cli.where import Where
    from plainsong.starts import Start
    from protocol.requests import Isolation


@click.command(
    cls=Verb,
    examples=[
        "plainsong tail greetings",
        "plainsong tail orders 'audit-*' -f '%T %t %p'",
        "plainsong tail orders --from -1h --json | jq .payload",
        "plainsong tail orders --last 10",
        "plainsong tail orders --isolation committed",
    ],
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC|PATTERN...", shell_complete=complete_topic)
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here instead of now: oldest, -10m, a time.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Print the last N messages first; for one topic.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="End after N messages.")
@isolation_option
@printing_options
@json_option
@where_options
def tail(
    topics: tuple[str, ...],
    start: Start,
    last: int | None,
    limit: int | None,
    isolation: Isolation | None,
    shape: Shape | None,
    null: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Follow topics: print messages as they come.

    Goes on until Ctrl-C, also while the daemon is restarted, and misses nothing
    meanwhile. A pattern such as 'orders-*' takes in topics that are created
    later, within ten seconds. With several topics the name stands before each
    message. With --isolation committed it waits before messages whose
    transaction is undecided; `plainsong tx blame` says whose that is.
    """
    several = len(topics) > 1 or is_pattern(topics[0])
    if last is not None and (several or start is not None):
        raise click.UsageError("--last is for one topic, and without --from")
    printer = Printer(shape, null=null, as_json=as_json, default="%t %p" if several else "%p")
    with where.client(*topics) as client:
        # Following waits for daemons and new topics for ever: what is wrong from the start is said first.
        there = client.topics()
        chosen(there, [each for each in topics if not is_pattern(each)])
        begin: Start = NEWEST if start is None else start
        if isinstance(start, bytes):
            begin = before(start)  # the client goes on behind an id, --from begins with it
        if last is not None:
            begin = client.position_of_last(topics[0], last)
    with where.client(*topics, retry=True) as client:
        note(f"following {', '.join(topics)}; Ctrl-C ends")
        for message in client.read(topics, begin, follow=True, limit=limit, isolation=isolation):
            printer.write([message])
    if limit is None:
        raise CommandFailed("there is nothing left to follow", hint="were the topics deleted?", code=Exit.NOT_FOUND)
