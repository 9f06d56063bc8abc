"""The verb `reader`: lists, sets, resets and deletes the positions that the daemon keeps for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option
from plainsong.cli.connection import complete_topic, where_options
from plainsong.cli.options import Place, show_length, show_time
from plainsong.cli.output import confirmed, echo_json
from plainsong.positions import NEWEST, OLDEST, now_ms
from plainsong.protocol.errors import NotFound, TopicNotFound, nearest
from plainsong.protocol.ids import FIRST_BOUND, before, bound_at

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.messages import ReaderRow
    from plainsong.protocol.answers.topics import ReaderStats

    class _Reader(ReaderRow, ReaderStats):
        """A reader, and the messages that it has not read."""


@click.group(cls=VerbGroup)
def reader() -> None:
    """Show and move positions kept by the daemon.

    A position is the id of the last message that a reader has processed.
    Programs keep one with ServerPosition.
    """


@reader.command(name="ls", examples=["plainsong reader ls orders"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def list_readers(topic: str, as_json: bool, where: Where) -> None:
    """List a topic's readers, and the lag of each."""
    with where.client(topic) as client:
        found = [_with_behind(client, topic, each) for each in client.admin.readers(topic)]
    if as_json:
        echo_json(found)
        return
    rows = [
        (
            each["name"],
            output.show_count(each["visible"], estimated=each["estimated"]),
            _read_up_to(each["position"]),
            show_length(max(0, now_ms() - each["changedMs"])),
        )
        for each in found
    ]
    output.echo_lines(output.table(("READER", ">BEHIND", "READ UP TO", ">MOVED AGO"), rows))


@reader.command(examples=["plainsong reader show orders billing"])
@click.argument("topic", shell_complete=complete_topic)
@click.argument("reader")
@json_option
@where_options
def show(topic: str, reader: str, as_json: bool, where: Where) -> None:
    """Show a reader's position and lag."""
    with where.client(topic) as client:
        _show(client, topic, reader, as_json=as_json)


@reader.command(
    name="set",
    examples=[
        "plainsong reader set orders billing oldest",
        "plainsong reader set orders billing 0000018bcfe56805000100000000000000000000",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("reader")
@click.argument("place", type=Place())
@json_option
@where_options
def set_position(topic: str, reader: str, place: str | bytes | int, as_json: bool, where: Where) -> None:
    """Set a reader's position; create the reader if it does not exist.

    With an id, it continues after that message. With a time (-10m,
    2026-01-31T12:00Z), it continues with the first message from then on; oldest
    reads everything, now only new messages.
    """
    with where.client(topic) as client:
        client.admin.set_reader(topic, reader, _position(client, topic, place))
        _show(client, topic, reader, as_json=as_json)


@reader.command(
    examples=["plainsong reader reset orders billing --to -1h", "plainsong reader reset orders billing --to oldest"]
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("reader")
@click.option("--to", "place", type=Place(), default=OLDEST, show_default=True, metavar="PLACE", help="New position.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@where_options
def reset(topic: str, reader: str, place: str | bytes | int, yes: bool, as_json: bool, where: Where) -> None:
    """Move an existing reader back or forward.

    A program that reads under this name stops with position_changed when it
    next saves its position.
    """
    with where.client(topic) as client:
        stands = _found(client, topic, reader)["position"]
        to = _position(client, topic, place)
        what = "read again" if to.hex() < stands else "skip"
        ahead = client.admin.stats(topic, reader=min(to, bytes.fromhex(stands)))["reader"]["visible"]
        beyond = client.admin.stats(topic, reader=max(to, bytes.fromhex(stands)))["reader"]["visible"]
        confirmed(f"Reader {reader} of {topic} will {what} {output.show_messages(ahead - beyond)}. Continue?", yes=yes)
        client.admin.set_reader(topic, reader, to)
        _show(client, topic, reader, as_json=as_json)


@reader.command(examples=["plainsong reader rm orders billing"])
@click.argument("topic", shell_complete=complete_topic)
@click.argument("reader")
@json_option
@where_options
def rm(topic: str, reader: str, as_json: bool, where: Where) -> None:
    """Forget a reader. The messages stay."""
    with where.client(topic, creates=False) as client:
        stands = _found(client, topic, reader, creates=False)["position"]
        client.admin.delete_reader(topic, reader)
    if as_json:
        echo_json({"removed": reader, "position": stands})
    else:
        click.echo(f"forgot {reader}; its position was {stands}")


def _found(client: Client, topic: str, name: str, *, creates: bool = True) -> ReaderRow:
    """Returns the reader. Raises CommandFailed, with a hint that names the nearest reader or how to create this one."""
    try:
        return client.admin.reader(topic, name)
    except TopicNotFound:
        raise
    except NotFound as error:
        names = [each["name"] for each in client.admin.readers(topic)]
        other = f"create it with plainsong reader set {topic} {name} oldest" if creates else ""
        near = nearest(name, names) if names else other or f"topic {topic} has no readers"
        raise CommandFailed(f"topic {topic} has no reader {name!r}", hint=near, code=Exit.NOT_FOUND) from error


def _with_behind(client: Client, topic: str, found: ReaderRow) -> _Reader:
    counts = client.admin.stats(topic, reader=found["position"])["reader"]
    return {**found, **counts}


def _show(client: Client, topic: str, name: str, *, as_json: bool) -> None:
    found = _with_behind(client, topic, _found(client, topic, name))
    if as_json:
        echo_json(found)
        return
    estimated = found["estimated"]
    expired, hidden = (output.show_count(found[key], estimated=estimated) for key in ("expiredUnread", "hidden"))
    at = found["position"]
    pairs = [
        ("reader", f"{name} of {topic}"),
        ("position", at),
        ("read up to", _read_up_to(at)),
        ("behind", output.show_messages(found["visible"], estimated=estimated)),
        ("expired unread", expired),
        ("hidden", hidden),
        ("moved", f"{show_length(max(0, now_ms() - found['changedMs']))} ago"),
        ("forgotten", f"in {show_length(max(0, found['expiresMs'] - now_ms()))}, unless it moves again"),
    ]
    output.echo_lines(output.facts(pairs))


def _read_up_to(position: str) -> str:
    return "the beginning" if bytes.fromhex(position) == FIRST_BOUND else show_time(int(position[:16], 16))


def _position(client: Client, topic: str, place: str | bytes | int) -> bytes:
    """The position of a reader that continues at ``place``."""
    if isinstance(place, bytes):
        return place
    if place == NEWEST:
        stats = client.admin.stats(topic)
        newest = stats["newestId"]
        return (before(bytes.fromhex(stats["end"])) or FIRST_BOUND) if newest is None else bytes.fromhex(newest)
    return FIRST_BOUND if isinstance(place, str) else before(bound_at(place)) or FIRST_BOUND
