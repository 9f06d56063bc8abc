"""``plainsong stats``: the numbers of topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables
from plainsong.cli.patterns import chosen, is_pattern
from plainsong.cli.say import echo_json
from plainsong.cli.times import show_length
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options
from protocol.errors import TopicNotFound
from protocol.ids import FIRST_BOUND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client
    from plainsong.cli.where import Where

HEADINGS = ("TOPIC", ">MESSAGES", ">SIZE", ">OLDEST", ">IN", ">OUT", ">WAITING", ">OPEN")


@click.command(
    cls=Verb,
    examples=["plainsong stats", "plainsong stats orders", "plainsong stats 'orders-*' --json"],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...", shell_complete=complete_topic)
@json_option
@where_options
def stats(topics: tuple[str, ...], as_json: bool, where: Where) -> None:
    """How many messages, how large, how old, how fast.

    IN and OUT are messages published and polled in a second, over the last
    minute or so; WAITING are polls that wait for the next message; OPEN are
    transactions that are undecided here. A ~ means that the daemon has counted
    only the edges. Of one topic, hidden are the messages that committed readers
    do not get yet.
    """
    if len(topics) == 1 and not is_pattern(topics[0]):
        with where.client(*topics) as client:
            found = client.stats(topics[0], reader=FIRST_BOUND)
        committed = found.pop("reader")
        found |= {"visible": committed["visible"], "hidden": committed["hidden"]}
        if as_json:
            echo_json({"topic": topics[0], **found})
        else:
            tables.echo_lines(tables.facts([(name, _shown(name, value)) for name, value in found.items()]))
        return
    with where.client(*topics) as client:
        rows = numbers(client, chosen(client.topics(), topics))
    if as_json:
        echo_json([{"topic": name, **found} for name, found in rows])
    else:
        tables.echo_lines(tables.table(HEADINGS, [row_of(name, found) for name, found in rows]))


def numbers(client: Client, names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Each topic's numbers, without those that were deleted meanwhile."""
    rows = []
    for name in names:
        try:
            rows.append((name, client.stats(name)))
        except TopicNotFound:
            continue
    return rows


def row_of(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """A topic's numbers as a row below ``HEADINGS``."""
    return (
        name,
        tables.show_count(found["messages"], estimated=found["estimated"]),
        tables.show_bytes(found["bytes"]),
        show_length(found["oldestAgeMs"]),
        tables.show_rate(found["publishPerSecond"]),
        tables.show_rate(found["pollPerSecond"]),
        tables.show_count(found["parkedPolls"]),
        tables.show_count(found["openTransactions"]),
    )


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "bytes":
        return tables.show_bytes(value)
    if name == "oldestAgeMs":
        return show_length(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return tables.show_count(value) if isinstance(value, int) else str(value)
