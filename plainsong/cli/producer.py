"""The verb `producer`: lists, shows and deletes the producers whose sequence ids a topic remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option, one_line
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.options import show_length
from plainsong.cli.output import confirmed, echo_json, report
from plainsong.positions import now_ms
from plainsong.protocol.errors import ProducerNotFound, nearest

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import (
        NamespaceDescription,
        ProducerList,
        ProducerRow,
        ProducerState,
        RecentPublish,
    )

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000


@click.group(cls=VerbGroup)
def producer() -> None:
    """Show the producers that a topic remembers.

    Messages that a producer sends again under the same sequence ids are not
    stored twice.
    """


@producer.command(name="ls", examples=["plainsong producer ls orders", "plainsong producer ls orders --after p-17"])
@click.argument("topic", shell_complete=complete_topic)
@click.option("--after", metavar="PRODUCER", help="Continue after this name.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=DEFAULT_LIMIT, show_default=True, metavar="N")
@json_option
@where_options
def list_producers(topic: str, after: str | None, limit: int, as_json: bool, where: Where) -> None:
    """List a topic's producers by name, and how the topic remembers them.

    LAST is the highest sequence id stored, SENT the highest one being written,
    EPOCH counts the producer's sessions.
    """
    with where.client(topic) as client:
        found = run_call(client, calls.list_producers(client.namespace, topic, after, limit))
    if as_json:
        echo_json(found)
        return
    now = now_ms()
    headings = ("PRODUCER", ">LAST", ">SENT", ">EPOCH", ">ACTIVE AGO", ">FORGOTTEN IN")
    output.echo_lines(output.table(headings, [_row(each, now) for each in found["producers"]]))
    output.echo_lines(["", *output.facts(_about_all(topic, found))])
    if found["next"] is not None:
        report(one_line(f"more producers: --after {found['next']}"))


def _row(each: ProducerRow, now: int) -> tuple[str, ...]:
    return (
        one_line(each["producer"]),
        str(each["persisted"]),
        str(each["pushed"]),
        str(each["epoch"]),
        show_length(max(0, now - each["activeMs"])),
        show_length(max(0, each["expiresMs"] - now)),
    )


def _about_all(topic: str, found: ProducerList) -> list[tuple[str, str]]:
    snapshot, replay = found["snapshot"], found["lastReplay"]
    age = "none yet" if snapshot["ageMs"] is None else f"{show_length(snapshot['ageMs'])} old"
    return [
        ("deduplication", show_effective(found)),
        ("producers", f"{output.show_count(found['count'])} of {topic}"),
        ("snapshot", f"{age}, {output.counted(snapshot['entriesSince'], 'request')} since"),
        (
            "last replay",
            f"{output.counted(replay['entries'], 'request')} in {output.show_seconds(replay['ms'] / 1000)}",
        ),
    ]


def show_effective(answer: ProducerList | NamespaceDescription) -> str:
    """``on, set by the service``: the deduplication in force, from an answer about a topic's producers or a namespace."""
    effective = answer["deduplication"]
    return f"{'on' if effective['enabled'] else 'off'}, set by the {effective['level']}"


@producer.command(
    examples=["plainsong producer show orders billing", "plainsong producer show orders billing --generation 1"]
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("producer")
@click.option(
    "--generation", type=click.IntRange(1), metavar="N", help="Generation of the topic; default: the current one."
)
@json_option
@where_options
def show(topic: str, producer: str, generation: int | None, as_json: bool, where: Where) -> None:
    """Show a producer's last sequence id and requests."""
    with where.client(topic) as client:
        found = _found(client, topic, producer, generation)
    if as_json:
        echo_json(found)
        return
    now = now_ms()
    last = found["lastSequenceId"]
    lines = [
        ("producer", f"{one_line(found['producer'])} of {topic}, generation {found['generation']}"),
        ("last", "nothing stored yet" if last < 0 else f"sequence id {last}"),
        ("epoch", str(found["epoch"])),
        ("active", f"{show_length(max(0, now - found['activeMs']))} ago"),
        ("forgotten", f"in {show_length(max(0, found['expiresMs'] - now))}, unless it is active"),
    ]
    output.echo_lines(output.facts(lines))
    if found["recent"]:
        rows = [(_ids(each), each["firstId"] or "-", each["lastId"] or "-") for each in found["recent"]]
        output.echo_lines(["", *output.table(("SEQUENCE IDS", "FIRST MESSAGE", "LAST MESSAGE"), rows, columns=120)])


def _ids(each: RecentPublish) -> str:
    return str(each["first"]) if each["first"] == each["last"] else f"{each['first']} to {each['last']}"


@producer.command(examples=["plainsong producer delete orders billing --yes"])
@click.argument("topic", shell_complete=complete_topic)
@click.argument("producer")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@where_options
def delete(topic: str, producer: str, yes: bool, as_json: bool, where: Where) -> None:
    """Forget a producer. Its messages stay.

    Messages that it sends again after that are stored again.
    """
    with where.client(topic, creates=False) as client:
        last = _found(client, topic, producer, None)["lastSequenceId"]
        confirmed(f"Forget {one_line(producer)} of {topic}? Messages that it sends again are stored again.", yes=yes)
        run_call(client, calls.delete_producer(client.namespace, topic, producer))
    if as_json:
        echo_json({"deleted": producer, "lastSequenceId": last})
    else:
        click.echo(f"forgot {one_line(producer)}; its last sequence id was {last}")


def _found(client: Client, topic: str, name: str, generation: int | None) -> ProducerState:
    """Returns the producer. Raises CommandFailed that names the nearest one."""
    try:
        return run_call(client, calls.show_producer(client.namespace, topic, name, generation))
    except ProducerNotFound as error:
        page = run_call(client, calls.list_producers(client.namespace, topic, None, MAX_LIMIT))
        names = [each["producer"] for each in page["producers"]]
        near = nearest(name, names) if 0 < len(names) <= 10 else f"plainsong producer ls {topic} lists producers"
        raise CommandFailed(f"topic {topic} has no producer {name!r}", hint=near, code=Exit.NOT_FOUND) from error
