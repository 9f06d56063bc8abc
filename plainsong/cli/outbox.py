"""The verb `outbox`: publishes the messages that programs left in a database's outbox, and shows those that wait."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, VerbGroup, json_option, one_line
from plainsong.cli.connection import where_options
from plainsong.cli.options import Length, show_length
from plainsong.cli.output import confirmed, echo_json, note, report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from plainsong.cli.connection import Where
    from plainsong.protocol.errors import PlainsongError
    from plainsong.sql import OutboxStatus, OutboxTables, TopicStatus

F = TypeVar("F", bound="Callable[..., Any]")
_OPTIONS = (
    click.option(
        "--database",
        required=True,
        metavar="URL",
        help="Database, PostgreSQL (PGPASSWORD and ~/.pgpass work) or SQLite.",
    ),
    click.option(
        "--table", default="plainsong_outbox", metavar="NAME", help="Table of messages; default: `plainsong_outbox`."
    ),
)


def database_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def with_sql(command: F) -> F:
    """Passes the module ``plainsong.sql``, an optional extra, as the first argument."""

    @wraps(command)
    def loaded(*args: Any, **named: Any) -> Any:
        try:
            from plainsong import sql  # imported here, so that help needs no SQLAlchemy
        except ModuleNotFoundError as missing:
            raise CommandFailed(str(missing).partition(":")[0], hint="pip install 'plainsong-client[sql]'") from missing
        return command(sql, *args, **named)

    return loaded  # type: ignore[return-value] # the command's parameters without the module


@contextmanager
def _opened(sql: ModuleType, database: str, table: str, **options: Any) -> Iterator[tuple[Any, OutboxTables]]:
    engine = sql.outbox_engine(database, **options)
    try:
        yield engine, sql.outbox_tables(name=table)
    finally:
        engine.dispose()


@click.group(cls=VerbGroup)
def outbox() -> None:
    """Publish the messages in a database's outbox.

    For programs that write messages next to their rows (plainsong.sql.Outbox),
    in databases without prepared transactions: PostgreSQL by default, and
    SQLite.
    """


@outbox.command(
    examples=[
        "plainsong outbox run --database postgresql://shop@db.example/shop",
        "plainsong outbox run --database sqlite:////var/lib/shop/shop.db --once",
    ]
)
@database_options
@click.option("--once", is_flag=True, help="Stop when no message is waiting.")
@click.option(
    "--keep", type=Length(), metavar="TIME", help="Keep sent messages in the table this long; default: delete them."
)
@json_option
@where_options
@with_sql
def run(
    sql: ModuleType, database: str, table: str, once: bool, keep: float | None, as_json: bool, where: Where
) -> None:
    """Publish each message once, in each topic in the order of commits.

    Runs until SIGTERM or Ctrl-C, and may be killed at any moment. One relay
    works at a time; a second waits for it to end. A topic that fails is
    reported on standard error and retried, while the others continue. With
    --json, prints a line for each request: the topic, and the number of
    messages published.
    """

    def sent(topic: str, messages: int) -> None:
        if as_json:
            echo_json({"topic": topic, "messages": messages})

    with _opened(sql, database, table) as (engine, both), where.client(retry=True) as client:
        relay = sql.Relay(
            engine, client, tables=both, keep_s=keep or 0.0, on_sent=sent, on_failure=None if once else _show_failure
        )
        if once:
            done = relay.once()
            report(f"published {output.show_messages(done.messages)}")
            return
        before = signal.signal(signal.SIGTERM, lambda *_: relay.stop())
        try:
            report("publishing; Ctrl-C stops")
            relay.run()
        finally:
            signal.signal(signal.SIGTERM, before)


def _show_failure(topic: str, error: PlainsongError) -> None:
    hint = f" ({one_line(error.hint)})" if error.hint else ""
    click.echo(f"{topic or 'the outbox'}: {error.code}: {one_line(error.detail or error.title)}{hint}", err=True)


@outbox.command(examples=["plainsong outbox status --database postgresql://shop@db.example/shop --json"])
@database_options
@json_option
@with_sql
def status(sql: ModuleType, database: str, table: str, as_json: bool) -> None:
    """Show how many messages wait, since when, and whether a relay runs.

    For monitoring: `waiting` and `oldestAgeS` grow when nothing is published.
    """
    with _opened(sql, database, table) as (engine, both):
        found: OutboxStatus = sql.outbox_status(engine, tables=both)
    if as_json:
        echo_json(_as_json(found))
        return
    note("a relay is running" if found.is_relayed else "no relay is running")
    if found.topics:
        rows = [_row(each) for each in found.topics]
        output.echo_lines(output.table(("TOPIC", ">WAITING", ">OLDEST", ">SENT UP TO", ">KEPT"), rows))


def _row(each: TopicStatus) -> tuple[str, ...]:
    oldest = "-" if each.oldest_age_s is None else show_length(each.oldest_age_s * 1000)
    last = "-" if each.last_sent < 0 else str(each.last_sent)
    return each.topic, output.show_count(each.waiting), oldest, last, output.show_count(each.kept)


def _as_json(found: OutboxStatus) -> dict[str, Any]:
    ages = [each.oldest_age_s for each in found.topics if each.oldest_age_s is not None]
    return {
        "relay": found.is_relayed,
        "waiting": found.waiting,
        "oldestAgeS": round(max(ages), 3) if ages else None,
        "topics": [
            {
                "topic": each.topic,
                "waiting": each.waiting,
                "oldestAgeS": None if each.oldest_age_s is None else round(each.oldest_age_s, 3),
                "kept": each.kept,
                "producer": each.producer,
                "nextNumber": each.next_number,
                "lastSent": each.last_sent,
            }
            for each in found.topics
        ],
    }


@outbox.command(examples=["plainsong outbox create --database sqlite:////var/lib/shop/shop.db"])
@database_options
@json_option
@with_sql
def create(sql: ModuleType, database: str, table: str, as_json: bool) -> None:
    """Create the outbox's tables, if they do not exist."""
    from plainsong.sql.outbox import raising_unavailable  # imported here, as in with_sql

    with _opened(sql, database, table, create=True) as (engine, _), raising_unavailable("cannot create the tables"):
        made = sql.create_outbox(engine, table)
    if as_json:
        echo_json({"tables": [each.name for each in made]})
    note(f"tables {table} and {table}_topics exist")


@outbox.command(examples=["plainsong outbox decide orders --resend --database sqlite:///shop.db"])
@click.argument("topic")
@database_options
@click.option(
    "--resend/--forget",
    default=None,
    help="Publish the messages, perhaps for the second time, or drop them as published.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@where_options
@with_sql
def decide(
    sql: ModuleType,
    topic: str,
    database: str,
    table: str,
    resend: bool | None,
    yes: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Let a topic continue after `outbox_in_doubt`.

    Messages were in flight when the topic was deleted and created again, the
    daemon forgot the relay, or the database was restored from a backup. It cannot
    be determined automatically whether the topic has them: look, and decide. Stop
    the relay first.
    """
    if resend is None:
        raise click.UsageError("give --resend or --forget")
    question = "Publish them, perhaps a second time" if resend else "Drop them, although the topic may not have them"
    confirmed(f"Messages of {topic} are in doubt. {question}?", yes=yes)
    with _opened(sql, database, table) as (engine, both), where.client() as client:
        count = sql.Relay(engine, client, tables=both).decide(topic, resend=resend)
    if as_json:
        echo_json({"topic": topic, "messages": count, "resend": resend})
    note(f"{'waiting again' if resend else 'dropped as published'}: {output.show_messages(count)}")
