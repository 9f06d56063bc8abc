"""The verbs `poll`, `tail` and `peek`: read messages and stop, follow topics, look at single messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, json_option, one_line
from plainsong.cli.connection import complete_topic, where_options
from plainsong.cli.options import (
    Length,
    Place,
    as_of_option,
    chosen,
    is_pattern,
    isolation_option,
    show_length,
    show_time,
    why_held,
)
from plainsong.cli.output import echo_json, note, report
from plainsong.cli.printing import Printer, escaped_bytes, grep_option, payload_json, printing_options
from plainsong.messages import passed_rows
from plainsong.positions import NEWEST, now_ms
from plainsong.protocol.ids import FIRST_BOUND, after, before

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from re import Pattern

    from plainsong import Client, Page, Seen
    from plainsong.cli.connection import Where
    from plainsong.cli.printing import Shape
    from plainsong.positions import Daemon, Start
    from plainsong.protocol.requests import Isolation

#: Messages fetched and kept in memory at once when a whole topic is read.
PAGE_MESSAGES = 10_000
#: The daemon's bound on one wait.
MAX_WAIT_MS = 60_000


@click.command(
    cls=Verb,
    examples=[
        "plainsong poll greetings",
        "plainsong poll greetings --last 10 -f '%T %i %p'",
        "plainsong poll orders --from -10m --until-empty --json",
        "plainsong poll orders --from 2026-01-31 --to 2026-02-01 --until-empty",
        "plainsong poll orders --from now --wait 30s",
        "plainsong poll orders --isolation uncommitted --until-empty",
        "plainsong poll orders --as-of -1m --until-empty",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here; default: oldest.")
@click.option("--after", type=Place(), metavar="ID", help="Start after this message.")
@click.option("--to", "until", type=Place(now="this computer's"), metavar="PLACE", help="Stop before this.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Read the last N messages.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Read at most N messages.")
@click.option("--until-empty", is_flag=True, help="Read page by page, to the end.")
@click.option(
    "--wait", "wait_ms", type=Length(0.001), metavar="TIME", help="Wait this long for a message when there is none."
)
@isolation_option
@as_of_option
@grep_option
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
    as_of_ms: int | None,
    grep: Pattern[bytes] | None,
    shape: Shape | None,
    null: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Read messages of a topic and stop.

    Prints one page: as much as the daemon returns at once. With --until-empty,
    --last or --limit it reads further pages. Nothing is consumed: reading again
    gives the same messages.

    A PLACE is an id, a time (2026-01-31T12:00Z, or milliseconds since 1970), a
    time ago (-10m, -2h, -7d), oldest or now. --from ID starts with that
    message, --after ID with the next.

    It prints committed messages, and ends at the first one whose transaction is
    undecided. With --isolation uncommitted it prints everything, also messages
    that are rolled back later. With --as-of it prints what had been committed by
    that time, and waits for nothing.
    """
    if sum(each is not None for each in (start, after, last)) > 1:
        raise click.UsageError("--from, --after and --last exclude each other")
    printer = Printer(shape, null=null, as_json=as_json, grep=grep, limit=limit)
    with where.client(topic) as client:
        begin: Start = after if after is not None else start
        inclusive: bool | None = None
        if isinstance(start, bytes):
            inclusive = True
        if last is not None:
            begin = client.position_of_last(topic, last, isolation=isolation, as_of=as_of_ms)
        page: Page | None = None
        # With --grep the limit counts printed messages.
        bounds = ReadLimits(inclusive, until, isolation, as_of_ms, limit if grep is None else None, wait_ms or 0)
        pages = _pages(client, topic, begin, bounds)
        for page in pages:
            printer.write(page)
            if page.set_aside:
                # Not a note: a program that reads the output has to know that messages are missing.
                click.echo(passed_rows(topic, page.set_aside), err=True)
            if not (until_empty or last or limit) or printer.is_full:
                break
    if page is not None and page.end == "more" and printer.count != limit:
        note(f"more messages follow: --until-empty reads them all, --after {page.last_id} continues here")
    if page is not None and page.end == "held":
        report(why_held(topic, page.held))
    elif not printer.count and grep is not None:
        note("no message matches")
    elif not printer.count:
        note("no messages" if start is None else "no messages from this position on")


class ReadLimits(NamedTuple):
    """The range that is read, and how long to wait for a first message."""

    inclusive: bool | None
    until: Start
    isolation: Isolation | None
    as_of_ms: int | None
    limit: int | None
    wait_ms: int


def _pages(client: Client, topic: str, start: Start, bounds: ReadLimits) -> Iterator[Page]:
    """Yields pages until the end of the topic, or until ``limit`` messages."""
    inclusive, until, isolation, as_of_ms, left, wait_left_ms = bounds
    if as_of_ms is not None:
        wait_left_ms = 0  # nothing more arrives
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
            as_of=as_of_ms,
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


# --- tail ------------------------------------------------------------------------------------------


@click.command(
    cls=Verb,
    examples=[
        "plainsong tail greetings",
        "plainsong tail orders 'audit-*' -f '%T %t %p'",
        "plainsong tail orders --from -1h --json | jq .payload",
        "plainsong tail orders returns --last 10",
        "plainsong tail orders --grep '\"number\": *17\\b'",
        "plainsong tail orders --isolation uncommitted",
        "plainsong tail orders returns --as-of 2026-01-31T12:00Z",
    ],
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC|PATTERN...", shell_complete=complete_topic)
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here instead of now: oldest, -10m, a time.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Print the last N messages of each topic first.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after N messages.")
@isolation_option
@as_of_option
@grep_option
@printing_options
@json_option
@where_options
def tail(
    topics: tuple[str, ...],
    start: Start,
    last: int | None,
    limit: int | None,
    isolation: Isolation | None,
    as_of_ms: int | None,
    grep: Pattern[bytes] | None,
    shape: Shape | None,
    null: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Follow topics: print messages as they arrive.

    Runs until Ctrl-C, also across restarts of the daemon, and misses nothing.
    A pattern such as 'orders-*' includes topics created later, within ten
    seconds. With several topics, each message is preceded by its topic's name.
    It prints committed messages, and waits at those whose transaction is
    undecided; `plainsong tx blame` shows that transaction. With --isolation
    uncommitted it prints everything, also messages that are rolled back later.
    With --as-of it follows nothing: it prints what had been committed by that
    time, in all topics from the oldest message on, and stops.
    """
    several = len(topics) > 1 or is_pattern(topics[0])
    if last is not None and start is not None:
        raise click.UsageError("--last and --from exclude each other")
    printer = Printer(shape, null=null, as_json=as_json, default="%t %p" if several else "%p", grep=grep)
    with where.client(*topics) as client:
        # Following waits for daemons and new topics forever: report errors at the start first.
        there = client.topics()
        chosen(there, [each for each in topics if not is_pattern(each)])
        position: StartOfEach | None = None
        begin: Start = (NEWEST if as_of_ms is None else None) if start is None else start
        if isinstance(start, bytes):
            begin = before(start)  # the client continues after an id, --from starts with it
        if last is not None:
            names = chosen(there, topics) if there else ()
            position = StartOfEach(
                {
                    name: client.position_of_last(name, last, isolation=isolation, as_of=as_of_ms) or FIRST_BOUND
                    for name in names
                }
            )
    with where.client(*topics, retry=True) as client:
        follow = as_of_ms is None
        if follow:
            note(f"following {', '.join(topics)}; Ctrl-C stops")
        # With --grep the limit counts printed messages.
        reading = limit if grep is None else None
        messages = client.read(
            topics, begin, follow=follow, limit=reading, isolation=isolation, as_of=as_of_ms, position=position
        )
        reader = output.Reader()
        with reader.watched(messages.stop):
            for message in messages:
                printer.write([message])
                if limit is not None and printer.count >= limit:
                    return
    if reader.has_left:
        raise click.exceptions.Exit(Exit.FAILED)
    if limit is None and follow:
        raise CommandFailed("no topic is left to follow", hint="the topics may have been deleted", code=Exit.NOT_FOUND)


class StartOfEach:
    """Starts each topic at its own place, and keeps no position."""

    def __init__(self, places: Mapping[str, bytes]) -> None:
        self._places = places

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        return {topic: self._places[topic] for topic in topics if topic in self._places}

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Nothing is kept."""


# --- peek ------------------------------------------------------------------------------------------


DEFAULT_LIMIT = 10
#: The maximum that the daemon returns at once.
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
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start here; default: oldest.")
@click.option("--to", "until", type=Place(now="this computer's"), metavar="PLACE", help="Stop before this.")
@click.option("--last", type=click.IntRange(1, MAX_LIMIT), metavar="N", help="Show the last N messages.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=DEFAULT_LIMIT, show_default=True, metavar="N")
@json_option
@where_options
def peek(topic: str, start: Start, until: Start, last: int | None, limit: int, as_json: bool, where: Where) -> None:
    """Look at messages: state, size, expiry.

    Shows a producer's sequence id, a message's place in an atomic batch, and
    attributes on a line of their own. Also shows what readers do not get:
    messages of open or rolled-back transactions, and damaged rows. Nothing is
    consumed.
    """
    if last is not None and start is not None:
        raise click.UsageError("--from and --last exclude each other")
    with where.client(topic) as client:
        if last is not None:
            at = client.position_of_last(topic, last)
            start, limit = (None if at is None else after(at)), last
        seen = client.admin.messages(topic, start, until=until, limit=limit)
    now = now_ms()
    for each in seen:
        if as_json:
            echo_json(_as_json(each))
        else:
            output.echo_lines(_lines(each, now))
    if not seen:
        note("no messages")


def _lines(seen: Seen, now: int) -> list[str]:
    """State, payload, and then origin and attributes, if it has any."""
    if seen.state == "damaged":
        return [f"{seen.id}  {seen.state}", f"  {one_line(seen.detail)}"]
    expires = "" if seen.expires_ms is None else f"  expires in {show_length(max(0, seen.expires_ms - now))}"
    pointer = "" if seen.write_pointer is None else f" by {seen.write_pointer}"
    first = f"{seen.id}  {seen.state}{pointer}  {output.show_bytes(seen.size)}{expires}"
    time = show_time(seen.publish_time_ms)
    shown = escaped_bytes(seen.payload[:1000].replace(b"\n", b" ").replace(b"\t", b" ")).decode("utf-8", "replace")
    lines = [first, f"  {time}  {output.cut(shown, output.width() - len(time) - 4)}".rstrip()]
    lines += [f"  {output.cut(one_line(line), output.width() - 2)}" for line in (_origin(seen), _strings(seen)) if line]
    return lines


def _origin(seen: Seen) -> str:
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
