"""The verb `publish`: sends messages in order, one by one, in batches, by a producer or in one transaction, and reports any that failed.

``plainsong publish``: messages go in, in order, and nothing is left unsaid about those that did not.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from plainsong import calls
from plainsong.calls import open_session
from plainsong.cli import inputs
from plainsong.cli.inputs import InputPiece
from plainsong.cli.options import Length
from plainsong.cli.output import Progress, echo_json, note, show_count
from plainsong.cli.verb import CommandFailed, Exit, Verb, failure_of, json_option
from plainsong.cli.where import complete_topic, run_call, where_options
from plainsong.errors import CommittedWithErrors
from plainsong.lightweight import MAX_BYTES, MAX_MESSAGES
from plainsong.messages import check_ttl, own_ttls
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from plainsong import Client, Receipt
    from plainsong.calls import Known
    from plainsong.cli.inputs import InputMessage
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
    pieces: Iterable[inputs.InputPiece]
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
        sending: PublishRun | PublishRunInTransaction
        if tx:
            sending = PublishRunInTransaction(client, topic, ttl_s, progress, tx_timeout_s)
        elif extras.given or ndjson:  # whose lines may have attributes of their own
            sending = PublishRunWithExtras(client, topic, ttl_s, progress, extras)
        else:
            sending = PublishRun(client, topic, ttl_s, progress)
        sending.all_of(pieces)
    if as_json:
        echo_json(sending.told())
    elif not quiet:
        last = f", last id {sending.last_id}" if sending.last_id else ""
        click.echo(f"published {show_messages(sending.sent)}{sending.how}{last}")


def _parser(*, ndjson: bool, is_base64: bool) -> Callable[[bytes], inputs.InputMessage]:
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


# --- publish extras --------------------------------------------------------------------------------
#
# ``publish`` with a producer, attributes, a routing key, or as one atomic batch.


class Extras(NamedTuple):
    """What the options say of all messages of the command."""

    producer: str | None = None
    sequence_id: int | None = None
    """Of the first message."""
    attributes: Mapping[str, str] = {}
    routing_key: str | None = None
    atomic: bool = False

    @property
    def given(self) -> bool:
        """Whether there is anything of this at all."""
        return self.producer is not None or bool(self.attributes) or self.routing_key is not None or self.atomic


def parse_attributes(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` of a command line. Raises click.UsageError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--attribute {text!r} is not NAME=VALUE")
        found[name] = value
    return found


# --- sending ---------------------------------------------------------------------------------------
#
# What ``publish`` has sent so far, one piece after the other, and what it says when it ends early.


class PublishRun:
    """What has been published so far, and what becomes of the rest when it ends early."""

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress) -> None:
        self.sent = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self.client = client
        self.topic = topic
        self.ttl_s = ttl_s
        self._progress = progress
        self._under_way = 0

    def all_of(self, pieces: Iterable[InputPiece]) -> None:
        """Publish, one piece after the other.

        Raises:
          CommandFailed: it ended early; says what was published, what was not, and what is unknown.
        """
        try:
            for piece in pieces:
                self._one(piece)
        except KeyboardInterrupt:
            self._progress.clear()
            raise self._ended(CommandFailed("interrupted", code=Exit.INTERRUPTED), "unknown") from None
        except PlainsongError as error:
            self._progress.clear()
            if error.code == "topic_not_found" and not self.sent:
                raise
            raise self._ended(failure_of(error), error.outcome) from error
        except CommandFailed as error:
            self._progress.clear()
            raise self._ended(error, "not-applied") from error.__cause__
        self._progress.clear()

    def _one(self, piece: InputPiece) -> None:
        self._under_way = len(piece.items)
        receipt = self.publish(piece)
        self._under_way = 0
        self.sent += len(piece.items)
        self.first_id = self.first_id or (None if receipt.first_id is None else str(receipt.first_id))
        self.last_id = None if receipt.last_id is None else str(receipt.last_id)
        self._progress.show(self.sent, piece.read_bytes)

    def publish(self, piece: InputPiece) -> Receipt:
        """One request. Raises PlainsongError."""
        from plainsong import Outgoing  # here, so that help needs no client

        values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
        return self.client.publish(self.topic, values, ttl_s=self.ttl_s)

    @property
    def how(self) -> str:
        """What there is to say of it besides how many they were."""
        return ""

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        """``failed``, with how far it came; ``outcome`` is of the request under way."""
        unknown = self._under_way if outcome == "unknown" else 0
        failed.message += (": " if failed.code == Exit.INTERRUPTED else "; ") + self._how_far(known=not unknown)
        failed.outcome = "unknown" if unknown else "not-applied"
        failed.more = {**self.told(), "unknown": unknown}
        return failed

    def _how_far(self, *, known: bool) -> str:
        said = [f"{show_messages(self.sent)} published"]
        if self.last_id:
            said.append(f"the last is {self.last_id}")
        if self._under_way and known:
            said.append(f"number {self.sent + 1} and what follows were not")
        elif self._under_way:
            first, last = self.sent + 1, self.sent + self._under_way
            said.append(f"of number {first} to {last} nobody knows, what follows was not")
        else:
            said.append("what follows was not")
        return ", ".join(said)

    def told(self) -> dict[str, object]:
        """For programs."""
        return {"topic": self.topic, "messages": self.sent, "firstId": self.first_id, "lastId": self.last_id}


class PublishRunWithExtras(PublishRun):
    """Publishes with these extras; a producer's session is opened before its first message."""

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress, extras: Extras) -> None:
        super().__init__(client, topic, ttl_s, progress)
        if ttl_s is not None:
            check_ttl(ttl_s)
        self._extras = extras
        self._session: Known | None = None
        self._next_id = 0
        self._already = 0

    def all_of(self, pieces: Iterable[InputPiece]) -> None:
        """Publish; an atomic batch when all of it has been read. Raises CommandFailed."""
        super().all_of(_as_one(pieces) if self._extras.atomic else pieces)

    def publish(self, piece: InputPiece) -> Receipt:
        """One request. With a producer it may be sent again without a doubt."""
        extras, items = self._extras, piece.items
        request = PublishRequest([item.payload for item in items], ttl_s=self.ttl_s, atomic=extras.atomic)
        request.message_ttls_s = own_ttls([item.ttl_s for item in items])
        request.routing_key = extras.routing_key
        request.attributes = _attributes(items, extras.attributes)
        if extras.producer is not None:
            self._put_producer(request, extras.producer)
        once = extras.producer is not None
        receipt: Receipt = run_call(
            self.client, calls.publish(self.client.namespace, self.topic, request, retry_unknown=once)
        )
        if self._session is not None:
            # As of the opening: what an attempt of this very run has stored was not stored before.
            self._already += min(len(items), max(0, self._session.last_sequence_id + 1 - self._next_id))
        self._next_id += len(items)
        return receipt

    def _put_producer(self, request: PublishRequest, name: str) -> None:
        if self._session is None:
            opening = open_session(self.client.namespace, self.topic, name)
            # Opened twice it has another epoch, and this is the last one.
            self._session = run_call(self.client, opening._replace(repeat="harmless"))
            first = self._extras.sequence_id
            self._next_id = self._session.last_sequence_id + 1 if first is None else first
        request.producer = name
        request.producer_epoch = self._session.epoch
        request.generation = self._session.generation
        request.sequence_ids = range(self._next_id, self._next_id + len(request.messages))

    @property
    def how(self) -> str:
        """As one batch, and how many were there already."""
        there = f", {show_messages(self._already)} of them stored before" if self._already else ""
        return (" in one batch" if self._extras.atomic else "") + there

    def told(self) -> dict[str, object]:
        """For programs."""
        if self._session is None:
            return super().told()
        told = {"producer": self._extras.producer, "lastSequenceId": self._next_id - 1, "storedBefore": self._already}
        return {**super().told(), **told}


def _as_one(pieces: Iterable[InputPiece]) -> Iterable[InputPiece]:
    """All pieces as one. Raises CommandFailed when they are too large, or too many, for one request."""
    items: list[InputMessage] = []
    size = read = 0
    for piece in pieces:
        items += piece.items
        size += sum(len(item.payload) for item in piece.items)
        read = piece.read_bytes
        if size > MAX_BYTES or len(items) > MAX_MESSAGES:
            raise CommandFailed(
                f"this is more than {MAX_BYTES >> 20} MiB or {MAX_MESSAGES} messages, too much for --atomic",
                hint="--tx takes any number",
                code=Exit.USAGE,
            )
    if items:
        yield InputPiece(items, 1, read)


def _attributes(items: Sequence[InputMessage], shared: Mapping[str, str]) -> list[dict[str, str]] | None:
    found = [{**shared, **item.attributes} for item in items]
    return found if any(found) else None


# --- publish tx ------------------------------------------------------------------------------------
#
# ``publish --tx``: everything in one transaction, so that committed readers see all of it or nothing.


class PublishRunInTransaction:
    """What is published by one transaction.

    Args:
      timeout_s: of the transaction; None: the daemon's default.
    """

    how = " in one transaction"

    def __init__(
        self, client: Client, topic: str, ttl_s: int | None, progress: Progress, timeout_s: int | None
    ) -> None:
        self.sent = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self.transaction: int | None = None
        self._client = client
        self._topic = topic
        self._ttl_s = ttl_s
        self._progress = progress
        self._timeout_s = timeout_s

    def all_of(self, pieces: Iterable[InputPiece]) -> None:
        """Begin, publish one piece after the other, commit.

        Raises:
          CommandFailed: nothing was published, or nobody knows.
        """
        try:
            self._all_of(pieces)
        except KeyboardInterrupt:
            raise self._ended(CommandFailed("interrupted", code=Exit.INTERRUPTED), "not-applied") from None
        except PlainsongError as error:
            if error.code == "topic_not_found" or isinstance(error, CommittedWithErrors):
                raise
            raise self._ended(failure_of(error), error.outcome) from error
        except CommandFailed as error:
            raise self._ended(error, "not-applied") from error.__cause__
        finally:
            self._progress.clear()

    def _all_of(self, pieces: Iterable[InputPiece]) -> None:
        from plainsong import Outgoing  # here, so that help needs no client

        count = 0
        with self._client.transaction(timeout_s=self._timeout_s, client_id="plainsong publish") as transaction:
            self.transaction = transaction.transaction.id
            for piece in pieces:
                if any(item.attributes for item in piece.items):
                    raise CommandFailed("a line has attributes, and --tx sends none", code=Exit.USAGE)
                values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
                transaction.publish(self._topic, values, ttl_s=self._ttl_s)
                count += len(values)
                self._progress.show(count, piece.read_bytes)
        self.sent = count
        receipts = transaction.receipts.get(self._topic, [])
        if receipts and receipts[-1].last_id is not None:
            self.last_id = str(receipts[-1].last_id)
        if receipts and sum(receipt.count for receipt in receipts) == count and receipts[0].first_id is not None:
            self.first_id = str(receipts[0].first_id)  # else the first ones were stored, under ids not told here

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        is_unknown = outcome == "unknown"
        failed.message += "; nobody knows whether it was committed" if is_unknown else "; nothing was published"
        if is_unknown and self.transaction is not None:
            failed.hint = f"ask later: plainsong tx show {self.transaction}"
        failed.outcome = "unknown" if is_unknown else "not-applied"
        failed.more = self.told()
        return failed

    def told(self) -> dict[str, object]:
        """For programs."""
        return {
            "topic": self._topic,
            "messages": self.sent,
            "firstId": self.first_id,
            "lastId": self.last_id,
            "transaction": None if self.transaction is None else str(self.transaction),
        }


def show_messages(count: int) -> str:
    """``1 message``, ``12 345 messages``."""
    return "1 message" if count == 1 else f"{show_count(count)} messages"
