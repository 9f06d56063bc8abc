"""``audit run``: topics into the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.audit.commands.shown import root_option
from pipeline.job import Run, job_options
from plainsong.cli.options import Length
from plainsong.cli.output import show_count
from plainsong.cli.verb import VerbGroup
from protocol.ids import FIRST_BOUND

if TYPE_CHECKING:
    from pathlib import Path


@click.group(cls=VerbGroup)
def audit() -> None:
    """Audit trail, usage registry and lineage of datasets.

    Messages about programs that access datasets, and about changed metadata,
    become tables: who touched what and when, which program uses which dataset,
    what came from what. Messages that cannot be read are kept as dead letters.
    """


@audit.command(
    examples=[
        "plainsong pipeline run audit run audit --root audit-tables",
        "plainsong pipeline run audit run audit --root audit-tables --follow",
        "plainsong pipeline run audit run audit --root audit-tables --dry-run",
    ]
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@root_option
@click.option("--follow", is_flag=True, help="Go on until interrupted, instead of ending when all is in.")
@click.option("--every", default="1s", metavar="TIME", type=Length(), help="How often --follow looks; 1s by default.")
@click.option("--batch-rows", default=100_000, type=click.IntRange(1), show_default=True, help="Of one batch.")
@click.option("--batch-bytes", default=64 << 20, type=click.IntRange(1), show_default=True, help="Of one batch.")
@click.option(
    "--isolation", type=click.Choice(["committed", "uncommitted"]), help="Of reading; the connector's by default."
)
@click.option("--may-lose", is_flag=True, help="Go on behind what expired before it was read, instead of failing.")
@click.option(
    "--keep",
    default="1h",
    metavar="TIME",
    type=Length(),
    help="Take merged files away so much later, for readers that have begun; 1h by default.",
)
@job_options("audit")
def run(run: Run, topics: tuple[str, ...], root: Path, **options: Any) -> None:
    """Add what topics say to the tables, each message once.

    The tables say how far they go, so a run that was killed goes on where it
    ended. One run at a time keeps a folder; readers need not wait for it.
    """
    if run.dry_run:
        _say_what_would_be(run, topics, root)
        return
    from pipeline.audit.stream import Choices, run_stream  # here, so that help needs no pyspark

    every, follow = options.pop("every"), options.pop("follow")
    choices = Choices(every=f"{every} seconds" if follow else None, keep_s=options.pop("keep"), **options)
    total, manifest = run_stream(run, topics, root, choices)
    rows = {name: manifest.rows(name) for name in ("trail", "dead_letters")}
    run.progress.result(
        f"{show_count(total.messages)} messages in {total.batches} batches, {show_count(total.bad)} of them dead letters;"
        f" the trail has {show_count(rows['trail'])} rows, the dead letters {show_count(rows['dead_letters'])}",
        messages=total.messages,
        batches=total.batches,
        deadLetters=total.bad,
        trailRows=rows["trail"],
        deadLetterRows=rows["dead_letters"],
    )


def _say_what_would_be(run: Run, topics: tuple[str, ...], root: Path) -> None:
    """How much waits, and from where on. Raises TopicNotFound, FolderTaken, TablesUnreadable."""
    from pipeline.audit.manifest import first_look

    manifest = first_look(root)
    with run.client(*topics) as client:
        for topic in topics:
            name = f"{run.where.namespace}:{topic}"
            life = int(client.properties(topic)["generation"])
            last = manifest.living({name: life}).through.get(name)
            waiting = client.stats(topic, reader=last or FIRST_BOUND.hex())["reader"]["visible"]
            begin = f"after message {last}" if last else "from the oldest message on"
            text = f"would add {show_count(waiting)} messages of {topic} to the tables in {root}, {begin}"
            run.progress.result(text, "would", topic=topic, root=str(root), after=last, messages=waiting)
