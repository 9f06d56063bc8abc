"""``plainsong top``: the topics of a namespace, again and again, the busiest first."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables
from plainsong.cli.patterns import chosen, is_pattern
from plainsong.cli.say import echo_json
from plainsong.cli.stats import HEADINGS, numbers, row_of
from plainsong.cli.times import Length, now_ms, show_time
from plainsong.cli.verb import Verb, json_option, one_line
from plainsong.cli.where import complete_topic, where_options
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.cli.where import Where

#: Topics that are asked for their numbers each time; each is a request.
MAX_TOPICS = 200
#: To the upper left, and nothing left over of what was there.
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command(cls=Verb, examples=["plainsong top", "plainsong top 'orders-*' --every 5s", "plainsong top --once"])
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...", shell_complete=complete_topic)
@click.option("--every", "every_s", type=Length(), default="2s", show_default=True, metavar="TIME", help="How often.")
@click.option("--once", is_flag=True, help="Once, and end.")
@json_option
@where_options
def top(topics: tuple[str, ...], every_s: int, once: bool, as_json: bool, where: Where) -> None:
    """Watch the topics live.

    The busiest first; Ctrl-C ends. What the columns mean stands in
    `plainsong stats --help`. With --json one object for each time.
    """
    live = sys.stdout.isatty() and not (once or as_json)
    with where.client(*topics) as client:
        while True:
            try:
                rows, more = _look(client, topics)
                complaint = ""
            except PlainsongError as error:
                if not live:
                    raise
                rows, more, complaint = [], 0, one_line(error.detail)
            if as_json:
                echo_json({"timeMs": now_ms(), "topics": [{"topic": name, **found} for name, found in rows]})
            else:
                _show(_lines(where, rows, more, complaint, live=live), live=live)
            if once:
                return
            time.sleep(every_s)


def _look(client: Client, topics: tuple[str, ...]) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """The numbers of the topics, the busiest first, and how many there are besides."""
    there = client.topics()
    wanted = [each for each in topics if not is_pattern(each) or there]
    names = chosen(there, wanted) if there or wanted else []
    rows = numbers(client, names[:MAX_TOPICS])
    rows.sort(key=lambda row: (-row[1]["publishPerSecond"] - row[1]["pollPerSecond"], -row[1]["bytes"], row[0]))
    return rows, len(names) - len(rows)


def _lines(where: Where, rows: list[tuple[str, dict[str, Any]]], more: int, complaint: str, *, live: bool) -> list[str]:
    into = sum(found["publishPerSecond"] for _, found in rows)
    out = sum(found["pollPerSecond"] for _, found in rows)
    summary = f"{len(rows)} topics, {tables.show_bytes(sum(found['bytes'] for _, found in rows))}"
    head = [f"plainsong  {where.urls[0]}  {where.namespace}  {show_time(now_ms())}"]
    head += [f"{summary}, in {tables.show_rate(into)}, out {tables.show_rate(out)}", ""]
    if complaint:
        return [head[0], tables.cut(f"no answer: {complaint}", tables.width())]
    room = shutil.get_terminal_size((80, 24)).lines - len(head) - 3 if live else len(rows)
    lines = head + tables.table(HEADINGS, [row_of(name, found) for name, found in rows[: max(1, room)]])
    hidden = more + len(rows) - max(1, room)
    return lines + ([f"and {hidden} more"] if hidden > 0 and rows else [])


def _show(lines: list[str], *, live: bool) -> None:
    if not live:
        tables.echo_lines(lines)
        return
    whole = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{whole}{_CLEAR_REST}", nl=False, color=True)
