"""Archives for tests, made as the job makes them but of rows that no daemon gave."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from pipeline.archive import layout
from pipeline.archive.files import LocalFiles
from pipeline.archive.manifest import Manifest, Stats
from pipeline.archive.writing import BatchWriter, Log, Offsets

LOG = Log("default", "orders", 1)
#: 2026-01-31, midnight.
DAY_MS = layout.day_start_ms("2026-01-31")
HOUR_MS = 3_600_000
SCHEMA = (
    "namespace STRING, topic STRING, message_id BINARY, publish_timestamp TIMESTAMP, seq_id INT, "
    "write_timestamp TIMESTAMP, payload_seq_id INT, payload BINARY, routing_key STRING, headers MAP<STRING,STRING>"
)


def id_at(time_ms: int, seq: int = 0) -> bytes:
    return time_ms.to_bytes(8, "big") + seq.to_bytes(2, "big") + bytes(10)


def after(message_id: bytes) -> bytes:
    return (int.from_bytes(message_id, "big") + 1).to_bytes(20, "big")


def messages(spark: SparkSession, times_ms: Sequence[int]) -> DataFrame:
    """One message at each time, as the connector would give them."""
    rows = []
    for number, time_ms in enumerate(times_ms):
        moment = datetime.fromtimestamp(time_ms / 1000, UTC)
        headers = {"number": str(number)} if number % 2 else None
        payload = f"payload {time_ms}".encode()
        rows.append(("default", "orders", id_at(time_ms), moment, 0, None, None, payload, None, headers))
    return spark.createDataFrame(rows, SCHEMA)


class Archive:
    """An archive of the topic ``orders`` below ``root``."""

    def __init__(self, root: Path, archive: str = "a" * 32, log: Log = LOG) -> None:
        self.root = str(root)
        self.files = LocalFiles(root)
        self.log = log
        self.archive = archive
        self.writer = BatchWriter(self.files, log, Offsets(self.files, log))

    def append(self, spark: SparkSession, batch: int, times_ms: Sequence[int], bounds: tuple[bytes, bytes]) -> Manifest:
        folder = layout.batch_folder(self.log.namespace, self.log.topic, self.log.generation, self.archive, batch)
        self.writer.write(messages(spark, times_ms), folder, bounds[1])
        return self.writer.describe(spark, folder, self.archive, batch, bounds)


def batch_entry(start: int, end: int, *, batch: int = 0, written_ms: int = 0, source: str = "a") -> Manifest:
    """A batch without files that holds ids ``start`` to ``end`` of a small world."""
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


def raw_ids(root: str) -> list[bytes]:
    """The ids in every Parquet file below a root, without Spark and without manifests."""
    files = sorted(Path(root).rglob("*.parquet"))
    return [each for file in files for each in pq.read_table(file, columns=["message_id"])["message_id"].to_pylist()]


def damage(folder: Path) -> None:
    """Leave out a row of an entry."""
    file = max(folder.glob("*.parquet"), key=lambda each: pq.read_metadata(each).num_rows)
    rewrite(file, pq.read_table(file).slice(1))


def rewrite(file: Path, table: pa.Table) -> None:
    """With the checksum gone that Hadoop keeps beside it, which would find this too."""
    pq.write_table(table, file)
    file.with_name(f".{file.name}.crc").unlink()
