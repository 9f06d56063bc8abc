"""Archives for tests, written by the job's code from rows that the tests made up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from plainsong import Client
from pyspark_plainsong.pipeline.archive import layout, read
from pyspark_plainsong.pipeline.archive.layout import FIRST, Range
from pyspark_plainsong.pipeline.archive.table import Batch, TableFile, TopicTable
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter, Log
from pyspark_plainsong.pipeline.files import LocalFiles, open_files
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
    """One message at each time, in the form in which the connector returns messages."""
    rows = []
    for number, time_ms in enumerate(times_ms):
        moment = datetime.fromtimestamp(time_ms / 1000, UTC)
        headers = {"number": str(number)} if number % 2 else None
        payload = f"payload {time_ms}".encode()
        rows.append(("default", "orders", id_at(time_ms), moment, 0, None, None, payload, None, headers))
    return spark.createDataFrame(rows, SCHEMA)


class Archive:
    """An archive of the topic ``orders`` below ``root``."""

    def __init__(self, root: Path, log: Log = LOG) -> None:
        self.root = str(root)
        self.files = LocalFiles(root)
        self.log = log
        self.writer = ArchiveWriter(self.files, log)

    def append(self, spark: SparkSession, times_ms: Sequence[int]) -> Batch | None:
        """Append messages as the next batch."""
        start = FIRST if (table := self.opened()) is None else table.end(self.log.generation)
        return self.writer.put(messages(spark, times_ms), Range(start, after(id_at(times_ms[-1]))))

    def opened(self) -> TopicTable | None:
        return TopicTable.open(self.files, self.log.namespace, self.log.topic)

    @property
    def table(self) -> TopicTable:
        """The newest version."""
        table = self.opened()
        assert table is not None
        return table


#: Two days, of which the second is not over: five batches, one over midnight.
TIMES = [DAY_MS + hour * HOUR_MS for hour in range(36)]
BATCHES = [TIMES[:7], TIMES[7:14], TIMES[14:21], TIMES[21:28], TIMES[28:]]


def two_days(spark: SparkSession, root: Path) -> Archive:
    """An archive of ``TIMES`` in ``BATCHES``."""
    made = Archive(root)
    for times in BATCHES:
        made.append(spark, times)
    return made


def times_read(spark: SparkSession, archive: Archive) -> list[int]:
    """The publish times of all rows, sorted: a row that is read twice occurs twice."""
    return sorted(layout.time_of(row.message_id) for row in read(spark, archive.root).select("message_id").collect())


def files_of(root: str) -> list[tuple[Path, TableFile]]:
    """Every file of every table below a root, oldest first."""
    files = open_files(root)
    found = []
    for log in sorted(Path(root).glob("*/*/_delta_log")):
        table = TopicTable.open(files, *log.parts[-3:-1])
        assert table is not None
        found += [(log.parent / each.path, each) for each in table.all_files()]
    return sorted(found, key=lambda each: (each[1].first_ms, each[1].path))


def raw_ids(root: str) -> list[bytes]:
    """The ids in every table below a root, read by the library alone."""
    tables = [DeltaTable(log.parent) for log in sorted(Path(root).glob("*/*/_delta_log"))]
    return [
        each for table in tables for each in table.to_pyarrow_table(columns=["message_id"])["message_id"].to_pylist()
    ]


def damage(file: Path) -> None:
    """Leave out a row of a file."""
    rewrite(file, pq.read_table(file, partitioning=None).slice(1))


def rewrite(file: Path, table: pa.TopicTable) -> None:
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
