"""``audit trail``, ``usage`` and ``dead-letters``: the tables, asked without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.audit.commands.shown import limit_option, moment, root_option, show_rows
from pipeline.job import Run, job_options
from plainsong.cli.options import Place
from plainsong.cli.verb import Verb

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.audit.searching import Order


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit trail --root audit-tables --entity dataset:purchases",
        "plainsong pipeline run audit trail --root audit-tables --user alice --from 2d --json",
    ],
)
@root_option
@click.option("--entity", metavar="KIND:NAME", help="Such as dataset:purchases; program:NAME finds its accesses too.")
@click.option("--user", metavar="NAME", help="Who did it.")
@click.option("--from", "start", type=Place(now="now"), metavar="TIME", help="When it happened, from then on.")
@click.option("--to", "end", type=Place(now="now"), metavar="TIME", help="When it happened, before then.")
@click.option("--all-namespaces", is_flag=True, help="Not of --namespace alone.")
@click.option("--oldest-first", is_flag=True, help="In the order of time; else the newest first.")
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
    from pipeline.audit.searching import first_rows
    from pipeline.audit.trail import TRAIL, trail_filter

    if entity is not None and ":" not in entity:
        raise click.BadParameter(f"{entity!r} has no kind; use for example dataset:{entity}", param_hint="--entity")
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
@click.option("--program", metavar="NAME", help="What this program uses.")
@click.option("--dataset", metavar="NAME", help="What uses this dataset.")
@click.option("--all-namespaces", is_flag=True, help="Not of --namespace alone.")
@limit_option
@job_options("audit", dry_run=False)
def usage(run: Run, root: Path, program: str | None, dataset: str | None, all_namespaces: bool, limit: int) -> None:
    """Show which program uses which dataset, what was used last first."""
    from pipeline.audit.reading import arrow
    from pipeline.audit.searching import all_of
    from pipeline.audit.usage import USAGE

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
    """Show the messages that could not be read, and why, the newest first.

    With --json the whole payload is shown, in hexadecimal digits.
    """
    from pipeline.audit.dead_letters import DEAD_LETTERS
    from pipeline.audit.searching import all_of, first_rows

    where = all_of({"reason": reason})
    rows = first_rows(root, DEAD_LETTERS, where, ("message_id", "topic"), "descending", limit).to_pylist()
    show_rows(run, "deadLetter", ("message_id", "topic", "published", "reason", "detail"), rows, limit)
