"""Archives for tests, made as the job makes them but of rows that no daemon gave."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from plainsong import Client
from pyspark_plainsong.pipeline.archive import layout, read
from pyspark_plainsong.pipeline.archive.manifest import Manifest, Stats
from pyspark_plainsong.pipeline.archive.reading import load_manifests
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter, Log, Offsets
from pyspark_plainsong.pipeline.files import LocalFiles
from tests.daemon.harness import Daemon

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
        self.writer = ArchiveWriter(self.files, log, Offsets(self.files, log))

    def append(self, spark: SparkSession, batch: int, times_ms: Sequence[int], bounds: tuple[bytes, bytes]) -> Manifest:
        return self.writer.put(messages(spark, times_ms), self.archive, batch, bounds)


#: Two days, of which the second is not over: five batches, one over midnight.
TIMES = [DAY_MS + hour * HOUR_MS for hour in range(36)]
BATCHES = [TIMES[:7], TIMES[7:14], TIMES[14:21], TIMES[21:28], TIMES[28:]]


def two_days(spark: SparkSession, root: Path) -> Archive:
    """An archive of ``TIMES`` in ``BATCHES``."""
    made = Archive(root)
    start = bytes(20)
    for number, times in enumerate(BATCHES):
        end = after(id_at(times[-1]))
        made.append(spark, number, times, (start, end))
        start = end
    return made


def times_read(spark: SparkSession, archive: Archive) -> list[int]:
    """The publish times of all rows, sorted: a row that is read twice stands twice."""
    return sorted(layout.time_of(row.message_id) for row in read(spark, archive.root).select("message_id").collect())


def on_disk(archive: Archive) -> list[int]:
    """The same of every Parquet file there is."""
    return sorted(map(layout.time_of, raw_ids(archive.root)))


def batch_folder(archive: Archive, batch: int) -> Path:
    """Return the folder of a batch's only entry."""
    (entry,) = (each for each in load_manifests(archive.files) if (each.kind, each.batch) == ("batch", batch))
    return Path(archive.root) / entry.folder


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


def raw_ids(root: str) -> list[bytes]:
    """The ids in every Parquet file below a root, without Spark and without manifests."""
    files = sorted(Path(root).rglob("*.parquet"))
    return [each for file in files for each in pq.read_table(file, columns=["message_id"])["message_id"].to_pylist()]


def damage(folder: Path) -> None:
    """Leave out a row of an entry."""
    file = max(folder.glob("*.parquet"), key=lambda each: pq.read_metadata(each).num_rows)
    rewrite(file, pq.read_table(file).slice(1))


def rewrite(file: Path, table: pa.Table) -> None:
    """Replace a file, and remove Hadoop's checksum next to it, which would detect this, too."""
    for name in ("publish_timestamp", "write_timestamp"):  # Spark's INT96 is read as nanoseconds, which Spark refuses
        column = table[name].cast(pa.timestamp("us", "UTC"))
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, file)
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


# --- with a daemon -----------------------------------------------------------------------------------


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


def in_topic(client: Client, topic: str = "orders") -> list[bytes]:
    return [bytes(message.id) for message in client.read(topic)]


def in_archive(spark: SparkSession, root: str) -> list[bytes]:
    return [bytes(row.message_id) for row in read(spark, root).orderBy("generation", "message_id").collect()]


def published(client: Client, first: int, count: int, topic: str = "orders") -> None:
    client.create_topic(topic, if_not_exists=True)
    client.publish(topic, [f"message {number}".encode() for number in range(first, first + count)])
