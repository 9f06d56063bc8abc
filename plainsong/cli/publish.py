"""``plainsong publish``: messages go in, in order, and nothing is left unsaid about those that did not."""

from __future__ import annotations

import os
import stat
import sys
import time
from typing import TYPE_CHECKING, cast

import click

from plainsong.cli import inputs
from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.publish_tx import SendingWhole
from plainsong.cli.say import echo_json, note
from plainsong.cli.tables import show_bytes, show_count
from plainsong.cli.times import Length
from plainsong.cli.verb import Verb, failure_of, json_option
from plainsong.cli.where import complete_topic, where_options
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong import Client, Receipt
    from plainsong.cli.where import Where

#: Progress is shown after this, and so often.
PROGRESS_AFTER_S = 1.0
PROGRESS_EVERY_S = 0.25


@click.command(
    cls=Verb,
    examples=[
        "plainsong publish greetings hello world",
        "seq 1000 | plainsong publish numbers",
        "plainsong publish images --file picture.png",
        "plainsong poll orders --json | plainsong publish copies --ndjson",
        "plainsong publish orders --ttl 10m 'gone in ten minutes'",
        "plainsong publish orders --tx < all-or-nothing.txt",
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
    {"payload": ..., "ttlSeconds": ...}; what `poll --json` prints is such.

    With --tx all of it is one transaction: committed readers see all of it or
    nothing, and when the command fails nothing was published.
    """
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
        else:
            sending = Sending(client, topic, ttl_s, progress)
        sending.all_of(pieces)
    if as_json:
        echo_json(sending.told())
    elif not quiet:
        last = f", last id {sending.last_id}" if sending.last_id else ""
        click.echo(f"published {_messages(sending.sent)}" + (" in one transaction" if tx else "") + last)


def _parser(*, ndjson: bool, is_base64: bool) -> Callable[[bytes], inputs.Item]:
    if ndjson:
        return inputs.from_json
    return inputs.from_base64 if is_base64 else inputs.as_is


class Sending:
    """What has been published so far, and what becomes of the rest when it ends early."""

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress) -> None:
        self.sent = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self._client = client
        self._topic = topic
        self._ttl_s = ttl_s
        self._progress = progress
        self._under_way = 0

    def all_of(self, pieces: Iterable[inputs.Piece]) -> None:
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

    def _one(self, piece: inputs.Piece) -> None:
        from plainsong import Outgoing  # here, so that help needs no client

        self._under_way = len(piece.items)
        values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
        receipt: Receipt = self._client.publish(self._topic, values, ttl_s=self._ttl_s)
        self._under_way = 0
        self.sent += len(piece.items)
        self.first_id = self.first_id or (None if receipt.first_id is None else str(receipt.first_id))
        self.last_id = None if receipt.last_id is None else str(receipt.last_id)
        self._progress.show(self.sent, piece.read_bytes)

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        """``failed``, with how far it came; ``outcome`` is of the request under way."""
        unknown = self._under_way if outcome == "unknown" else 0
        failed.message += (": " if failed.code == Exit.INTERRUPTED else "; ") + self._how_far(known=not unknown)
        failed.outcome = "unknown" if unknown else "not-applied"
        failed.more = {**self.told(), "unknown": unknown}
        return failed

    def _how_far(self, *, known: bool) -> str:
        said = [f"{_messages(self.sent)} published"]
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
        return {"topic": self._topic, "messages": self.sent, "firstId": self.first_id, "lastId": self.last_id}


class Progress:
    """A line on standard error that says how far it has come; nothing before a second has passed.

    Args:
      total_bytes: of the input, where that is known.
      wanted: whether somebody is there to see it.
    """

    def __init__(self, total_bytes: int | None, *, wanted: bool) -> None:
        self._total = total_bytes
        self._wanted = wanted
        self._began_s = time.monotonic()
        self._shown_s = self._began_s + PROGRESS_AFTER_S - PROGRESS_EVERY_S
        self._is_shown = False

    def show(self, messages: int, read_bytes: int) -> None:
        """Write the line again, if it is time."""
        now_s = time.monotonic()
        if not self._wanted or now_s - self._shown_s < PROGRESS_EVERY_S:
            return
        self._shown_s = now_s
        self._is_shown = True
        part = f" ({min(100, 100 * read_bytes // self._total)} %)" if self._total else ""
        rate = messages / (now_s - self._began_s)
        line = f"{show_count(messages)} messages, {show_bytes(read_bytes)}{part}, {show_count(rate)}/s"
        click.echo(f"\r{line}\x1b[K", err=True, nl=False, color=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
            self._is_shown = False


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{show_count(count)} messages"


def _size_of_stdin() -> int | None:
    """Bytes, when standard input is a file."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
