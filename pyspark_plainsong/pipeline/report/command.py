"""The job `report`: its options, the steps of one report, and its output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb
from plainsong.cli.options import Length, Place, chosen, is_pattern, show_length, show_time
from plainsong.cli.output import counted
from plainsong.positions import now_ms
from plainsong.protocol.ids import unpack_id
from pyspark_plainsong.pipeline.job import Run, job_options
from pyspark_plainsong.pipeline.report.facts import facts_of, grid_over, with_archive
from pyspark_plainsong.pipeline.session import check_plots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from pyspark_plainsong.pipeline.report.facts import Grid, Report, TopicFacts
    from pyspark_plainsong.pipeline.report.sources import Asked

#: The default time range.
DEFAULT_RANGE_MS = 24 * 3600 * 1000
#: Default limit on outcome requests to the daemon, which answers a few thousand a second.
MAX_POINTERS = 20_000


# --- the command -------------------------------------------------------------------------------------


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run report",
        "plainsong pipeline run report orders --from -6h --html report.html",
        "plainsong pipeline run report 'orders-*' --archive archive --from -30d --step 1d",
        "plainsong pipeline run report orders --archive archive --offline --ttl 7d",
    ],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...")
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Start of the range; default: a day before --to.")
@click.option(
    "--to", "until", type=Place(now="this computer's"), metavar="PLACE", help=("End of the range; default: now.")
)
@click.option(
    "--step",
    "step_s",
    type=Length(),
    metavar="TIME",
    help=("Step of plots and rates; default: one that suits the range."),
)
@click.option("--archive", metavar="ROOT", help="Folder of `archive`, for messages that have expired in the topics.")
@click.option("--offline", is_flag=True, help="Use only the archive; contact no daemon.")
@click.option("--ttl", "ttl_s", type=Length(), metavar="TIME", help="Time to live of the topics; for --offline.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write an HTML page with plots."
)
@click.option("--parquet", metavar="DIR", help="Write each table as Parquet into this folder.")
@click.option("--max-transactions", type=click.IntRange(1), default=MAX_POINTERS, show_default=True, metavar="N")
@job_options("report")
def report(
    run: Run,
    topics: tuple[str, ...],
    start: str | bytes | int | None,
    until: str | bytes | int | None,
    step_s: int | None,
    archive: str | None,
    offline: bool,
    ttl_s: int | None,
    html: Path | None,
    parquet: str | None,
    max_transactions: int,
) -> None:
    """Queues, throughput, latencies and hold times over a time range.

    Everything is computed from the messages themselves and from the outcomes
    that the daemon's transaction service remembers; nothing is published or
    measured. With --archive, expired messages count too. Each figure comes with
    its definition, and the report says what is not known.
    """
    if offline and archive is None:
        raise click.UsageError("--offline needs --archive")
    if offline and (not topics or any(map(is_pattern, topics))):
        raise click.UsageError("--offline needs the names of topics")
    if html is not None:
        check_plots()
        if not html.absolute().parent.is_dir():
            raise CommandFailed(
                f"{html} cannot be written: there is no folder {html.parent}", hint="create it first", code=Exit.USAGE
            )
    wanted = ReportOptions(topics, archive, offline, None if ttl_s is None else ttl_s * 1000, parquet, max_transactions)
    facts = topics_of(run, wanted)
    end_ms = _moment(until, facts) or now_ms()
    start_ms = _moment(start, facts)
    grid = grid_over(end_ms - DEFAULT_RANGE_MS if start_ms is None else start_ms, end_ms, step_s)
    if run.dry_run:
        _say(run, facts, grid)
        return
    _show(run, report_on(run, wanted, facts, grid), html)


# --- steps: collect facts about the topics, read their messages, compute every figure -----------------


def _moment(place: str | bytes | int | None, facts: list[TopicFacts]) -> int | None:
    """Convert a place to a time, in milliseconds."""
    if isinstance(place, bytes):
        return unpack_id(place).publish_ts_ms
    if isinstance(place, str):  # "oldest"; "newest" is now
        return min(each.known_from_ms for each in facts) if place == "oldest" else now_ms()
    return place


def _say(run: Run, facts: list[TopicFacts], grid: Grid) -> None:
    """Show the plan of the report: topics, time range and steps."""
    rows = [
        (
            each.topic,
            "-" if not each.stats else output.show_count(each.stats["messages"], estimated=each.stats["estimated"]),
            "-" if not each.stats else output.show_bytes(each.stats["bytes"]),
            show_length(each.ttl_ms),
            show_time(each.known_from_ms),
        )
        for each in facts
    ]
    span = f"{show_time(grid.start_ms)} to {show_time(grid.end_ms)}, {counted(grid.steps, 'step')} of {show_length(grid.step_ms)}"
    lines = output.table(("TOPIC", ">MESSAGES", ">BYTES", "TTL", "KNOWN FROM"), rows, columns=160)
    names = [each.topic for each in facts]
    run.progress.result("\n".join([span, *lines]), "plan", topics=names, startMs=grid.start_ms, endMs=grid.end_ms)


def _show(run: Run, made: Report, html: Path | None) -> None:
    from pyspark_plainsong.pipeline.report.text import as_json, lines_of

    if html is not None:
        from pyspark_plainsong.pipeline.report.page import (
            write_page,  # imported here, because only a page needs the plotting library
        )

        write_page(made, html)
        run.progress.note(f"page written to {html}")
    run.progress.result("\n".join(lines_of(made)), "report", **as_json(made))


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The choices for a report."""

    topics: tuple[str, ...] = ()
    """Names and patterns; none: all topics of the namespace."""
    archive: str | None = None
    """The root of the archive; None: read only the topics."""
    offline: bool = False
    """Read only the archive, and contact no daemon."""
    ttl_ms: int | None = None
    """The topics' time to live, for ``offline``."""
    parquet: str | None = None
    """The folder for all tables; None: write no tables."""
    max_pointers: int = MAX_POINTERS


def topics_of(run: Run, wanted: ReportOptions) -> list[TopicFacts]:
    """Collect facts about the chosen topics. Starts Spark only to read an archive.

    Raises:
      CommandFailed: a topic does not exist, or there is none at all.
    """
    namespace = run.where.namespace
    if wanted.offline:
        from pyspark_plainsong.pipeline.report.sources import archived_facts  # here, so that a dry run needs no pyspark

        return [
            archived_facts(run.session(), wanted.archive or "", namespace, name, wanted.ttl_ms)
            for name in wanted.topics
        ]
    with run.client(*wanted.topics) as client:
        facts = [facts_of(client, name) for name in chosen(client.topics(), wanted.topics)]
    if not facts:
        hint = "plainsong topic create orders"
        raise CommandFailed(f"namespace {namespace} has no topic", hint=hint, code=Exit.NOT_FOUND)
    if wanted.archive is None or run.dry_run:
        return facts
    from pyspark_plainsong.pipeline.report.sources import archive_ranges

    spark = run.session()
    return [with_archive(each, *archive_ranges(spark, wanted.archive, each)) for each in facts]


def report_on(run: Run, wanted: ReportOptions, topics: Sequence[TopicFacts], grid: Grid) -> Report:
    """Read all messages once, ask for the outcomes of their transactions, and compute every figure.

    Raises:
      CommandFailed: a folder for Parquet holds other files; nothing was written.
    """
    from pyspark_plainsong.pipeline.files import check_replaceable, open_files
    from pyspark_plainsong.pipeline.report import figures

    spark = run.session()
    out = None if wanted.parquet is None else open_files(wanted.parquet, run.session)
    if out is not None:
        check_replaceable(out, figures.Frames.names())
    messages = _messages(run, wanted, topics, grid).persist()
    try:
        counts = {row["topic"]: row["count"] for row in messages.groupBy("topic").count().collect()}
        count = sum(counts.values())
        run.progress.step(count, of=count, what="messages read", last=True)
        for topic, of_topic in counts.items():
            run.metrics.add("rows_total", of_topic, topic=topic)
        asked, notes = _asked(run, wanted, messages)
        made_ms = now_ms()
        frames = figures.frames_of(spark, messages, topics, asked, grid, made_ms)
        report = figures.report_of(frames, topics, grid, made_ms, count, notes, step=run.progress.note)
        if out is not None:
            for name, frame in frames.by_name().items():
                frame.write.mode("overwrite").parquet(out.url(name))
            run.progress.note(f"tables written to {wanted.parquet}")
        return report
    finally:
        messages.unpersist()


def _messages(run: Run, wanted: ReportOptions, topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    from pyspark_plainsong.pipeline.report import sources

    spark = run.session()
    if wanted.archive is None:
        return sources.from_topics(spark, run.source(), topics, grid)
    archived = sources.from_archive(spark, wanted.archive, topics, grid)
    if wanted.offline:
        return archived
    return sources.each_once(sources.from_topics(spark, run.source(), topics, grid), archived)


def _asked(run: Run, wanted: ReportOptions, messages: DataFrame) -> tuple[Asked, list[str]]:
    """Return the outcomes of the transactions, and notes about the unknown ones."""
    from pyspark_plainsong.pipeline.report.figures import pointers_of
    from pyspark_plainsong.pipeline.report.sources import ask_about, not_asked

    found, pointers = pointers_of(messages, wanted.max_pointers)
    if wanted.offline:
        asked = not_asked(found, "no daemon was asked")
    else:
        with run.client() as client:
            asked = ask_about(found, client.transactions)
    notes = []
    if asked.unavailable is not None and pointers:
        notes.append(f"Outcome of {counted(pointers, 'write pointer')}: {asked.unavailable}")
    if pointers > len(found):
        notes.append(f"Outcome of {counted(pointers - len(found), 'older write pointer')}: see --max-transactions")
    if wanted.archive is not None:
        notes.append(
            "An archive has no write pointers: its messages count as plain ones, visible at once, and it has no "
            "rolled-back messages"
        )
    return asked, notes
