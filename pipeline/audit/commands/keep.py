"""``audit run``: topics into the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.audit.commands.shown import root_option
from pipeline.job import Run, job_options
from plainsong.cli.tables import show_count
from plainsong.cli.times import Length
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
@click.option("--follow", is_flag=True, help="Go on for ever; else the run ends when it has caught up.")
@click.option(
    "--batch-messages",
    type=click.IntRange(1, 10_000_000),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Messages in a batch at most.",
)
@click.option(
    "--keep",
    "keep_s",
    type=Length(),
    default="1h",
    show_default=True,
    help="How long merged files stay for those who read them.",
)
@job_options("audit")
def run(run: Run, topics: tuple[str, ...], root: Path, follow: bool, batch_messages: int, keep_s: int) -> None:
    """Add what topics say to the tables, each message once.

    The tables say how far they go, so a run that was killed goes on where it
    ended. One run at a time keeps a folder; readers need not wait for it.
    """
    _look(run, topics, root)
    if run.dry_run:
        return
    from pipeline.audit.stream import run_stream  # here, so that help needs no pyspark

    total, manifest = run_stream(run, topics, root, batch_messages=batch_messages, keep_s=float(keep_s), follow=follow)
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


def _look(run: Run, topics: tuple[str, ...], root: Path) -> None:
    """See that the topics are there, and how much waits. Raises TopicNotFound, TablesUnreadable."""
    from pipeline.audit.manifest import Manifest, load_manifest

    through = (load_manifest(root) or Manifest()).through
    with run.client(*topics) as client:
        for topic in topics:
            last = through.get(f"{run.where.namespace}:{topic}")
            waiting = client.stats(topic, reader=last or FIRST_BOUND.hex())["reader"]["visible"]
            if run.dry_run:
                begin = f"after message {last}" if last else "from the oldest message on"
                text = f"would add {show_count(waiting)} messages of {topic} to the tables in {root}, {begin}"
                run.progress.result(text, "would", topic=topic, root=str(root), after=last, messages=waiting)
