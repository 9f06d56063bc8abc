"""``audit lineage``: what a dataset came from, and what came from it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from pipeline.audit.commands.shown import limit_option, moment, root_option, show_rows
from pipeline.job import Run, job_options
from plainsong.cli.options import Place
from plainsong.cli.verb import Verb

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.audit.walk import Direction


class Depth(click.ParamType["int | None"]):
    """A number of steps, or ``all``."""

    name = "depth"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number; None for all."""
        if value == "all" or value is None:
            return None
        if not str(value).isascii() or not str(value).isdigit() or not 1 <= int(str(value)) <= 1_000_000:
            self.fail(f"{str(value)[:40]!r} is neither a number from 1 on nor 'all'", param, ctx)
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
    help="To what it came from, or to what came from it.",
)
@click.option("--depth", type=Depth(), default="all", show_default=True, metavar="N|all", help="Steps at most.")
@click.option("--runs", "by_run", is_flag=True, help="Tell runs of a program apart.")
@click.option("--unknown", is_flag=True, help="An access of an unknown kind may be a read, and a write.")
@click.option("--from", "start", type=Place(now="now"), metavar="TIME", help="Only what was accessed from then on.")
@click.option("--to", "end", type=Place(now="now"), metavar="TIME", help="Only what was accessed before then.")
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

    A flow is a run of a program that read the one and wrote the other. Each
    comes once, with the number of steps to it; cycles are shown and end there.
    """
    from pipeline.audit.flows_at import FlowsAt
    from pipeline.audit.walk import walk

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
        told = {"distance": distance, **vars(flow)}
        del told["run" if flow.run is None else "runs"]
        rows.append(told)
        if not len(rows) % 1000:
            run.progress.step(len(rows), what=dataset)
    which = ("run",) if by_run else (">runs",)
    headings = (">distance", "source", "program", "target", *which, "first_seen", "last_seen")
    show_rows(run, "flow", headings, rows, limit)
