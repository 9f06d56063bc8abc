"""``plainsong topic``: topics made, shown, changed, deleted and brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli import tables
from plainsong.cli.apply import apply
from plainsong.cli.patterns import chosen
from plainsong.cli.producer import asked, show_effective
from plainsong.cli.properties import merged, parse_assignments, show_property
from plainsong.cli.say import confirmed, echo_json, named
from plainsong.cli.times import Length, show_length, show_time
from plainsong.cli.verb import VerbGroup, json_option
from plainsong.cli.where import complete_topic, where_options
from plainsong.core.producer_calls import list_producers
from protocol.errors import TopicExists

if TYPE_CHECKING:
    from plainsong.cli.where import Where


@click.group(cls=VerbGroup)
def topic() -> None:
    """Make, change, list and delete topics."""


@topic.command(
    examples=[
        "plainsong topic create greetings",
        "plainsong topic create orders --ttl 30d max_bytes=10GiB",
        "plainsong topic create orders --ttl 30d --if-not-exists",
    ]
)
@click.argument("topic")
@click.argument("properties", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--ttl", "ttl_s", type=Length(), metavar="TIME", help="How long messages live, as 7d; the same as ttl=7d."
)
@click.option("--if-not-exists", is_flag=True, help="Be content with one that has these very properties.")
@json_option
@where_options
def create(
    topic: str, properties: tuple[str, ...], ttl_s: int | None, if_not_exists: bool, as_json: bool, where: Where
) -> None:
    """Make a topic.

    Properties: ttl (7d by default), max_bytes (none), transactional
    (optional, required, disabled), deduplication (inherit, enabled, disabled).
    """
    given = parse_assignments([*properties, *([] if ttl_s is None else [f"ttl={ttl_s}"])])
    with where.client() as client:
        try:
            client.create_topic(topic, if_not_exists=if_not_exists, **merged({}, given))
        except TopicExists as error:
            error.hint = f"plainsong topic set {topic} NAME=VALUE changes it; topic show {topic} shows it"
            raise
        if as_json:
            echo_json({"name": topic, "properties": client.properties(topic)})
        else:
            click.echo(f"topic {topic} is there, in namespace {client.namespace}")


@topic.command(name="list", examples=["plainsong topic list", "plainsong topic list 'orders-*' --long"])
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("-l", "--long", "is_long", is_flag=True, help="With ttl, messages and size.")
@json_option
@where_options
def list_topics(patterns: tuple[str, ...], is_long: bool, as_json: bool, where: Where) -> None:
    """List the topics of the namespace."""
    with where.client() as client:
        names = chosen(client.topics(), patterns)
        if not is_long:
            if as_json:
                echo_json(names)
            else:
                tables.echo_lines(names)
            return
        rows = [(name, client.properties(name), client.stats(name)) for name in names]
    if as_json:
        echo_json([{"name": name, "properties": properties, "stats": stats} for name, properties, stats in rows])
        return
    shown = [
        (
            name,
            show_property("ttl", properties["ttl"]),
            tables.show_count(stats["messages"], estimated=stats["estimated"]),
            tables.show_bytes(stats["bytes"]),
            show_length(stats["oldestAgeMs"]),
        )
        for name, properties, stats in rows
    ]
    tables.echo_lines(tables.table(("TOPIC", ">TTL", ">MESSAGES", ">SIZE", ">OLDEST"), shown))


@topic.command(examples=["plainsong topic show orders", "plainsong topic show orders --json"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def show(topic: str, as_json: bool, where: Where) -> None:
    """Show a topic's properties, how much is in it, and its readers."""
    with where.client(topic) as client:
        properties, stats, readers = client.properties(topic), client.stats(topic), client.readers(topic)
        producers = asked(client, list_producers(client.namespace, topic, None, 1))
    if as_json:
        effective = producers["deduplication"]
        told = {"name": topic, "properties": properties, "deduplication": effective, "stats": stats, "readers": readers}
        echo_json(told)
        return
    newest = stats["newestId"]
    lines = [("topic", topic), *((name, show_property(name, value)) for name, value in sorted(properties.items()))]
    lines += [
        ("messages", tables.show_count(stats["messages"], estimated=stats["estimated"])),
        ("size", tables.show_bytes(stats["bytes"])),
        ("oldest", show_length(stats["oldestAgeMs"])),
        ("newest", "-" if newest is None else show_time(int(newest[:16], 16))),
        ("producers", f"{tables.show_count(producers['count'])}, deduplication is {show_effective(producers)}"),
        ("readers", named([each["name"] for each in readers]) if readers else "none"),
    ]
    tables.echo_lines(tables.facts(lines))


@topic.command(
    name="set", examples=["plainsong topic set orders ttl=30d", "plainsong topic set orders max_bytes=default"]
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("properties", nargs=-1, required=True, metavar="NAME=VALUE...")
@json_option
@where_options
def set_properties(topic: str, properties: tuple[str, ...], as_json: bool, where: Where) -> None:
    """Change properties of a topic; the others stay.

    The value `default` is the daemon's own default. A shorter ttl takes effect
    at once, for messages that are there too.
    """
    changes = parse_assignments(properties)
    with where.client(topic) as client:
        client.set_properties(topic, **merged(client.properties(topic), changes))
        now = client.properties(topic)
    if as_json:
        echo_json({"name": topic, "properties": now})
    else:
        tables.echo_lines(tables.facts([(name, show_property(name, value)) for name, value in sorted(now.items())]))


@topic.command(examples=["plainsong topic delete greetings", "plainsong topic delete old-1 old-2 --yes"])
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@where_options
def delete(topics: tuple[str, ...], yes: bool, as_json: bool, where: Where) -> None:
    """Delete topics with all their messages.

    They are gone for every reader at once. `topic undelete` brings one back as
    long as the daemon has not cleaned up, an hour by default.
    """
    with where.client(*topics) as client:
        for each in topics:
            client.properties(each)  # a name that is none deletes nothing at all
        confirmed(f"Delete {named(topics)} with all messages?", yes=yes)
        for each in topics:
            client.delete_topic(each)
            if as_json:
                echo_json({"deleted": each})
            else:
                click.echo(f"deleted {each}; plainsong topic undelete {each} brings it back for a while")


@topic.command(examples=["plainsong topic undelete greetings"])
@click.argument("topic")
@json_option
@where_options
def undelete(topic: str, as_json: bool, where: Where) -> None:
    """Bring a deleted topic back, with its messages."""
    with where.client() as client:
        client.undelete_topic(topic)
        stats = client.stats(topic)
    if as_json:
        echo_json({"name": topic, "messages": stats["messages"]})
    else:
        click.echo(f"topic {topic} is back, with {tables.show_count(stats['messages'])} messages")


topic.add_command(apply)
