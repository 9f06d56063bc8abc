"""``plainsong store``: shows what a stopped data directory, or a store in HBase, holds, without changing it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.command.failures import reported
from broker.command.options import load_settings
from broker.stores import look_at_hbase
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import InvalidMessageId
from plainsong.protocol.ids import MAX_TIMESTAMP_MS, pack_position, parse_id
from plainsong.protocol.plurals import counted, plural
from storage.clock import now_ms
from storage.inspect.explain import RowFilter, explain, walk
from storage.inspect.readonly import open_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.inspect.describe import DescribedRow
    from storage.inspect.explain import GenerationSummary, RowSource, Summary, TopicSummary

_TABLES = {table.name.lower(): table for table in Table}
_WHERE = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="Read this TOML file for storage.*."),
    click.option("--data-dir", metavar="DIR", help="The daemon's data directory (storage.data_dir)."),
    click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Set a setting, e.g. storage.kind=hbase."),
)


class Position(click.ParamType[bytes]):
    """A position in a topic: a message id, or a time in milliseconds since 1970; ten bytes."""

    name = "id|ms"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return the first ten bytes of the id, or of the first id at that time."""
        text = str(value)
        if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_TIMESTAMP_MS:
            return pack_position(int(text), 0)
        try:
            return parse_id(text)[:10]
        except InvalidMessageId:
            self.fail(f"{text[:60]!r} is neither an id of 40 hex digits nor milliseconds since 1970", param, ctx)


@click.group()
def store() -> None:
    """Inspect a stopped data directory, or a store in HBase.

    Changes nothing: it opens a copy of the directory, made next to it or under
    TMPDIR and removed afterwards. With HBase (storage.kind=hbase) the daemons
    may keep running. A running daemon answers the same questions over HTTP.
    """


def _where(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_WHERE):
        command = option(command)
    return command


@store.command()
@_where
@click.option("--namespace", help="Only rows of this namespace.")
@click.option("--topic", metavar="[NS:]NAME", help="Only rows of topics with this name.")
@click.option("--generation", type=click.IntRange(1), help="Only rows of this generation.")
@click.option("--from", "first", type=Position(), help="Messages from here on.")
@click.option("--to", "stop", type=Position(), help="Messages before this one.")
@click.option("--table", "tables", multiple=True, type=click.Choice(list(_TABLES)), help="Repeatable; all by default.")
@click.option("--limit", type=click.IntRange(1), help="Show at most this many rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
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

    Rows that cannot be parsed are shown with the reason and their bytes.
    """
    chosen = frozenset(_TABLES[name] for name in tables) or frozenset(Table)
    if topic is not None and ":" in topic:
        # The form in which ``explain`` and ``dump`` print a topic.
        namespace, topic = topic.split(":", 1)
    choice = RowFilter(namespace, topic, generation, first, stop, chosen)
    left = limit
    shown = 0

    def show(row: DescribedRow) -> bool:
        nonlocal left, shown
        if choice.takes(row):
            shown += 1
            click.echo(json.dumps(row.shown()) if as_json else row_line(row))
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
    """Summarize a store: topics, generations, rows, times, damage.

    Also shows what cleaning would remove, which write pointers are undecided
    and how far the list of invalid transactions may be pruned, and counts the
    rows of each table that cannot be parsed, with some examples. Exits with 1 if
    there is damage.
    """
    with _opened(file, data_dir, sets) as rows:
        summary = explain(rows, now_ms=now_ms())
    click.echo(json.dumps(summary_json(summary)) if as_json else summary_text(summary))
    _fail_if_stopped({table: totals.stopped for table, totals in summary.tables.items()})
    if not summary.whole:
        count = sum(totals.unparseable for totals in summary.tables.values())
        raise CommandFailed(
            f"{counted(count, 'row')} cannot be parsed", hint="they are left unchanged; keep a copy of the directory"
        )


@contextmanager
def _opened(file: Path | None, data_dir: str | None, sets: tuple[str, ...]) -> Iterator[RowSource]:
    config = load_settings(file, data_dir, None, sets).config
    with reported():
        if config.storage.kind == "hbase":
            yield look_at_hbase(config.storage.hbase)
            return
        with open_stopped(config.storage.data_dir) as (database, complaint):
            if complaint:
                click.echo(f"warning: {complaint}", err=True)
                click.echo("warning: the store is damaged; some rows may be missing below", err=True)
            yield database


def _fail_if_stopped(stopped: dict[Table, str]) -> None:
    problems = [
        f"the {table.name.lower()} table could not be read completely: {why}" for table, why in stopped.items() if why
    ]
    if problems:
        raise CommandFailed("\n".join(problems), hint="the rows shown are good; keep a copy of the directory")


# --- text and JSON ---------------------------------------------------------------------------------


_MAX_SHOWN_BYTES = 60


def row_line(row: DescribedRow) -> str:
    """Return a row as one line."""
    where = f"{row.name} g{row.generation}" if row.name is not None else ""
    if row.problem:
        where = where or row.key[:_MAX_SHOWN_BYTES].hex()
        return f"{row.table.name.lower():8} {where}  CANNOT BE PARSED: {row.problem}"
    fields = {name: value for name, value in row.fields.items() if name not in ("payload", "payload_bytes")}
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return f"{row.kind:8} {where}  {text}{_payload(row)}"


def _payload(row: DescribedRow) -> str:
    payload = row.message.payload if row.message is not None else None
    if payload is None:
        return ""
    shown = repr(payload[:_MAX_SHOWN_BYTES])[1:]
    return f"  {len(payload)} bytes {shown}{'…' if len(payload) > _MAX_SHOWN_BYTES else ''}"


def summary_json(summary: Summary) -> dict[str, object]:
    """Return a summary for JSON."""
    return {
        "topics": [
            {
                "namespace": name.namespace,
                "topic": name.topic,
                "generation": topic.metadata.generation if topic.metadata is not None else None,
                "deleted_ms": topic.metadata.deleted_ms if topic.metadata is not None else None,
                "properties": topic.metadata.properties.stored() if topic.metadata is not None else None,
                "generations": [
                    {
                        "generation": number,
                        "messages": rows.messages,
                        "references": rows.references,
                        "payload_rows": rows.payload_rows,
                        "bytes": rows.bytes,
                        "first_ms": rows.first_ms,
                        "last_ms": rows.last_ms,
                        "rolled_back": rows.rolled_back,
                        "invalid": rows.invalid,
                        "readers": rows.readers,
                        "producers": rows.producers,
                        "undecided_pointers": rows.pointers,
                        "oldest_pointer": rows.oldest_pointer,
                        "stored_unpublished": rows.stored,
                        "staged_unpublished": rows.staged,
                        "to_be_cleaned": topic.cleaned(number),
                    }
                    for number, rows in sorted(topic.generations.items())
                ],
            }
            for name, topic in sorted(summary.topics.items())
        ],
        "tables": {
            table.name.lower(): {
                "rows": totals.rows,
                "bytes": totals.bytes,
                "unparseable": totals.unparseable,
                "examples": [row.shown() for row in totals.examples],
                "stopped": totals.stopped or None,
            }
            for table, totals in summary.tables.items()
        },
        "transactions": {
            "service": summary.pruning.authority,
            "in_progress": summary.pruning.transactions,
            "invalid": len(summary.pruning.invalid),
            "oldest_invalid": min(summary.pruning.invalid, default=None),
            "safe_bound": summary.pruning.safe_bound,
            "last_pass_ms": summary.pruning.last_pass_ms,
            "oldest_referenced": _oldest(summary),
        },
    }


def summary_text(summary: Summary) -> str:
    """Return a summary for people."""
    lines = [counted(len(summary.topics), "topic") if summary.topics else "no topics"]
    for name, topic in sorted(summary.topics.items()):
        lines.append(f"{name}  {_state(topic)}")
        lines += [_generation_line(topic, number) for number in sorted(topic.generations)]
    lines += ["", *_transactions(summary), ""]
    for table, totals in summary.tables.items():
        lines.append(
            f"{table.name.lower():8}  {counted(totals.rows, 'row')}, {counted(totals.bytes, 'byte')}, "
            f"{totals.unparseable} unreadable"
        )
        lines += [f"          {row_line(row)}" for row in totals.examples]
    return "\n".join(lines)


def _oldest(summary: Summary) -> int | None:
    """Return the lowest write pointer of the rows that a topic still has."""
    known = (rows.oldest_pointer for topic in summary.topics.values() for rows in topic.generations.values())
    return min((pointer for pointer in known if pointer is not None), default=None)


def _transactions(summary: Summary) -> list[str]:
    """Return the facts for pruning the invalid list by hand."""
    pruning = summary.pruning
    lines = [
        f"transactions  service {pruning.authority or 'not chosen yet'}, {pruning.transactions} in progress, "
        f"{counted(len(pruning.invalid), 'invalid pointer')}"
    ]
    if pruning.invalid:
        lines.append(f"              oldest invalid pointer {min(pruning.invalid)}")
    oldest = _oldest(summary)
    if oldest is not None:
        lines.append(f"              oldest pointer with rows in a topic {oldest}")
    if pruning.safe_bound is None or pruning.last_pass_ms is None:
        lines.append("              no pass over all topics is complete yet: nothing is safe to prune")
    else:
        lines.append(
            f"              safe to prune up to {pruning.safe_bound}, by the pass of {_time(pruning.last_pass_ms)}"
        )
    return lines


def _state(topic: TopicSummary) -> str:
    metadata = topic.metadata
    if metadata is None:
        return "has rows, but no readable metadata row"
    if metadata.deleted_ms is not None:
        return f"generation {metadata.generation}, deleted {_time(metadata.deleted_ms)}"
    return f"generation {metadata.generation}, ttl {metadata.properties.ttl_s} s"


def _generation_line(topic: TopicSummary, number: int) -> str:
    rows: GenerationSummary = topic.generations[number]
    sizes = ((rows.messages, "message"), (rows.payload_rows, "payload row"), (rows.bytes, "byte"))
    parts = [f"  g{number}: " + ", ".join(counted(count, thing) for count, thing in sizes)]
    if rows.first_ms is not None and rows.last_ms is not None:
        parts.append(f"{_time(rows.first_ms)} to {_time(rows.last_ms)}")
    for count, what in (
        (rows.readers, plural("reader", rows.readers)),
        (rows.producers, plural("producer", rows.producers)),
        (rows.references, f"{plural('row', rows.references)} for stored messages"),
        (rows.stored, "stored and not published"),
        (rows.staged, "staged and not published"),
        (rows.rolled_back, "rolled back"),
        (rows.invalid, "of invalid transactions"),
        (topic.cleaned(number), "to be cleaned"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if rows.oldest_pointer is not None:
        parts.append(f"{counted(rows.pointers, 'undecided write pointer')}, the oldest {rows.oldest_pointer}")
    return ", ".join(parts)


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
