"""The job `replay`: its options and its output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.command import CommandFailed, Exit, Verb
from plainsong.cli.options import Length, Place
from plainsong.cli.output import counted, show_count, show_messages
from pyspark_plainsong.pipeline.job import Run, job_options

if TYPE_CHECKING:
    from pyspark_plainsong.pipeline.replay.plans import Plan
    from pyspark_plainsong.pipeline.replay.replaying import Source


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run replay orders --root archive --into orders-again",
        "plainsong pipeline run replay orders --root archive --into orders-again \\",
        "    --from 2026-01-31 --to 2026-02-01",
        "plainsong pipeline run replay --parquet rows.parquet --order-by number --into orders",
    ],
)
@click.argument("topic", required=False)
@click.option("--root", metavar="PATH|URL", help="Folder of the archive of TOPIC.")
@click.option("--parquet", metavar="PATH|URL", help="Read any Parquet files with a column payload instead.")
@click.option("--order-by", metavar="COLUMN", help="Column that orders --parquet; default: message_id.")
@click.option("--into", required=True, metavar="TOPIC", help="Topic to publish to; it must exist.")
@click.option("--from", "start", type=Place(now="ms"), metavar="PLACE", help="Start here; default: at the oldest.")
@click.option("--to", "end", type=Place(now="ms"), metavar="PLACE", help="Stop before this; default: at the newest.")
@click.option("--archive-namespace", metavar="NAME", help="Namespace of TOPIC; default: that of --namespace.")
@click.option("--generation", type=click.IntRange(1), help="Generation of TOPIC; default: the newest in the archive.")
@click.option(
    "--chunk-rows", type=click.IntRange(1), default=100_000, show_default=True, help=("Messages published at a time.")
)
@click.option("--ttl", type=Length(), metavar="TIME", help="Time to live of the messages; default: the topic's.")
@click.option("--no-originals", is_flag=True, help="Omit the attributes originalId and originalPublishTimeMs.")
@click.option("--anew", is_flag=True, help="Publish again what an earlier replay has published.")
@job_options("replay")
def replay(run: Run, into: str, chunk_rows: int, ttl: int | None, no_originals: bool, anew: bool, **what: Any) -> None:
    """Publish archived messages again, in order.

    If it is killed, run the same command again: it continues at the topic's
    position, and publishes each message once. Its plan is kept next to the
    archive. Messages already replayed into a topic are not replayed there again
    without --anew.
    """
    from pyspark_plainsong.pipeline.replay import replaying
    from pyspark_plainsong.pipeline.replay.plans import Plan, Plans

    with run.client(into) as client:
        generation = int(client.admin.properties(into)["generation"])
    source, start, end = _source(run, **what)
    wanted = Plan(source.name, start, end, run.where.namespace, into, generation)
    any_range = what["start"] is None and what["end"] is None
    options: dict[str, Any] = {
        "any_range": any_range,
        "anew": anew,
        "chunk_rows": chunk_rows,
        "with_originals": not no_originals,
    }
    if run.dry_run:
        plan = _planned(run, source, wanted, **options)
        _foresee(run, plan, replaying.resume_at(run, plan))
        return

    def say(text: str) -> None:
        run.warn(text, "taken_over", topic=into)

    with source.files.lock(f"{source.folder}/{wanted.lock}", f"a replay of {source.name} into {into}", say) as hold:
        plan = _planned(run, source, wanted, **options)
        plans = Plans(source.files, source.folder)
        if plan.chunks and not plan.done:
            plans.save(plan)  # before the first publish: its chunks must not change afterwards
        rows = replaying.follow(run, source, plans, plan, with_originals=not no_originals, ttl_s=ttl, check=hold.check)
    left = "" if rows else ": all of this has been replayed before"
    text = f"{into}: {show_count(rows)} of {show_messages(plan.rows)} published{left}"
    run.progress.result(text, "replayed", topic=into, rows=rows, of=plan.rows, producer=plan.producer)


def _planned(
    run: Run, source: Source, wanted: Plan, *, any_range: bool, anew: bool, chunk_rows: int, with_originals: bool
) -> Plan:
    """Return the plan to carry out: one that was begun, or a new one with its chunks.

    Raises:
      CommandFailed: nothing was done.
    """
    from pyspark_plainsong.pipeline.replay import replaying
    from pyspark_plainsong.pipeline.replay.plans import Plans

    plans = Plans(source.files, source.folder)
    wanted = replace(wanted, as_read=source.as_read(run.session()))
    plan = plans.chosen(wanted, any_range=any_range, anew=anew)
    if plan.end != wanted.end:
        run.warn(f"continuing the earlier replay, to {plan.end} and not to the end", "begun", topic=wanted.topic)
    if plan.chunks:
        return plan
    plan = replaying.fresh(run, plan, plans, anew=anew)
    run.progress.note("finding the order of the rows", "planning")
    return replaying.with_chunks(run.session(), source, plan, chunk_rows, with_originals=with_originals)


def _source(
    run: Run,
    *,
    topic: str | None,
    root: str | None,
    parquet: str | None,
    order_by: str | None,
    start: Any,
    end: Any,
    archive_namespace: str | None,
    generation: int | None,
) -> tuple[Source, str, str]:
    """Return the source, and the range of its keys. Raises CommandFailed."""
    from pyspark_plainsong.pipeline.replay.replaying import archive_source, parquet_source

    if parquet is not None:
        if topic is not None or root is not None or start is not None or end is not None:
            raise _usage("--parquet is replayed as a whole: no TOPIC, --root, --from or --to")
        return parquet_source(run.session(), parquet, order_by or "message_id"), "", ""
    if topic is None or root is None or order_by is not None:
        raise _usage("give TOPIC and its --root, or --parquet; --order-by needs --parquet")
    from pyspark_plainsong.pipeline.archive.table import TopicTable
    from pyspark_plainsong.pipeline.archive.writing import Log
    from pyspark_plainsong.pipeline.files import open_files

    namespace = archive_namespace or run.where.namespace
    files = open_files(root, run.session)
    table = TopicTable.open(files, namespace, topic)
    there = [] if table is None else table.generations()
    if not there or generation not in (None, *there):
        which = "" if generation is None else f" generation {generation}"
        raise CommandFailed(f"there is no archive of {namespace}:{topic}{which} in {root}", code=Exit.NOT_FOUND)
    if generation is None and len(there) > 1:
        run.progress.note(f"generations {there} are archived; this is {max(there)}", "generation")
    source = archive_source(root, Log(namespace, topic, generation or max(there)), files)
    return source, _key(start) or "00" * 20, min(_key(end) or source.end, source.end)


def _key(place: str | bytes | int | None) -> str:
    """Convert a place to a key; empty if there is none."""
    from plainsong.positions import as_bound

    return "" if place is None or isinstance(place, str) else as_bound(place).hex()


def _usage(message: str) -> CommandFailed:
    return CommandFailed(message, hint="try plainsong pipeline run replay --help", code=Exit.USAGE)


def _foresee(run: Run, plan: Plan, first: int) -> None:
    rows = sum(chunk.rows for chunk in plan.chunks[first:])
    count = len(plan.chunks) - first
    text = f"{plan.topic}: would publish {show_messages(rows)} in {counted(count, 'chunk')} as {plan.producer}"
    run.progress.result(text, "foreseen", topic=plan.topic, rows=rows, chunks=count, producer=plan.producer)
