"""Exports the tables, and the flows that follow from them, as plain Parquet folders: all as of one manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.audit.keeping import TABLE
from pyspark_plainsong.pipeline.audit.lineage import EDGES, closure, flows
from pyspark_plainsong.pipeline.audit.reading import frame, manifest_of
from pyspark_plainsong.pipeline.files import LocalFiles, check_replaceable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pyspark_plainsong.pipeline.audit.manifest import TablesManifest
    from pyspark_plainsong.pipeline.job import Run

#: Exports that are computed from the edges; they depend on ``unknown``, the closure also on ``depth``.
FOLLOWING = ("flows", "closure")


def export_tables(run: Run, root: Path, out: Path, names: Sequence[str], depth: int | None, unknown: bool) -> None:
    """Write each of ``names`` to the folder ``out/name``, which is replaced; a dry run only reports it.

    Args:
      depth: the closure's; None: any.
      unknown: an access of an unknown kind is a read and a write.
    Raises:
      TablesUnreadable, CommandFailed: nothing was written. After a kill some folders are new and some old, and
      the one that was being written lacks its ``_SUCCESS``.
    """
    manifest = manifest_of(root)
    if out.resolve().is_relative_to(root.resolve()):
        raise CommandFailed("--out is the folder of the tables, or inside it", code=Exit.USAGE)
    check_replaceable(LocalFiles(out), names)
    for name in names:
        where = out / name
        if run.dry_run:
            run.progress.result(f"would write {where}", "would", table=name, out=str(where))
            continue
        edges = frame(run.session(), root, EDGES, manifest)
        rows = _following(name, edges, depth, unknown) if name in FOLLOWING else _table(run, root, name, manifest)
        rows.write.mode("overwrite").parquet(str(where.absolute()))
        run.metrics.add("batches_total", topic=name)
        run.progress.result(f"wrote {where}", "wrote", table=name, out=str(where))


def _table(run: Run, root: Path, name: str, manifest: TablesManifest) -> DataFrame:
    return frame(run.session(), root, TABLE[name], manifest)


def _following(name: str, edges: DataFrame, depth: int | None, unknown: bool) -> DataFrame:
    flow = flows(edges, unknown=unknown)
    return flow if name == "flows" else closure(flow, depth=depth)
