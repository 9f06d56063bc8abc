"""``plainsong publish``: messages go in, in order, and nothing is left unsaid about those that did not."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, cast

import click

from plainsong.cli import inputs
from plainsong.cli.progress import Progress
from plainsong.cli.publish_extras import Extras, SendingWith, parse_attributes
from plainsong.cli.publish_tx import SendingWhole
from plainsong.cli.say import echo_json, note
from plainsong.cli.sending import Sending, messages_told
from plainsong.cli.times import Length
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.cli.where import Where


@click.command(
    cls=Verb,
    examples=[
        "plainsong publish greetings hello world",
        "seq 1000 | plainsong publish numbers",
        "plainsong publish images --file picture.png",
        "plainsong poll orders --json | plainsong publish copies --ndjson",
        "plainsong publish orders --ttl 10m 'gone in ten minutes'",
        "plainsong publish orders --tx < all-or-nothing.txt",
        "plainsong publish orders --producer loader --sequence-id 0 < lines.txt",
        "plainsong publish orders --atomic --routing-key customer-7 paid shipped",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option("--ndjson", is_flag=True, help="Lines are JSON: a string, or an object with payload.")
@click.option("--base64", "is_base64", is_flag=True, help="Messages are written in base64.")
@click.option(
    "--file", "files", multiple=True, metavar="FILE", help="A whole file is one message. Repeatable; - is stdin."
)
@click.option("--ttl", "ttl_s", type=Length(), metavar="TIME", help="They live no longer than this, as 10m or 7d.")
@click.option("--retry-for", "retry_s", type=Length(), metavar="TIME", help="Keep trying while the daemon is away.")
@click.option("--tx", is_flag=True, help="All of it in one transaction.")
@click.option("--tx-timeout", "tx_timeout_s", type=Length(), metavar="TIME", help="How long that may take; 30s.")
@click.option("--producer", metavar="NAME", help="Whoever sends again under this name stores nothing twice.")
@click.option("--sequence-id", type=click.IntRange(0), metavar="N", help="Of the first message; else behind the last.")
@click.option("--attribute", "attributes", multiple=True, metavar="NAME=VALUE", help="For every message. Repeatable.")
@click.option("--routing-key", metavar="KEY", help="The same as the attribute routingKey.")
@click.option("--atomic", is_flag=True, help="All of it in one request: whole or not at all, up to 16 MiB.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing when it went well.")
@json_option
@where_options
def publish(
    topic: str,
    messages: tuple[str, ...],
    ndjson: bool,
    is_base64: bool,
    files: tuple[str, ...],
    ttl_s: int | None,
    retry_s: int | None,
    tx: bool,
    tx_timeout_s: int | None,
    producer: str | None,
    sequence_id: int | None,
    attributes: tuple[str, ...],
    routing_key: str | None,
    atomic: bool,
    quiet: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Publish messages: arguments, lines, NDJSON, files.

    Each MESSAGE is one message. Without any, each line of standard input is one,
    and is published as it comes. They are stored in the order given; when the
    command ends with 0 all of them are durable. When it does not, it says how
    many are: the others are not there, except for one request of which nobody
    knows.

    A line of --ndjson is a string, {"base64": "..."}, or an object
    {"payload": ..., "ttlSeconds": ..., "attributes": {...}}; what `poll --json`
    prints is such.

    With --tx all of it is one transaction: committed readers see all of it or
    nothing, and when the command fails nothing was published.

    With --producer and --sequence-id it may be run again after a failure:
    messages that are there already are not stored again.
    """
    extras = Extras(producer, sequence_id, parse_attributes(attributes), routing_key, atomic)
    if extras.sequence_id is not None and producer is None:
        raise click.UsageError("--sequence-id is for --producer")
    if tx and extras.given:
        raise click.UsageError("--tx knows no --producer, --attribute, --routing-key and --atomic")
    if tx_timeout_s is not None and not tx:
        raise click.UsageError("--tx-timeout is for --tx")
    if ndjson and is_base64:
        raise click.UsageError("--ndjson and --base64 exclude each other: NDJSON has its own base64")
    if files and messages:
        raise click.UsageError("give messages or --file, not both")
    parse = _parser(ndjson=ndjson, is_base64=is_base64)
    source = cast("inputs.Source", sys.stdin.buffer)
    pieces: Iterable[inputs.Piece]
    total = None
    if files:
        pieces = inputs.from_files(files, source, parse)
    elif messages:
        pieces = inputs.from_arguments(messages, parse)
    else:
        if sys.stdin.isatty():
            note("each line is a message; Ctrl-D ends")
        total = _size_of_stdin()
        pieces = inputs.from_lines(source, parse)
    progress = Progress(total, wanted=sys.stderr.isatty() and not (quiet or sys.stdin.isatty()))
    with where.client(topic, retry=retry_s is not None, deadline_s=retry_s or 30) as client:
        sending: Sending | SendingWhole
        if tx:
            sending = SendingWhole(client, topic, ttl_s, progress, tx_timeout_s)
        elif extras.given or ndjson:  # whose lines may have attributes of their own
            sending = SendingWith(client, topic, ttl_s, progress, extras)
        else:
            sending = Sending(client, topic, ttl_s, progress)
        sending.all_of(pieces)
    if as_json:
        echo_json(sending.told())
    elif not quiet:
        last = f", last id {sending.last_id}" if sending.last_id else ""
        click.echo(f"published {messages_told(sending.sent)}{sending.how}{last}")


def _parser(*, ndjson: bool, is_base64: bool) -> Callable[[bytes], inputs.Item]:
    if ndjson:
        return inputs.from_json
    return inputs.from_base64 if is_base64 else inputs.as_is


def _size_of_stdin() -> int | None:
    """Bytes, when standard input is a file."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
