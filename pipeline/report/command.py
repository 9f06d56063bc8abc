"""``plainsong pipeline run report``: its options, and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.job import Run, job_options
from pipeline.report.course import MAX_POINTERS, Wanted, report_on, topics_of
from pipeline.report.grid import grid_over
from plainsong.cli import output
from plainsong.cli.options import Length, Place, is_pattern, now_ms, show_length, show_time
from plainsong.cli.verb import Verb
from protocol.ids import unpack_id

if TYPE_CHECKING:
    from pipeline.report.facts import TopicFacts
    from pipeline.report.grid import Grid
    from pipeline.report.report import Report

#: What is looked at unless somebody says from when on.
DEFAULT_RANGE_MS = 24 * 3600 * 1000


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
    wanted = Wanted(topics, archive, offline, None if ttl_s is None else ttl_s * 1000, parquet, max_transactions)
    facts = topics_of(run, wanted)
    end_ms = _moment(until, facts) or now_ms()
    start_ms = _moment(start, facts)
    grid = grid_over(end_ms - DEFAULT_RANGE_MS if start_ms is None else start_ms, end_ms, step_s)
    if run.dry_run:
        _say(run, facts, grid)
        return
    _tell(run, report_on(run, wanted, facts, grid), html)


def _moment(place: str | bytes | int | None, facts: list[TopicFacts]) -> int | None:
    """A place as a time, in milliseconds."""
    if isinstance(place, bytes):
        return unpack_id(place).publish_ts_ms
    if isinstance(place, str):  # "oldest"; "newest" is now
        return min(each.known_from_ms for each in facts) if place == "oldest" else now_ms()
    return place


def _say(run: Run, facts: list[TopicFacts], grid: Grid) -> None:
    """What would be read."""
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
    span = f"{show_time(grid.start_ms)} to {show_time(grid.end_ms)}, {grid.steps} steps of {show_length(grid.step_ms)}"
    lines = output.table(("TOPIC", ">MESSAGES", ">BYTES", "TTL", "KNOWN FROM"), rows, columns=160)
    names = [each.topic for each in facts]
    run.progress.result("\n".join([span, *lines]), "plan", topics=names, startMs=grid.start_ms, endMs=grid.end_ms)


def _tell(run: Run, made: Report, html: Path | None) -> None:
    from pipeline.report.shown import as_json, lines_of

    if html is not None:
        from pipeline.report.page import write_page  # here: the plots' library is of no use to the others

        write_page(made, html)
        run.progress.note(f"page written to {html}")
    run.progress.result("\n".join(lines_of(made)), "report", **as_json(made))
