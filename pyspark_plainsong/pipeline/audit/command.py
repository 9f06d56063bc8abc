"""The job `audit`: its commands keep the tables, query and export them, and generate messages to try it with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from plainsong.cli import output
from plainsong.cli.command import Verb, VerbGroup
from plainsong.cli.options import Length, Place, show_time
from plainsong.cli.output import counted, show_count, show_messages
from plainsong.protocol.ids import FIRST_BOUND
from pyspark_plainsong.pipeline.audit.generator import payloads
from pyspark_plainsong.pipeline.job import Run, job_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark_plainsong.pipeline.audit.lineage import Direction
    from pyspark_plainsong.pipeline.audit.reading import Order


@click.group(cls=VerbGroup)
def audit() -> None:
    """Audit trail, usage registry and lineage of datasets.

    Messages about programs that access datasets, and about changed metadata,
    become tables: who accessed what and when, which program uses which dataset,
    which dataset was derived from which. Unreadable messages are kept as dead
    letters.
    """


# --- output ----------------------------------------------------------------------------------------


class Folder(click.Path):
    """A folder on this machine: a path, or ``file:…``."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails for any other URL."""
        text = str(value)
        if text.startswith("file:"):
            text = "/" + text.removeprefix("file:").lstrip("/")
        elif "://" in text:
            self.fail(f"{text[:80]!r} is not a folder; tables need one on a local or mounted disk", param, ctx)
        return super().convert(text, param, ctx)


root_option: Final = click.option(
    "--root",
    required=True,
    metavar="DIR",
    type=Folder(),
    help="Folder of the tables, on a disk that all Spark workers can reach.",
)


@audit.command(
    examples=[
        "plainsong pipeline run audit run audit --root audit-tables",
        "plainsong pipeline run audit run audit --root audit-tables --follow",
        "plainsong pipeline run audit run audit --root audit-tables --dry-run",
    ]
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@root_option
@click.option(
    "--follow", is_flag=True, help=("Continue until interrupted, instead of stopping when everything is added.")
)
@click.option("--every", default="1s", metavar="TIME", type=Length(), help="Interval of --follow; default: 1s.")
@click.option(
    "--batch-rows", default=100_000, type=click.IntRange(1), show_default=True, help="Maximum rows of one batch."
)
@click.option(
    "--batch-bytes", default=64 << 20, type=click.IntRange(1), show_default=True, help="Maximum bytes of one batch."
)
@click.option(
    "--isolation",
    type=click.Choice(["committed", "uncommitted"]),
    help=("Isolation of reading; default: the connector's."),
)
@click.option("--may-lose", is_flag=True, help="Skip messages that expired before they were read, instead of failing.")
@click.option(
    "--keep",
    default="1h",
    metavar="TIME",
    type=Length(),
    help="Keep merged files this long, for readers that use them; default: 1h.",
)
@click.option(
    "--publish-lineage",
    is_flag=True,
    help="At the end, publish all flows between datasets to the topic system:lineage, for the console; not with --follow.",
)
@job_options("audit")
def run(run: Run, topics: tuple[str, ...], root: Path, *, publish_lineage: bool, **options: Any) -> None:
    """Add the messages of topics to the tables, each message once.

    The tables record their positions, so a run continues where a killed one
    stopped. Only one run can write a folder at a time; readers do not wait.
    """
    if publish_lineage and options["follow"]:
        raise click.UsageError("--publish-lineage publishes at the end, which --follow does not have")
    if run.dry_run:
        _say_what_would_be(run, topics, root)
        return
    from pyspark_plainsong.pipeline.audit.stream import Choices, run_stream  # here, so that help needs no pyspark

    every, follow = options.pop("every"), options.pop("follow")
    choices = Choices(every=f"{every} seconds" if follow else None, keep_s=options.pop("keep"), **options)
    total, manifest = run_stream(run, topics, root, choices)
    if publish_lineage:
        from pyspark_plainsong.pipeline.audit.lineage import publish_flows

        run.progress.result(f"published {counted(publish_flows(run, root, manifest), 'flow')} to system:lineage")
    rows = {name: manifest.rows(name) for name in ("trail", "dead_letters")}
    run.progress.result(
        f"{show_messages(total.messages)} in {counted(total.batches, 'batch')}, {show_count(total.bad)} of them dead letters;"
        f" the trail has {counted(rows['trail'], 'row')}, the dead letters {show_count(rows['dead_letters'])}",
        messages=total.messages,
        batches=total.batches,
        deadLetters=total.bad,
        trailRows=rows["trail"],
        deadLetterRows=rows["dead_letters"],
    )


def _say_what_would_be(run: Run, topics: tuple[str, ...], root: Path) -> None:
    """Report the number of waiting messages and where they start.

    Raises:
      TopicNotFound, FolderTaken, TablesUnreadable: nothing happened.
    """
    from pyspark_plainsong.pipeline.audit.manifest import first_look

    manifest = first_look(root)
    with run.client(*topics) as client:
        for topic in topics:
            name = f"{run.where.namespace}:{topic}"
            life = int(client.admin.properties(topic)["generation"])
            last = manifest.living({name: life}).through.get(name)
            waiting = client.admin.stats(topic, reader=last or FIRST_BOUND.hex())["reader"]["visible"]
            begin = f"after message {last}" if last else "from the oldest message on"
            text = f"would add {show_messages(waiting)} of {topic} to the tables in {root}, {begin}"
            run.progress.result(text, "would", topic=topic, root=str(root), after=last, messages=waiting)


limit_option: Final = click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    metavar="N",
    help=("Maximum number of rows."),
)


# --- trail, usage, dead-letters --------------------------------------------------------------------


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit trail --root audit-tables --entity dataset:purchases",
        "plainsong pipeline run audit trail --root audit-tables --user alice --from 2d --json",
    ],
)
@root_option
@click.option(
    "--entity",
    metavar="KIND:NAME",
    help=("Entity, e.g. dataset:purchases; program:NAME also finds the program's accesses."),
)
@click.option("--user", metavar="NAME", help="User who did it.")
@click.option("--from", "start", type=Place(now="now"), metavar="TIME", help="Only events from this time on.")
@click.option("--to", "end", type=Place(now="now"), metavar="TIME", help="Only events before this time.")
@click.option("--all-namespaces", is_flag=True, help="Search all namespaces, not only --namespace.")
@click.option("--oldest-first", is_flag=True, help="Oldest first; default: newest first.")
@limit_option
@job_options("audit", dry_run=False)
def trail(
    run: Run,
    root: Path,
    entity: str | None,
    user: str | None,
    start: object,
    end: object,
    all_namespaces: bool,
    oldest_first: bool,
    limit: int,
) -> None:
    """Search the audit trail: accesses and metadata changes.

    Times are those of the events, not of their publication.
    """
    from pyspark_plainsong.pipeline.audit.reading import first_rows, trail_filter
    from pyspark_plainsong.pipeline.audit.table import TRAIL

    if entity is not None and ":" not in entity:
        raise click.BadParameter(f"{entity!r} lacks a kind; use for example dataset:{entity}", param_hint="--entity")
    where = trail_filter(
        namespace=None if all_namespaces else run.where.namespace,
        entity=entity,
        user=user,
        start=moment(start, "--from"),
        end=moment(end, "--to"),
    )
    order: Order = "ascending" if oldest_first else "descending"
    rows = first_rows(root, TRAIL, where, ("time", "message_id"), order, limit).to_pylist()
    for row in rows:
        row["what"] = row["access"] or "metadata"
    headings = ("time", "user", "what", "entity", "program", "run")
    if run.as_json:
        rows = [{name: value for name, value in row.items() if name != "what"} for row in rows]
    show_rows(run, "trail", headings, rows, limit)


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit usage --root audit-tables --dataset purchases",
        "plainsong pipeline run audit usage --root audit-tables --program history-builder",
    ],
)
@root_option
@click.option("--program", metavar="NAME", help="Show what this program uses.")
@click.option("--dataset", metavar="NAME", help="Show what uses this dataset.")
@click.option("--all-namespaces", is_flag=True, help="Search all namespaces, not only --namespace.")
@limit_option
@job_options("audit", dry_run=False)
def usage(run: Run, root: Path, program: str | None, dataset: str | None, all_namespaces: bool, limit: int) -> None:
    """Show which program uses which dataset, most recently used first."""
    from pyspark_plainsong.pipeline.audit.reading import all_of, arrow
    from pyspark_plainsong.pipeline.audit.table import USAGE

    given = {"namespace": None if all_namespaces else run.where.namespace, "program": program, "dataset": dataset}
    found = arrow(root, USAGE, all_of(given)).sort_by([("last_seen", "descending"), ("program", "ascending")])
    headings = ("program", "dataset", ">reads", ">writes", ">unknowns", "first_seen", "last_seen")
    show_rows(run, "usage", headings, found.slice(0, limit).to_pylist(), limit)


@click.command(
    cls=Verb,
    name="dead-letters",
    examples=[
        "plainsong pipeline run audit dead-letters --root audit-tables",
        "plainsong pipeline run audit dead-letters --root audit-tables --reason wrong_type --json",
    ],
)
@root_option
@click.option("--reason", metavar="WORD", help="Only those with this reason.")
@limit_option
@job_options("audit", dry_run=False)
def dead_letters(run: Run, root: Path, reason: str | None, limit: int) -> None:
    """Show the messages that could not be read, and why, newest first.

    With --json the whole payload is shown, in hexadecimal digits.
    """
    from pyspark_plainsong.pipeline.audit.reading import all_of, first_rows
    from pyspark_plainsong.pipeline.audit.table import DEAD_LETTERS

    where = all_of({"reason": reason})
    rows = first_rows(root, DEAD_LETTERS, where, ("message_id", "topic"), "descending", limit).to_pylist()
    show_rows(run, "deadLetter", ("message_id", "topic", "published", "reason", "detail"), rows, limit)


# --- lineage ---------------------------------------------------------------------------------------


class Depth(click.ParamType["int | None"]):
    """A number of steps, or ``all``."""

    name = "depth"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number; None for all."""
        if value == "all" or value is None:
            return None
        if not str(value).isascii() or not str(value).isdigit() or not 1 <= int(str(value)) <= 1_000_000:
            self.fail(f"{str(value)[:40]!r} is neither a number above 0 nor 'all'", param, ctx)
        return int(str(value))


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit lineage purchases --root audit-tables",
        "plainsong pipeline run audit lineage purchases --root audit-tables \\",
        "    --direction down --depth 2 --runs",
    ],
)
@click.argument("dataset")
@root_option
@click.option(
    "--direction",
    type=click.Choice(["up", "down"]),
    default="up",
    show_default=True,
    help="Towards its sources (up), or what was derived from it (down).",
)
@click.option(
    "--depth", type=Depth(), default="all", show_default=True, metavar="N|all", help=("Maximum number of steps.")
)
@click.option("--runs", "by_run", is_flag=True, help="Show runs of a program separately.")
@click.option("--unknown", is_flag=True, help="Count an access of unknown kind as both a read and a write.")
@click.option("--from", "start", type=Place(now="now"), metavar="TIME", help="Only accesses from this time on.")
@click.option("--to", "end", type=Place(now="now"), metavar="TIME", help="Only accesses before this time.")
@limit_option
@job_options("audit", dry_run=False)
def lineage(
    run: Run,
    dataset: str,
    root: Path,
    direction: str,
    depth: int | None,
    by_run: bool,
    unknown: bool,
    start: object,
    end: object,
    limit: int,
) -> None:
    """Show the flows from dataset to dataset that lead to DATASET, or from it.

    A flow is a run of a program that read one dataset and wrote the other. Each
    is shown once, with its distance; a cycle is shown, and ends the search.
    """
    from pyspark_plainsong.pipeline.audit.lineage import FlowsAt, walk

    towards: Direction = "up" if direction == "up" else "down"
    flows = FlowsAt(
        root,
        run.where.namespace,
        towards,
        unknown=unknown,
        by_run=by_run,
        start=moment(start, "--from"),
        end=moment(end, "--to"),
    )
    rows = []
    for distance, flow in islice(walk(dataset, flows, towards, depth), limit):
        row = {"distance": distance, **vars(flow)}
        del row["run" if flow.run is None else "runs"]
        rows.append(row)
        if not len(rows) % 1000:
            run.progress.step(len(rows), what=dataset)
    which = ("run",) if by_run else (">runs",)
    headings = (">distance", "source", "program", "target", *which, "first_seen", "last_seen")
    show_rows(run, "flow", headings, rows, limit)


# --- export ----------------------------------------------------------------------------------------

#: What can be exported.
WHAT: Final = {
    "trail": "the audit trail",
    "usage": "the usage registry",
    "edges": "accesses of datasets by program runs",
    "dead_letters": "the messages that could not be read",
    "flows": "from dataset to dataset, one row per program",
    "closure": "every pair of datasets where one was derived from the other, and their distance",
}


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit export --root audit-tables --out export",
        "plainsong pipeline run audit export --root audit-tables --out export --table closure",
    ],
)
@root_option
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help=("Folder to write; each table gets a subfolder."),
)
@click.option("--table", "chosen", multiple=True, type=click.Choice(list(WHAT)), help="Repeatable; default: all.")
@click.option(
    "--depth",
    type=Depth(),
    default="all",
    show_default=True,
    metavar="N|all",
    help=("Maximum distance in the closure."),
)
@click.option("--unknown", is_flag=True, help="Count an access of unknown kind as both a read and a write.")
@job_options("audit")
def export(run: Run, root: Path, out: Path, chosen: tuple[str, ...], depth: int | None, unknown: bool) -> None:
    """Write tables as plain Parquet, all as of one moment.

    The tables in --root consist of many parts that need the manifest; other
    programs need a plain folder per table. Existing folders are replaced.
    """
    from pyspark_plainsong.pipeline.audit.exporting import export_tables  # here, so that help needs no pyspark

    export_tables(run, root, out, chosen or tuple(WHAT), depth, unknown)


# --- generate --------------------------------------------------------------------------------------

#: Messages between progress reports, which also write the metrics.
REPORT_EVERY = 10_000


class Count(click.ParamType[int]):
    """A whole number, which may be written as 1e6."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, from 0 to 10^12."""
        try:
            number = float(str(value))
        except ValueError:
            number = -1
        if not 0 <= number <= 1e12 or number != int(number):
            self.fail(f"{str(value)[:40]!r} is not a whole number; use for example 1000 or 1e6", param, ctx)
        return int(number)


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit generate --messages 1e4 --topic audit --create",
        "plainsong pipeline run audit generate --messages 1e6 --seed 7 --bad 0.001 --out audit.jsonl",
    ],
)
@click.option("--messages", type=Count(), required=True, metavar="N", help="Number of messages, e.g. 1e6.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help=("Seed; equal seeds make equal messages.")
)
@click.option(
    "--bad",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="PART",
    help="Fraction of unreadable messages.",
)
@click.option(
    "--topic",
    metavar="NAME",
    help=("Topic to publish to; each message is published once, even if the command is repeated."),
)
@click.option("--create", is_flag=True, help="Create the topic if it does not exist.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="File to write, one line per message; - is standard output.",
)
@job_options("audit")
def generate(run: Run, messages: int, seed: int, bad: float, topic: str | None, create: bool, out: Path | None) -> None:
    """Generate audit messages: programs, runs, users, metadata edits, some bad.

    The same options generate the same messages. A repeated command continues
    where a killed one stopped, under a producer named after the options.
    """
    if (topic is None) == (out is None):
        raise click.UsageError("give either --topic or --out")
    if run.dry_run:
        sample = list(islice(payloads(messages, seed, bad=bad), 3))
        run.progress.result(
            f"would make {show_messages(messages)} for {topic or out}, beginning with:",
            "would",
            messages=messages,
        )
        for each in sample:
            run.progress.result(each.decode(errors="replace"), "sample", payload=each.decode(errors="replace"))
        return
    made = payloads(messages, seed, bad=bad)
    if topic is not None:
        there = _publish(run, made, topic, f"audit-generate-{seed}-{messages}-{bad}", create, messages)
        text = f"published {show_messages(messages - there)} to {topic}"
        run.progress.result(
            text + (f"; {show_count(there)} already there" if there else ""),
            topic=topic,
            messages=messages - there,
            before=there,
        )
    elif str(out) == "-":
        sys.stdout.buffer.writelines(each + b"\n" for each in made)
    elif out is not None:
        with out.open("wb") as file:
            file.writelines(each + b"\n" for each in _reporting(run, made, messages, str(out)))
        run.progress.result(f"wrote {show_messages(messages)} to {out}", out=str(out), messages=messages)


def _publish(run: Run, made: Iterator[bytes], topic: str, producer_name: str, create: bool, messages: int) -> int:
    """Publish the messages that the topic does not have yet; return the number of those it had.

    Raises:
      PlainsongError: some messages may not have been published; running it again publishes the rest.
    """
    with run.client(topic) as client:
        if create:
            client.create_topic(topic, if_not_exists=True)
        with client.producer(topic, producer_name) as producer:
            there = min(messages, producer.last_sequence_id + 1)
            sent = None
            for number, each in enumerate(_reporting(run, made, messages, topic)):
                if number >= there:
                    sent = producer.send(each, sequence_id=number)
            producer.flush()
            if sent is not None:
                sent.result()
    return there


def _reporting(run: Run, made: Iterator[bytes], messages: int, where: str) -> Iterator[bytes]:
    """Yield the payloads unchanged, and report progress."""
    size = since = 0
    for number, each in enumerate(made, 1):
        yield each
        size += len(each)
        if number % REPORT_EVERY == 0 or number == messages:
            run.metrics.add("rows_total", number - since, topic=where)
            run.metrics.add("bytes_total", size, topic=where)
            run.metrics.write()
            run.progress.step(number, of=messages, what=where, last=number == messages)
            size, since = 0, number


def moment(place: object, option: str) -> datetime | None:
    """Convert a time from the command line; None if there is none. Raises click.BadParameter."""
    if place is None:
        return None
    if not isinstance(place, int):
        raise click.BadParameter("a time is needed here, such as 2026-01-31 or 2h", param_hint=option)
    return datetime.fromtimestamp(place / 1000, UTC)


def show_rows(run: Run, event: str, headings: Sequence[str], rows: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Print rows with the columns of ``headings`` (``>``: numbers); warn if the limit may have cut them.

    Without a terminal, lines are not shortened, so that other programs can search them.
    """
    names = [heading.removeprefix(">") for heading in headings]
    if run.as_json:
        for row in rows:
            run.progress.event(event, row={_camel(name): _plain(value) for name, value in row.items()})
    elif rows:
        cells = [_cells(row, names) for row in rows]
        columns = None if sys.stdout.isatty() else sys.maxsize
        lines = output.table([each.replace("_", " ") for each in headings], cells, columns=columns)
        output.echo_lines(lines)
    if len(rows) >= limit:
        run.warn(f"only {counted(limit, 'row')} shown; there may be more", "limited", limit=limit)


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return ["" if row[name] is None else str(_plain(row[name])) for name in names]


def _plain(value: Any) -> Any:
    """Convert a value for output: times in UTC, bytes in hex, Arrow's maps to dictionaries."""
    if isinstance(value, datetime):
        return show_time(round(value.timestamp() * 1000))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _properties(inner) if name == "properties" else inner for name, inner in value.items()}
    return value


def _properties(pairs: Any) -> Any:
    """Convert a map, which Arrow returns as a list of pairs."""
    return dict(pairs) if isinstance(pairs, list) else pairs


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


# --- the group -------------------------------------------------------------------------------------

for each in (trail, usage, lineage, dead_letters, export, generate):
    audit.add_command(each)
__all__ = ["audit"]
