"""The flows that touch some datasets, out of the edges' files: one step of a walk, without Spark.

The edges that touch the datasets are found first, then the other edges of the runs among them: what is in memory is
what a step finds, whatever the size of the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pipeline.audit.lineage import EDGES, RUN, kinds
from pipeline.audit.messages import READ, WRITE
from pipeline.audit.reading import arrow, manifest_of
from pipeline.audit.walk import Direction, Flow

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime
    from pathlib import Path


class FlowsAt:
    """Flows in the tables of a folder as they are now, whatever is added meanwhile; called with datasets.

    Args:
      namespace: of the datasets and the runs.
      unknown: accesses of an unknown kind count, as reads and as writes.
      by_run: one flow a run, instead of one a program.
      start, end: only edges seen from `start` on, and before `end`.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        direction: Direction,
        *,
        unknown: bool = False,
        by_run: bool = False,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> None:
        self._root = root
        self._manifest = manifest_of(root)
        self._namespace = namespace
        self._near, self._far = ("target", "source") if direction == "up" else ("source", "target")
        self._kinds = {"source": kinds(READ, unknown=unknown), "target": kinds(WRITE, unknown=unknown)}
        self._by = ("source", "program", "target", *(("run",) if by_run else ()))
        self._start = start
        self._end = end

    def __call__(self, datasets: Collection[str]) -> list[Flow]:
        """The flows whose near end is one of `datasets`. Raises FileNotFoundError: the files are gone; see `reading`."""
        near = self._edges(self._near, ds.field("dataset").isin(sorted(datasets)))
        runs = pc.unique(near["run"])
        if not len(runs):
            return []
        far = self._edges(self._far, ds.field("run").isin(runs))
        both = near.join(far, list(RUN), join_type="inner", right_suffix="_far")
        seen = [("first_seen", "min"), ("first_seen_far", "min"), ("last_seen", "max"), ("last_seen_far", "max")]
        counted = both.append_column("each_run", both["run"])
        told = counted.group_by(list(self._by)).aggregate([("each_run", "count_distinct"), *seen])
        return [
            Flow(
                row["source"],
                row["program"],
                row["target"],
                row["each_run_count_distinct"],
                min(row["first_seen_min"], row["first_seen_far_min"]),
                max(row["last_seen_max"], row["last_seen_far_max"]),
                row.get("run"),
            )
            for row in told.to_pylist()
        ]

    def _edges(self, end: str, which: ds.Expression) -> pa.Table:
        """Merged edges of the kind that this end of a flow is, the dataset called by it."""
        kind = ds.field("access").isin(self._kinds[end])
        where = (ds.field("namespace") == self._namespace) & kind & which
        edges = arrow(self._root, EDGES, where, self._manifest)
        if self._start is not None:
            edges = edges.filter(pc.field("last_seen") >= self._start)
        if self._end is not None:
            edges = edges.filter(pc.field("first_seen") < self._end)
        return edges.select([*RUN, "dataset", "first_seen", "last_seen"]).rename_columns(
            [*RUN, end, "first_seen", "last_seen"]
        )
