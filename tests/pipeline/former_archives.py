"""Archives in the form that earlier versions wrote: each is a folder of Parquet files with a manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from pyspark_plainsong.pipeline.archive import former
from pyspark_plainsong.pipeline.archive.former import Manifest, Stats
from pyspark_plainsong.pipeline.archive.reading import COLUMNS
from tests.pipeline.archives import after, id_at, messages

FOLDER = "default/orders/gen=1"


def write_batch(
    spark: SparkSession, root: Path, batch: int, times_ms: Sequence[int], start: bytes, day: str | None = None
) -> bytes:
    """Write an entry from ``start`` to its last message, a batch or a day; return its end."""
    name = f"batches/archive={'a' * 32}/batch={batch:012d}-0000" if day is None else f"days/dt={day}/entry=e-{batch}"
    folder = root / FOLDER / name
    rows = messages(spark, times_ms).withColumn("generation", sf.lit(1)).select(*COLUMNS)
    rows.coalesce(1).write.parquet(str(folder))
    stats = former.to_stats(spark.read.parquet(str(folder)).select(*former.stats_columns()).collect()[0].asDict())
    end = after(id_at(times_ms[-1]))
    kind = {"kind": "batch", "archive": "a" * 32, "batch": batch}
    if day is not None:
        kind = {"kind": "day", "entry": "e", "day": day, "revision": 1}
    fields = {
        "version": 1,
        "namespace": "default",
        "topic": "orders",
        "generation": 1,
        **kind,
        "start": start.hex(),
        "end": end.hex(),
        "count": stats.count,
        "payloadBytes": stats.payload_bytes,
        "digest": f"{stats.digest:016x}",
        "firstId": None if stats.first is None else stats.first.hex(),
        "lastId": None if stats.last is None else stats.last.hex(),
        "files": [{"name": each.name, "bytes": each.stat().st_size} for each in sorted(folder.glob("*.parquet"))],
        "writtenMs": 1000 + batch,
    }
    (folder / former.MANIFEST_NAME).write_text(json.dumps(fields))
    return end


def batch_entry(start: int, end: int, *, batch: int = 0, written_ms: int = 0, source: str = "a") -> Manifest:
    """A batch without files that holds ids ``start`` to ``end`` of a small example."""
    return entry("batch", start, end, batch=batch, written_ms=written_ms, source=source)


def entry(kind: str, start: int, end: int, **more: object) -> Manifest:
    given: dict[str, object] = {"written_ms": 0, "source": "a", "folder": f"{kind}-{start}-{end}", **more}
    stats = Stats(end - start, 0, 0, small_id(start), small_id(end - 1)) if end > start else Stats(0, 0, 0)
    return Manifest(
        kind=kind,  # type: ignore[arg-type]
        namespace="default",
        topic="orders",
        generation=1,
        start=small_id(start),
        end=small_id(end),
        stats=stats,
        files=(),
        **given,  # type: ignore[arg-type]
    )


def small_id(number: int) -> bytes:
    return number.to_bytes(20, "big")
