"""``plainsong pipeline run report``: options, and the course of one report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.job import Run, job_options
from pipeline.report.grid import grid_over
from plainsong.cli import tables
from plainsong.cli.exits import CommandFailed
from plainsong.cli.patterns import chosen, is_pattern
from plainsong.cli.times import Length, Place, now_ms, show_length, show_time
from plainsong.cli.verb import Verb
from protocol.ids import unpack_id

if TYPE_CHECKING:
    from pipeline.report.facts import TopicFacts
    from pipeline.report.grid import Grid
    from pipeline.report.report import Report

#: What is looked at unless somebody says from when on.
DEFAULT_RANGE_MS = 24 * 3600 * 1000
#: Transactions the daemon is asked about: some thousand a second.
MAX_POINTERS = 20_000


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
@click.option("--from", "start", type=Place(), metavar="PLACE", help="From this time on; a day before --to by default.")
@click.option("--to", "until", type=Place(now="this computer's"), metavar="PLACE", help="Before this; now by default.")
@click.option("--step", "step_s", type=Length(), metavar="TIME", help="Of plots and rates; by default one that suits.")
@click.option("--archive", metavar="ROOT", help="Where `archive` keeps what has expired in the topics.")
@click.option("--offline", is_flag=True, help="Ask no daemon: the archive alone.")
@click.option("--ttl", "ttl_s", type=Length(), metavar="TIME", help="Of the topics; for --offline.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page with plots."
)
@click.option("--parquet", metavar="DIR", help="Write every table as Parquet.")
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

    All of it is computed from the messages themselves and from what the
    daemon's transaction service remembers; nothing is published, and nothing
    is measured. With --archive, messages that have expired count, too. What
    each figure is made of, and what is not known, stands beside it.
    """
    if offline and archive is None:
        raise click.UsageError("--offline needs --archive")
    if offline and (not topics or any(map(is_pattern, topics))):
        raise click.UsageError("--offline needs the names of topics")
    facts = _from_archive(run, topics, archive or "", ttl_s) if offline else _from_daemon(run, topics, archive)
    if not facts:
        raise CommandFailed(f"namespace {run.where.namespace} has no topic", hint="plainsong topic create orders")
    end_ms = _moment(until, facts) or now_ms()
    start_ms = _moment(start, facts)
    grid = grid_over(end_ms - DEFAULT_RANGE_MS if start_ms is None else start_ms, end_ms, step_s)
    if run.dry_run:
        _say(run, facts, grid)
        return
    made = _made(run, facts, grid, archive, max_transactions, parquet, offline=offline)
    _tell(run, made, html)


def _moment(place: str | bytes | int | None, facts: list[TopicFacts]) -> int | None:
    """A place as a time, in milliseconds."""
    if isinstance(place, bytes):
        return unpack_id(place).publish_ts_ms
    if isinstance(place, str):  # "oldest"; "newest" is now
        return min(each.known_from_ms for each in facts) if place == "oldest" else now_ms()
    return place


# --- before any message is read ----------------------------------------------------------------------


def _from_daemon(run: Run, topics: tuple[str, ...], archive: str | None) -> list[TopicFacts]:
    from pipeline.report.facts import facts_of, with_archive

    with run.client(*topics) as client:
        facts = [facts_of(client, name) for name in chosen(client.topics(), topics)]
    if archive is None or run.dry_run:
        return facts
    from pipeline.report.sources import archive_ranges  # here, so that help and a dry run need no pyspark

    spark = run.session()
    return [with_archive(each, *archive_ranges(spark, archive, each)) for each in facts]


def _from_archive(run: Run, topics: tuple[str, ...], archive: str, ttl_s: int | None) -> list[TopicFacts]:
    from pipeline.report.sources import archived_facts

    ttl_ms = None if ttl_s is None else ttl_s * 1000
    return [archived_facts(run.session(), archive, run.where.namespace, name, ttl_ms) for name in topics]


def _say(run: Run, facts: list[TopicFacts], grid: Grid) -> None:
    """What would be read."""
    rows = [
        (
            each.topic,
            "-" if not each.stats else tables.show_count(each.stats["messages"], estimated=each.stats["estimated"]),
            "-" if not each.stats else tables.show_bytes(each.stats["bytes"]),
            show_length(each.ttl_ms),
            show_time(each.known_from_ms),
        )
        for each in facts
    ]
    span = f"{show_time(grid.start_ms)} to {show_time(grid.end_ms)}, {grid.steps} steps of {show_length(grid.step_ms)}"
    lines = tables.table(("TOPIC", ">MESSAGES", ">BYTES", "TTL", "KNOWN FROM"), rows, columns=160)
    names = [each.topic for each in facts]
    run.progress.result("\n".join([span, *lines]), "plan", topics=names, startMs=grid.start_ms, endMs=grid.end_ms)


# --- the report --------------------------------------------------------------------------------------


def _made(
    run: Run,
    facts: list[TopicFacts],
    grid: Grid,
    archive: str | None,
    max_transactions: int,
    parquet: str | None,
    *,
    offline: bool,
) -> Report:
    """Everything that Spark is for."""
    from pipeline.report import gather, sources
    from pipeline.report.decisions import ask_about, not_asked

    spark = run.session()
    parts = [] if offline else [sources.from_topics(spark, run.source(), facts, grid)]
    parts += [] if archive is None else [sources.from_archive(spark, archive, facts, grid)]
    messages = (sources.each_once(*parts) if len(parts) == 2 else parts[0]).persist()
    try:
        counts = {row["topic"]: row["count"] for row in messages.groupBy("topic").count().collect()}
        count = sum(counts.values())
        run.progress.step(count, of=count, what="messages read", last=True)
        for topic, of_topic in counts.items():
            run.metrics.add("rows_total", of_topic, topic=topic)
        found, pointers = gather.pointers_of(messages, max_transactions)
        if offline:
            asked = not_asked(found, "no daemon was asked (--offline)")
        else:
            run.progress.begin()
            with run.client() as client:
                asked = ask_about(found, client.transactions)
        notes = _notes(pointers, len(found), asked.unavailable, archive)
        frames = gather.frames_of(spark, messages, facts, asked, grid, now_ms())
        made = gather.report_of(frames, facts, grid, now_ms(), count, notes, step=run.progress.note)
        if parquet is not None:
            for name, frame in frames.by_name().items():
                frame.write.mode("overwrite").parquet(f"{parquet}/{name}")
            run.progress.note(f"tables written to {parquet}")
        return made
    finally:
        messages.unpersist()


def _notes(pointers: int, asked: int, unavailable: str | None, archive: str | None) -> list[str]:
    notes = []
    if unavailable is not None and pointers:
        notes.append(f"What became of {tables.show_count(pointers)} write pointers: {unavailable}")
    if pointers > asked:
        more = tables.show_count(pointers - asked)
        notes.append(f"What became of {more} older write pointers: see --max-transactions")
    if archive is not None:
        notes.append(
            "An archive keeps no write pointers: what was read from it counts as plain messages, visible at once, and "
            "what was rolled back is not in it"
        )
    return notes


def _tell(run: Run, made: Report, html: Path | None) -> None:
    from pipeline.report.shown import as_json, lines_of

    if html is not None:
        from pipeline.report.page import write_page  # here: the plots' library is of no use to the others

        write_page(made, html)
        run.progress.note(f"page written to {html}")
    run.progress.result("\n".join(lines_of(made)), "report", **as_json(made))
