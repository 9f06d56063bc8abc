"""``plainsong store``: what a stopped data directory, or a store in HBase, holds, read without changing it."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.command import store_text
from broker.command.settings import load_settings
from broker.stores import look_at_hbase
from plainsong.cli.exits import CommandFailed, Exit
from protocol.effects import Table
from protocol.errors import InvalidMessageId
from protocol.ids import MAX_TIMESTAMP_MS, pack_position, parse_id
from storage.base import StoreUnusable
from storage.inspect.explain import RowFilter, explain, walk
from storage.inspect.readonly import open_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.inspect.describe import DescribedRow
    from storage.inspect.explain import RowSource

_TABLES = {table.name.lower(): table for table in Table}
_WHERE = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="Read this TOML file for storage.*."),
    click.option("--data-dir", metavar="DIR", help="The daemon's data directory (storage.data_dir)."),
    click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Set a setting, as storage.kind=hbase."),
)


class Position(click.ParamType[bytes]):
    """A place in a topic: a message id, or a time in milliseconds since 1970; ten bytes."""

    name = "id|ms"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """The first ten bytes of the id, or of the first id at that time."""
        text = str(value)
        if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_TIMESTAMP_MS:
            return pack_position(int(text), 0)
        try:
            return parse_id(text)[:10]
        except InvalidMessageId:
            self.fail(f"{text[:60]!r} is neither an id of 40 hex digits nor milliseconds since 1970", param, ctx)


@click.group()
def store() -> None:
    """Look into a stopped data directory, or a store in HBase.

    Nothing is changed: of a directory a copy is opened, beside it or under
    TMPDIR, and removed afterwards; in HBase (storage.kind=hbase) daemons may
    go on meanwhile. A daemon that runs answers the same questions at its HTTP
    address.
    """


def _where(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_WHERE):
        command = option(command)
    return command


@store.command()
@_where
@click.option("--namespace", help="Only rows of this namespace.")
@click.option("--topic", metavar="[NS:]NAME", help="Only rows of topics of this name.")
@click.option("--generation", type=click.IntRange(1), help="Only rows of this generation.")
@click.option("--from", "first", type=Position(), help="Messages from here on.")
@click.option("--to", "stop", type=Position(), help="Messages before this one.")
@click.option("--table", "tables", multiple=True, type=click.Choice(list(_TABLES)), help="Repeatable; all by default.")
@click.option("--limit", type=click.IntRange(1), help="At most so many rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def dump(
    file: Path | None,
    data_dir: str | None,
    sets: tuple[str, ...],
    namespace: str | None,
    topic: str | None,
    generation: int | None,
    first: bytes | None,
    stop: bytes | None,
    tables: tuple[str, ...],
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the rows of all tables, decoded, in key order.

    Rows that do not parse are shown with the reason and their bytes.
    """
    chosen = frozenset(_TABLES[name] for name in tables) or frozenset(Table)
    if topic is not None and ":" in topic:
        # As explain and dump themselves print it.
        namespace, topic = topic.split(":", 1)
    choice = RowFilter(namespace, topic, generation, first, stop, chosen)
    left = limit
    shown = 0

    def show(row: DescribedRow) -> bool:
        nonlocal left, shown
        if choice.takes(row):
            shown += 1
            click.echo(json.dumps(row.shown()) if as_json else store_text.row_line(row))
            left = None if left is None else left - 1
        return left != 0

    with _opened(file, data_dir, sets) as rows:
        stopped = {}
        for table in sorted(chosen):
            if left != 0:
                stopped[table] = walk(rows, table, show)
    _fail_if_stopped(stopped)
    if not shown and (namespace or topic):
        wanted = f"topic {topic}" if topic else f"namespace {namespace}"
        raise CommandFailed(
            f"no rows of {wanted}", hint="`plainsong store explain` lists the topics", code=Exit.NOT_FOUND
        )


@store.command(name="explain")
@_where
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def explain_command(file: Path | None, data_dir: str | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Sum up what is there: topics, generations, rows, times, damage.

    Also tells what the janitor would remove, which write pointers are undecided
    and how far the list of invalid transactions may be pruned, and counts the
    rows of each table that do not parse, with some examples. Exits with 1 when
    there is damage.
    """
    with _opened(file, data_dir, sets) as rows:
        summary = explain(rows, now_ms=int(time.time() * 1000))
    click.echo(json.dumps(store_text.summary_json(summary)) if as_json else store_text.summary_text(summary))
    _fail_if_stopped({table: counted.stopped for table, counted in summary.tables.items()})
    if not summary.whole:
        count = sum(counted.unparseable for counted in summary.tables.values())
        raise CommandFailed(f"{count} rows do not parse", hint="they stay as they are; keep a copy of the directory")


@contextmanager
def _opened(file: Path | None, data_dir: str | None, sets: tuple[str, ...]) -> Iterator[RowSource]:
    config = load_settings(file, data_dir, None, sets).config
    try:
        if config.storage.kind == "hbase":
            yield look_at_hbase(config.storage.hbase)
            return
        with open_stopped(config.storage.data_dir) as (database, complaint):
            if complaint:
                click.echo(f"warning: {complaint}", err=True)
                click.echo("warning: what follows is what can still be read; rows may be missing", err=True)
            yield database
    except StoreUnusable as error:
        raise CommandFailed(error.detail, hint=error.hint, code=Exit.STORE) from error


def _fail_if_stopped(stopped: dict[Table, str]) -> None:
    said = [
        f"the {table.name.lower()} table could not be read to its end: {why}" for table, why in stopped.items() if why
    ]
    if said:
        raise CommandFailed("\n".join(said), hint="what was shown is good; keep a copy of the directory")
