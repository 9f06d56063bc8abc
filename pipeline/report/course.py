"""The course of one report: what is known of the topics, then their messages, then every figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.report.facts import facts_of, with_archive
from plainsong.cli.options import chosen, now_ms
from plainsong.cli.output import show_count
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from pipeline.job import Run
    from pipeline.report.decisions import Asked
    from pipeline.report.facts import TopicFacts
    from pipeline.report.grid import Grid
    from pipeline.report.report import Report

#: Transactions the daemon is asked about: some thousand a second.
MAX_POINTERS = 20_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be made from."""

    topics: tuple[str, ...] = ()
    """Names and patterns; none: all of the namespace."""
    archive: str | None = None
    """Its root; None: the topics alone."""
    offline: bool = False
    """The archive alone; no daemon is asked."""
    ttl_ms: int | None = None
    """For ``offline``: how long messages lived."""
    parquet: str | None = None
    """A folder for all tables."""
    max_pointers: int = MAX_POINTERS


def topics_of(run: Run, wanted: Wanted) -> list[TopicFacts]:
    """What is known of the topics that are meant; Spark is started only where there is an archive to look into.

    Raises:
      CommandFailed: there is no such topic, or none at all.
    """
    namespace = run.where.namespace
    if wanted.offline:
        from pipeline.report.sources import archived_facts  # here, so that a dry run needs no pyspark

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
    from pipeline.report.sources import archive_ranges

    spark = run.session()
    return [with_archive(each, *archive_ranges(spark, wanted.archive, each)) for each in facts]


def report_on(run: Run, wanted: Wanted, topics: Sequence[TopicFacts], grid: Grid) -> Report:
    """Read all messages once, ask what became of their transactions, and compute every figure.

    Raises:
      CommandFailed: a folder for Parquet holds something else; nothing was written.
    """
    from pipeline.archive.files import open_files
    from pipeline.replacing import check_replaceable
    from pipeline.report import gather

    spark = run.session()
    out = None if wanted.parquet is None else open_files(wanted.parquet, run.session)
    if out is not None:
        check_replaceable(out, gather.Frames.names())
    messages = _messages(run, wanted, topics, grid).persist()
    try:
        counts = {row["topic"]: row["count"] for row in messages.groupBy("topic").count().collect()}
        count = sum(counts.values())
        run.progress.step(count, of=count, what="messages read", last=True)
        for topic, of_topic in counts.items():
            run.metrics.add("rows_total", of_topic, topic=topic)
        asked, notes = _asked(run, wanted, messages)
        made_ms = now_ms()
        frames = gather.frames_of(spark, messages, topics, asked, grid, made_ms)
        report = gather.report_of(frames, topics, grid, made_ms, count, notes, step=run.progress.note)
        if out is not None:
            for name, frame in frames.by_name().items():
                frame.write.mode("overwrite").parquet(out.url(name))
            run.progress.note(f"tables written to {wanted.parquet}")
        return report
    finally:
        messages.unpersist()


def _messages(run: Run, wanted: Wanted, topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    from pipeline.report import sources

    spark = run.session()
    if wanted.archive is None:
        return sources.from_topics(spark, run.source(), topics, grid)
    archived = sources.from_archive(spark, wanted.archive, topics, grid)
    if wanted.offline:
        return archived
    return sources.each_once(sources.from_topics(spark, run.source(), topics, grid), archived)


def _asked(run: Run, wanted: Wanted, messages: DataFrame) -> tuple[Asked, list[str]]:
    """What the daemon says of the transactions, and what the report has to say about that."""
    from pipeline.report.decisions import ask_about, not_asked
    from pipeline.report.gather import pointers_of

    found, pointers = pointers_of(messages, wanted.max_pointers)
    if wanted.offline:
        asked = not_asked(found, "no daemon was asked")
    else:
        with run.client() as client:
            asked = ask_about(found, client.transactions)
    notes = []
    if asked.unavailable is not None and pointers:
        notes.append(f"What became of {show_count(pointers)} write pointers: {asked.unavailable}")
    if pointers > len(found):
        notes.append(f"What became of {show_count(pointers - len(found))} older write pointers: see --max-transactions")
    if wanted.archive is not None:
        notes.append(
            "An archive keeps no write pointers: what was read from it counts as plain messages, visible at once, and "
            "what was rolled back is not in it"
        )
    return asked, notes
