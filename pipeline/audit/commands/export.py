"""``audit export``: the tables, and what follows from them, as plain Parquet folders for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from pipeline.audit.commands.lineage import Depth
from pipeline.audit.commands.shown import root_option
from pipeline.job import Run, job_options
from plainsong.cli.verb import Verb

#: What there is to export, and what it is.
WHAT: Final = {
    "trail": "the audit trail",
    "usage": "the usage registry",
    "edges": "accesses of datasets by program runs",
    "dead_letters": "the messages that could not be read",
    "flows": "from dataset to dataset, one row a program",
    "closure": "every pair of datasets of which one came from the other, and their distance",
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
    "--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="A folder in it for each table."
)
@click.option("--table", "chosen", multiple=True, type=click.Choice(list(WHAT)), help="Repeatable; all by default.")
@click.option("--depth", type=Depth(), default="all", show_default=True, metavar="N|all", help="Of the closure.")
@click.option("--unknown", is_flag=True, help="An access of an unknown kind may be a read, and a write.")
@job_options("audit")
def export(run: Run, root: Path, out: Path, chosen: tuple[str, ...], depth: int | None, unknown: bool) -> None:
    """Write tables as plain Parquet, all as of one moment.

    What is kept in --root consists of many parts that only its manifest tells
    apart; other programs want a folder a table. What is there is replaced.
    """
    from pipeline.audit.exporting import export_tables  # here, so that help needs no pyspark

    export_tables(run, root, out, chosen or tuple(WHAT), depth, unknown)
