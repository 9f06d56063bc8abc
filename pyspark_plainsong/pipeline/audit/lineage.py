"""Lineage: which datasets program runs access, the flows between datasets that follow, and walks along them.

A run that reads `a` and writes `b` makes a flow from `a` to `b`. An access of unknown kind makes an edge, which is kept
and shown; with ``unknown=True`` it makes flows too, as a read and as a write.
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
    """The kinds of access that count as ``access``."""
    return [access, UNKNOWN] if unknown else [access]


def edge_rows(parsed: DataFrame) -> DataFrame:
    """The edges of parsed messages."""
    each = access_rows(parsed).select(
        *EDGES.keys,
        F.col("time").alias("first_seen"),
        F.col("time").alias("last_seen"),
        F.lit(1).cast("bigint").alias("accesses"),
    )
    return EDGES.merged(each)


def flows(edges: DataFrame, *, unknown: bool = False) -> DataFrame:
    """Flows: namespace, source, program, target, runs, first_seen, last_seen; one row for each program."""
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
    """Every pair of datasets of which one came from the other: namespace, source, target, distance (in runs).

    ``flow`` comes from ``flows``. The distance is the shortest one, and ``depth`` (None: any) its bound; a cycle ends
    at a pair that was found before. Each step joins the new pairs alone and is cached, so that step n does not repeat
    the others.
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

#: Where the console looks for flows.
LINEAGE_TOPIC: Final = ("system", "lineage")
#: Flows of one publish.
PUBLISHED_AT_ONCE: Final = 1000


def publish_flows(run: Run, root: Path, manifest: TablesManifest) -> int:
    """Publish every flow of the tables, those seen last at the end; returns their number.

    A flow is published again by each run that is told to. Readers take the newest of each source and target.

    Raises:
      TopicNotFound: the topic is made by an operator, since namespace ``system`` is not everybody's.
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
    """A flow as the topic has it."""
    names = {"namespace": "namespace", "source": "from", "target": "to", "program": "program", "runs": "runs"}
    return json.dumps({"v": 1, **{ours: flow[name] for name, ours in names.items()}}, ensure_ascii=False).encode()


# --- walks -----------------------------------------------------------------------------------------
#
# A walk asks for the flows of each step when it gets there, so it costs what it finds, whatever the size of the table.

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

    def near(self, direction: Direction) -> str:
        """The near end for a walk in this direction."""
        return self.target if direction == "up" else self.source

    def far(self, direction: Direction) -> str:
        """The far end."""
        return self.source if direction == "up" else self.target


def walk(
    dataset: str,
    flows_at: Callable[[Collection[str]], Iterable[Flow]],
    direction: Direction,
    depth: int | None = None,
) -> Iterator[tuple[int, Flow]]:
    """The flows that a walk from a dataset meets, with their distance: 1 for those at the dataset.

    Args:
      flows_at: returns the flows whose near end is one of the datasets given.
      depth: the greatest distance; None: any.
    The walk goes on from each dataset once: so each flow comes once, a flow that closes a cycle comes
    too, and the walk ends.
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
# One step of a walk, without Spark: first the edges of the datasets, then the other edges of their runs. What is in
# memory is what the step finds.


class FlowsAt:
    """A function of datasets that finds their flows in the tables of a folder, all as of now.

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
        """The flows whose near end is one of ``datasets``.

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
        """The merged edges that can be this end of a flow, with the dataset named as the end."""
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
