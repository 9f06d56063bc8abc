"""Lineage: the datasets that program runs access, the resulting flows between datasets, and walks along them.

A run that reads `a` and writes `b` makes a flow from `a` to `b`. An access of unknown kind makes only an edge; with
``unknown=True`` it counts both as a read and as a write, and so makes flows too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, TimestampType

from pyspark_plainsong.pipeline.audit.messages import READ, UNKNOWN, WRITE
from pyspark_plainsong.pipeline.audit.reading import arrow, frame, manifest_of
from pyspark_plainsong.pipeline.audit.table import access_rows, totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from datetime import datetime
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pyspark_plainsong.pipeline.audit.manifest import TablesManifest
    from pyspark_plainsong.pipeline.job import Run

EDGES: Final = totals(
    "edges",
    ("namespace", "program", "run", "dataset", "access"),
    first_seen=(TimestampType(), "min"),
    last_seen=(TimestampType(), "max"),
    accesses=(LongType(), "sum"),
)
RUN: Final = ("namespace", "program", "run")


def kinds(access: str, *, unknown: bool) -> list[str]:
    """Return the kinds of access that count as ``access``."""
    return [access, UNKNOWN] if unknown else [access]


def edge_rows(parsed: DataFrame) -> DataFrame:
    """Return the edges of parsed messages."""
    each = access_rows(parsed).select(
        *EDGES.keys,
        F.col("time").alias("first_seen"),
        F.col("time").alias("last_seen"),
        F.lit(1).cast("bigint").alias("accesses"),
    )
    return EDGES.merged(each)


def flows(edges: DataFrame, *, unknown: bool = False) -> DataFrame:
    """Return flows: namespace, source, program, target, runs, first_seen, last_seen; one row per program."""
    reads = edges.where(F.col("access").isin(kinds(READ, unknown=unknown)))
    writes = edges.where(F.col("access").isin(kinds(WRITE, unknown=unknown))).select(
        *RUN,
        F.col("dataset").alias("target"),
        F.col("first_seen").alias("written_first"),
        F.col("last_seen").alias("written_last"),
    )
    return (
        reads.withColumnRenamed("dataset", "source")
        .join(writes, list(RUN))
        .groupBy("namespace", "source", "program", "target")
        .agg(
            F.count_distinct("run").alias("runs"),
            F.min(F.least("first_seen", "written_first")).alias("first_seen"),
            F.max(F.greatest("last_seen", "written_last")).alias("last_seen"),
        )
    )


def closure(flow: DataFrame, *, depth: int | None = None) -> DataFrame:
    """Return every pair of datasets that a path of flows connects: namespace, source, target, distance (in runs).

    A step joins only the pairs that the previous one found, and is checkpointed, so that no step is computed twice.
    Cycles end at a pair that was found before.

    Args:
      flow: from ``flows``.
      depth: the greatest distance; None: any. The distance of a pair is its shortest.
    """
    steps = flow.select("namespace", "source", "target").distinct().localCheckpoint()
    found = new = steps.withColumn("distance", F.lit(1)).localCheckpoint()
    distance = 1
    while (depth is None or distance < depth) and not new.isEmpty():
        distance += 1
        onward = steps.select("namespace", F.col("source").alias("target"), F.col("target").alias("beyond"))
        reached = new.join(onward, ["namespace", "target"]).select(
            "namespace", "source", F.col("beyond").alias("target"), F.lit(distance).alias("distance")
        )
        new = reached.distinct().join(found, ["namespace", "source", "target"], "left_anti").localCheckpoint()
        found = found.unionByName(new).localCheckpoint()
    return found


# --- for the console -------------------------------------------------------------------------------

#: The console reads flows from this topic (namespace, name).
LINEAGE_TOPIC: Final = ("system", "lineage")
#: Flows per publish request.
PUBLISHED_AT_ONCE: Final = 1000


def publish_flows(run: Run, root: Path, manifest: TablesManifest) -> int:
    """Publish every flow of the tables, in the order of their last use; return their number.

    Each call publishes all flows again; readers take the newest of each source and target.

    Raises:
      TopicNotFound: an operator has to create the topic, since not every user may write to namespace ``system``.
    """
    namespace, topic = LINEAGE_TOPIC
    of_all = flows(frame(run.session(), root, EDGES, manifest)).orderBy("last_seen", "source", "target", "program")
    count = 0
    with run.where.client(topic, retry=True, namespace=namespace) as client:
        waiting: list[bytes] = []
        for flow in of_all.toLocalIterator():
            waiting.append(_published(flow.asDict()))
            count += 1
            if len(waiting) == PUBLISHED_AT_ONCE:
                client.publish(topic, waiting)
                waiting = []
        if waiting:
            client.publish(topic, waiting)
    return count


def _published(flow: dict[str, Any]) -> bytes:
    """A flow as stored in the topic."""
    names = {"namespace": "namespace", "source": "from", "target": "to", "program": "program", "runs": "runs"}
    return json.dumps({"v": 1, **{ours: flow[name] for name, ours in names.items()}}, ensure_ascii=False).encode()


# --- walks -----------------------------------------------------------------------------------------
#
# A walk asks for the flows of each step when it gets there, so its cost depends on what it finds, not on the size of the table.

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Flow:
    """Runs of a program read ``source`` and wrote ``target``."""

    source: str
    program: str
    target: str
    runs: int
    first_seen: datetime
    last_seen: datetime
    #: The run, if each run is a flow of its own.
    run: str | None = None

    def far(self, direction: Direction) -> str:
        """The far end for a walk in this direction."""
        return self.source if direction == "up" else self.target


def walk(
    dataset: str,
    flows_at: Callable[[Collection[str]], Iterable[Flow]],
    direction: Direction,
    depth: int | None = None,
) -> Iterator[tuple[int, Flow]]:
    """The flows that a walk from a dataset meets, with their distance: 1 for those at the dataset.

    Args:
      flows_at: returns the flows that have one of the given datasets as their near end.
      depth: the greatest distance; None: any.
    The walk continues from each dataset once. So each flow is yielded once, flows that close a cycle included, and the
    walk ends.
    """
    seen = {dataset}
    frontier = {dataset}
    distance = 0
    while frontier and (depth is None or distance < depth):
        distance += 1
        met: set[str] = set()
        for flow in sorted(
            flows_at(frontier), key=lambda each: (each.source, each.target, each.program, each.run or "")
        ):
            yield distance, flow
            met.add(flow.far(direction))
        frontier = met - seen
        seen |= met


# --- flows of some datasets ------------------------------------------------------------------------
#
# One step of a walk, without Spark: first the edges of the datasets, then the other edges of their runs. Only the edges
# that a step finds are in memory.


class FlowsAt:
    """Finds the flows of datasets in the tables of a folder, as they are when it is created.

    Args:
      namespace: the datasets' and the runs'.
      unknown: accesses of unknown kind count as reads and as writes.
      by_run: one flow for each run, instead of one for each program.
      start, end: use only edges seen from ``start`` on and before ``end``.
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
        """Return the flows that have one of ``datasets`` as their near end.

        Raises:
          FileNotFoundError: the files are gone; see ``reading``.
        """
        near = self._edges(self._near, ds.field("dataset").isin(sorted(datasets)))
        runs = pc.unique(near["run"])
        if not len(runs):
            return []
        far = self._edges(self._far, ds.field("run").isin(runs))
        both = near.join(far, list(RUN), join_type="inner", right_suffix="_far")
        seen = [("first_seen", "min"), ("first_seen_far", "min"), ("last_seen", "max"), ("last_seen_far", "max")]
        counted = both.append_column("each_run", both["run"])
        grouped = counted.group_by(list(self._by)).aggregate([("each_run", "count_distinct"), *seen])
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
            for row in grouped.to_pylist()
        ]

    def _edges(self, end: str, which: ds.Expression) -> pa.Table:
        """Return the merged edges that can be this end of a flow; the column dataset is named after the end."""
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
