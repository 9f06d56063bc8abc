"""The verb `publish`: sends messages in order, one by one, in batches, by a producer or in one transaction, and reports any that failed."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from plainsong import calls
from plainsong.calls import open_session
from plainsong.cli import inputs
from plainsong.cli.command import CommandFailed, Exit, Verb, failure_of, json_option
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.inputs import InputPiece
from plainsong.cli.options import Length
from plainsong.cli.output import Progress, echo_json, note, show_messages
from plainsong.errors import CommittedWithErrors
from plainsong.lightweight import MAX_BYTES, MAX_MESSAGES
from plainsong.messages import attributes_of, check_ttl, own_ttls
from plainsong.protocol.errors import InvalidParameter, PlainsongError
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from plainsong import Client, Receipt
    from plainsong.calls import Known
    from plainsong.cli.connection import Where
    from plainsong.cli.inputs import InputMessage


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
@click.option("--ndjson", is_flag=True, help="Lines are JSON: a string, or an object with a payload.")
@click.option("--base64", "is_base64", is_flag=True, help="Messages are given in base64.")
@click.option(
    "--file", "files", multiple=True, metavar="FILE", help="The whole file is one message; - is stdin. Repeatable."
)
@click.option("--ttl", "ttl_s", type=Length(), metavar="TIME", help="Time to live, e.g. 10m or 7d.")
@click.option("--retry-for", "retry_s", type=Length(), metavar="TIME", help="Retry while the daemon is unavailable.")
@click.option("--tx", is_flag=True, help="Publish everything in one transaction.")
@click.option(
    "--tx-timeout", "tx_timeout_s", type=Length(), metavar="TIME", help="Time-out of the transaction; default 30s."
)
@click.option("--producer", metavar="NAME", help="Producer name; messages that it sends again are not stored twice.")
@click.option(
    "--sequence-id", type=click.IntRange(0), metavar="N", help="Sequence id of the first message; default: the next."
)
@click.option(
    "--attribute", "attributes", multiple=True, metavar="NAME=VALUE", help="Attribute of every message. Repeatable."
)
@click.option("--routing-key", metavar="KEY", help="Short for --attribute routingKey=KEY.")
@click.option("--atomic", is_flag=True, help="Publish everything in one request, all or nothing, up to 16 MiB.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on success.")
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
    """Publish messages from arguments, lines, NDJSON or files.

    Each MESSAGE is one message. Without any, each line of standard input is a
    message, published as it arrives. Messages are stored in the order given.
    Exit code 0 means that all are durable; otherwise the command says how many
    are. The rest were not published, except that the outcome of the last
    request may be unknown.

    A line of --ndjson is a string, {"base64": "..."}, or an object
    {"payload": ..., "ttlSeconds": ..., "attributes": {...}}, as `poll --json`
    prints it.

    With --tx everything is one transaction: committed readers see all of it or
    nothing, and when the command fails nothing was published.

    With --producer and --sequence-id you can run the command again after a
    failure: messages already stored are not stored twice.
    """
    extras = Extras(producer, sequence_id, parse_attributes(attributes), routing_key, atomic)
    check_extras(extras)
    if extras.sequence_id is not None and producer is None:
        raise click.UsageError("--sequence-id needs --producer")
    if tx and extras.given:
        raise click.UsageError("--tx cannot be combined with --producer, --attribute, --routing-key or --atomic")
    if tx_timeout_s is not None and not tx:
        raise click.UsageError("--tx-timeout needs --tx")
    if ndjson and is_base64:
        raise click.UsageError("--ndjson and --base64 exclude each other: NDJSON has base64 of its own")
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
        elif extras.given or ndjson:  # its lines may have their own attributes
            sending = PublishRunWithExtras(client, topic, ttl_s, progress, extras)
        else:
            sending = PublishRun(client, topic, ttl_s, progress)
        sending.all_of(pieces)
    if as_json:
        echo_json(sending.as_json())
    elif not quiet:
        last = f", last id {sending.last_id}" if sending.last_id else ""
        click.echo(f"published {show_messages(sending.sent)}{sending.how}{last}")


def _parser(*, ndjson: bool, is_base64: bool) -> Callable[[bytes], inputs.InputMessage]:
    if ndjson:
        return inputs.from_json
    return inputs.from_base64 if is_base64 else inputs.as_is


def _size_of_stdin() -> int | None:
    """The size of standard input in bytes, when it is a file."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class Extras(NamedTuple):
    """Options that hold for all messages of the command."""

    producer: str | None = None
    sequence_id: int | None = None
    """The sequence id of the first message; None: continue after the producer's last."""
    attributes: Mapping[str, str] = {}
    routing_key: str | None = None
    atomic: bool = False

    @property
    def given(self) -> bool:
        return self.producer is not None or bool(self.attributes) or self.routing_key is not None or self.atomic


def parse_attributes(texts: Iterable[str]) -> dict[str, str]:
    """Parses ``NAME=VALUE``. Raises click.UsageError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--attribute {text!r} is not NAME=VALUE")
        found[name] = value
    return found


def check_extras(extras: Extras) -> None:
    """Raises CommandFailed: no message can have these attributes."""
    try:
        attributes_of(extras.attributes, extras.routing_key)
    except InvalidParameter as error:
        raise CommandFailed(error.detail, hint=error.hint, code=Exit.USAGE) from error


# --- runs of publish -------------------------------------------------------------------------------


class PublishRun:
    """Publishes piece by piece, and reports what was published when it ends early."""

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
        """Publishes all pieces in order.

        Raises:
          CommandFailed: it ended early; the error says what was published, what was not, and what is unknown.
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
        """Sends one request. Raises PlainsongError."""
        from plainsong import Outgoing  # here, so that help needs no client

        values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
        return self.client.publish(self.topic, values, ttl_s=self.ttl_s)

    @property
    def how(self) -> str:
        """An addition to the summary, after the number of messages."""
        return ""

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        """Adds to ``failed`` how far the run came; ``outcome`` is that of the request under way."""
        unknown = self._under_way if outcome == "unknown" else 0
        failed.message += (": " if failed.code == Exit.INTERRUPTED else "; ") + self._how_far(known=not unknown)
        failed.outcome = "unknown" if unknown else "not-applied"
        failed.more = {**self.as_json(), "unknown": unknown}
        return failed

    def _how_far(self, *, known: bool) -> str:
        if not self.sent and known:
            return "nothing published"
        parts = [f"{show_messages(self.sent)} published"] if self.sent else []
        if self.last_id:
            parts.append(f"last id {self.last_id}")
        if self._under_way and known:
            parts.append(f"messages from number {self.sent + 1} on not published")
        elif self._under_way:
            first, last = self.sent + 1, self.sent + self._under_way
            parts.append(f"messages {first} to {last} unknown, the rest not published")
        else:
            parts.append("the rest not published")
        return ", ".join(parts)

    def as_json(self) -> dict[str, object]:
        return {"topic": self.topic, "messages": self.sent, "firstId": self.first_id, "lastId": self.last_id}


class PublishRunWithExtras(PublishRun):
    """Publishes as a producer, with attributes, a routing key, or as one atomic batch.

    The producer's session is opened before its first message.
    """

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress, extras: Extras) -> None:
        super().__init__(client, topic, ttl_s, progress)
        if ttl_s is not None:
            check_ttl(ttl_s)
        self._extras = extras
        self._session: Known | None = None
        self._next_id = 0
        self._already = 0

    def all_of(self, pieces: Iterable[InputPiece]) -> None:
        """Like ``PublishRun``; an atomic batch is read whole before it is sent."""
        super().all_of(_as_one(pieces) if self._extras.atomic else pieces)

    def publish(self, piece: InputPiece) -> Receipt:
        """Sends one request; with a producer it is safe to send it again."""
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
            # Compared with the opening: messages that an earlier attempt of this run stored do not count.
            self._already += min(len(items), max(0, self._session.last_sequence_id + 1 - self._next_id))
        self._next_id += len(items)
        return receipt

    def _put_producer(self, request: PublishRequest, name: str) -> None:
        if self._session is None:
            opening = open_session(self.client.namespace, self.topic, name)
            # A session opened twice has a new epoch, and this is the latest.
            self._session = run_call(self.client, opening._replace(repeat="harmless"))
            first = self._extras.sequence_id
            self._next_id = self._session.last_sequence_id + 1 if first is None else first
        request.producer = name
        request.producer_epoch = self._session.epoch
        request.generation = self._session.generation
        request.sequence_ids = range(self._next_id, self._next_id + len(request.messages))

    @property
    def how(self) -> str:
        there = f", {show_messages(self._already)} of them already stored" if self._already else ""
        return (" in one batch" if self._extras.atomic else "") + there

    def as_json(self) -> dict[str, object]:
        if self._session is None:
            return super().as_json()
        extra = {
            "producer": self._extras.producer,
            "lastSequenceId": self._next_id - 1,
            "storedBefore": self._already,
        }
        return {**super().as_json(), **extra}


def _as_one(pieces: Iterable[InputPiece]) -> Iterable[InputPiece]:
    """Joins all pieces. Raises CommandFailed when they are too large, or too many, for one request."""
    items: list[InputMessage] = []
    size = read = 0
    for piece in pieces:
        items += piece.items
        size += sum(len(item.payload) for item in piece.items)
        read = piece.read_bytes
        if size > MAX_BYTES or len(items) > MAX_MESSAGES:
            raise CommandFailed(
                f"more than {MAX_BYTES >> 20} MiB or {MAX_MESSAGES} messages, too much for --atomic",
                hint="--tx takes any number",
                code=Exit.USAGE,
            )
    if items:
        yield InputPiece(items, 1, read)


def _attributes(items: Sequence[InputMessage], shared: Mapping[str, str]) -> list[dict[str, str]] | None:
    found = [{**shared, **item.attributes} for item in items]
    return found if any(found) else None


class PublishRunInTransaction:
    """Publishes everything in one transaction.

    Args:
      timeout_s: the transaction's time-out; None: the daemon's default.
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
        """Begins, publishes all pieces, commits.

        Raises:
          CommandFailed: nothing was published, or the outcome of the commit is unknown.
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
                    raise CommandFailed("a line has attributes, which --tx cannot send", code=Exit.USAGE)
                values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
                transaction.publish(self._topic, values, ttl_s=self._ttl_s)
                count += len(values)
                self._progress.show(count, piece.read_bytes)
        self.sent = count
        receipts = transaction.receipts.get(self._topic, [])
        if receipts and receipts[-1].last_id is not None:
            self.last_id = str(receipts[-1].last_id)
        if receipts and sum(receipt.count for receipt in receipts) == count and receipts[0].first_id is not None:
            self.first_id = str(
                receipts[0].first_id
            )  # otherwise the first were stored, and the receipts lack their ids

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        is_unknown = outcome == "unknown"
        failed.message += "; outcome of the commit unknown" if is_unknown else "; nothing was published"
        if is_unknown and self.transaction is not None:
            failed.hint = f"check later with plainsong tx show {self.transaction}"
        failed.outcome = "unknown" if is_unknown else "not-applied"
        failed.more = self.as_json()
        return failed

    def as_json(self) -> dict[str, object]:
        return {
            "topic": self._topic,
            "messages": self.sent,
            "firstId": self.first_id,
            "lastId": self.last_id,
            "transaction": None if self.transaction is None else str(self.transaction),
        }
