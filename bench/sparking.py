"""Spark and a daemon on one machine: tables read and written, micro-batches, publish to ``foreachBatch``, the archive.

Beside each the same without us in the same session: rows made by Spark itself into its null sink and into Parquet, rows
read from Parquet, the rate source's micro-batches. Everything shares the machine's cores: JVM, Python workers, daemon.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import daemon
from bench.rounds import Row, Section, Spread, in_turns
from plainsong import Client
from pyspark_plainsong.pipeline.session import build_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from bench.profiles import Profile

SAYS = """Rows a second through Spark on the daemon's own machine, JVM, Python workers and daemon sharing its cores; after a
round that is not counted. *read*: a topic into the null sink, all columns; *narrow*: ``message_id`` and ``payload`` alone;
beside them the same rows from Parquet. *write*: rows that Spark makes into a topic, durable and visible when it ends; beside
it the same rows into the null sink and into Parquet. *archive*: ``plainsong pipeline run archive`` as a process, without
its start (the difference to a topic of a fifth of the rows), beside the same rows from Parquet to Parquet. *micro-batch*: milliseconds of one of 5000 rows, beside the rate
source's. *visible*: milliseconds from the end of a publish until ``foreachBatch`` has the row."""
#: Each takes seconds, and enough of them.
ROUNDS = 3
BATCH_ROWS = 5_000
_JVM = "spark.driver.extraJavaOptions"


def measure_spark(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """All of it, in one session, against one daemon."""
    section = Section("spark", "Spark", SAYS)
    spark = build_session("plainsong bench", conf={"spark.driver.memory": "1g", _JVM: profile.jvm})
    try:
        with daemon(scratch / "store") as ours:
            bench = _Bench(spark, f"http://127.0.0.1:{ours.port}", scratch, profile)
            for size in profile.message_bytes:
                for partitions in profile.partitions:
                    section.rows += bench.tables(size, partitions)
            section.rows += [bench.micro_batches(), bench.visible(), bench.archive()]
    finally:
        spark.stop()
    for row in section.rows:
        what = ", ".join(str(value) for value in row.what.values())
        say(f"spark, {what}: " + "  ".join(f"{name} {value.median:,.2f}" for name, value in row.values.items()))
    return section


class _Bench:
    def __init__(self, spark: SparkSession, url: str, scratch: Path, profile: Profile) -> None:
        self._spark = spark
        self._url = url
        self._scratch = scratch
        self._profile = profile
        self._topics = 0

    # --- tables ---

    def tables(self, size: int, partitions: int) -> list[Row]:
        """Reading and writing."""
        rows = self._profile.spark_rows * 100 // size
        made = self._made(rows, size, partitions)
        with self._client() as client:
            full = self._new_topic(client)
            self._write(made, full)
            parquet = str(self._scratch / f"parquet-{size}-{partitions}")
            self._read(full, partitions).write.mode("overwrite").parquet(parquet)
            sides = {
                "read": lambda: _drain(self._read(full, partitions)),
                "narrow": lambda: _drain(self._read(full, partitions, "message_id binary, payload binary")),
                "from Parquet": lambda: _drain(self._spark.read.parquet(parquet)),
                "write": lambda: self._write(made, self._new_topic(client)),
                "to null": lambda: _drain(made),
                "to Parquet": lambda: made.write.mode("overwrite").parquet(str(self._scratch / "made")),
            }
            rates = _rates(sides, rows, min(ROUNDS, self._profile.rounds))
        beside = {"read": ("from Parquet",), "narrow": ("from Parquet",), "write": ("to null", "to Parquet")}
        found = []
        for what, others in beside.items():
            values = {"rows/s": Spread.of(rates[what])}
            values |= {f"÷ {other}": Spread.ratio(rates[what], rates[other]) for other in others}
            found.append(Row({"what": what, "bytes": size, "partitions": partitions}, values))
        return found

    def _made(self, rows: int, size: int, partitions: int) -> DataFrame:
        from pyspark.sql import functions as sql

        payload = sql.lpad(sql.col("id").cast("string"), size, "x").cast("binary")
        return self._spark.range(0, rows, 1, partitions).select(payload.alias("payload"))

    def _read(self, topic: str, partitions: int, schema: str | None = None) -> DataFrame:
        reader = self._spark.read.format("plainsong").options(
            url=self._url, namespace=bodies.NAMESPACE, subscribe=topic, minPartitions=partitions
        )
        return (reader if schema is None else reader.schema(schema)).load()

    def _write(self, made: DataFrame, topic: str) -> None:
        made.write.format("plainsong").mode("append").options(
            url=self._url, namespace=bodies.NAMESPACE, topic=topic
        ).save()

    # --- streams ---

    def micro_batches(self) -> Row:
        """What a micro-batch of ``BATCH_ROWS`` rows takes, its sink doing nothing."""
        with self._client() as client:
            topic = self._new_topic(client)
        self._write(self._made(BATCH_ROWS * self._profile.micro_batches, 100, 1), topic)
        ours = self._batches_ms(
            "plainsong",
            url=self._url,
            namespace=bodies.NAMESPACE,
            subscribe=topic,
            maxOffsetsPerTrigger=BATCH_ROWS,
        )
        rate = self._batches_ms("rate-micro-batch", rowsPerBatch=BATCH_ROWS)
        count = min(len(ours), len(rate))
        values = {"ms": Spread.of(ours), "÷ rate source": Spread.ratio(ours[:count], rate[:count])}
        return Row({"what": "micro-batch", "bytes": 100, "partitions": 1}, values)

    def _batches_ms(self, source: str, **options: str | int) -> list[float]:
        """Milliseconds of each batch, without the first ones, in which code is compiled."""
        batches = self._profile.micro_batches
        frame = self._spark.readStream.format(source).options(**options).load()
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", self._checkpoint())
            .trigger(processingTime="0 seconds")
        ).start()
        try:
            while query.lastProgress is None or query.lastProgress["batchId"] < batches - 1:
                error = query.exception()
                if error is not None:
                    raise error
                time.sleep(0.05)
            full = [each for each in query.recentProgress if each["numInputRows"] == BATCH_ROWS]
        finally:
            query.stop()
        return [float(each["durationMs"]["triggerExecution"]) for each in full][4:batches]

    def visible(self) -> Row:
        """From the end of a publish until ``foreachBatch`` has the row."""
        seen = threading.Event()

        def take(batch: DataFrame, number: int) -> None:
            del number
            if batch.count():
                seen.set()

        found = []
        with self._client() as client:
            topic = self._new_topic(client)
            frame = self._spark.readStream.format("plainsong").options(
                url=self._url, namespace=bodies.NAMESPACE, subscribe=topic
            )
            query = frame.load().writeStream.foreachBatch(take).option("checkpointLocation", self._checkpoint()).start()
            try:
                for _ in range(self._profile.wakes + 2):
                    time.sleep(0.5)
                    seen.clear()
                    client.publish(topic, b"here")
                    begun_s = time.perf_counter()
                    if not seen.wait(60):
                        raise TimeoutError("a row did not come")
                    found.append((time.perf_counter() - begun_s) * 1000)
            finally:
                query.stop()
        return Row({"what": "visible", "bytes": 4, "partitions": 1}, {"ms": Spread.of(found[2:])})

    # --- the archive ---

    def archive(self) -> Row:
        """The job as a process: what four fifths of the rows take is the difference to a topic of the other fifth."""
        rows = self._profile.spark_rows
        with self._client() as client:
            full, part = self._new_topic(client), self._new_topic(client)
        self._write(self._made(rows, 100, 2), full)
        self._write(self._made(rows // 5, 100, 2), part)
        parquet = str(self._scratch / "archived")
        self._read(full, 2).write.mode("overwrite").parquet(parquet)
        more = rows - rows // 5
        rates = in_turns(
            {
                "archive": lambda: more / max(0.01, self._archive_s(full) - self._archive_s(part)),
                "copy": lambda: _rate(
                    rows, lambda: self._spark.read.parquet(parquet).write.mode("overwrite").parquet(parquet + "-copy")
                ),
            },
            min(ROUNDS, self._profile.rounds),
        )
        values = {"rows/s": Spread.of(rates["archive"]), "÷ Parquet": Spread.ratio(rates["archive"], rates["copy"])}
        return Row({"what": "archive", "bytes": 100, "partitions": 1}, values)

    def _archive_s(self, topic: str) -> float:
        target = self._scratch / "archive"
        shutil.rmtree(target, ignore_errors=True)
        where = ["--root", str(target), "--url", self._url, "--namespace", bodies.NAMESPACE, "--no-progress"]
        where += ["--conf", f"{_JVM}={self._profile.jvm}"]
        command = [sys.executable, "-m", "pyspark_plainsong.pipeline.archive", "append", topic, *where]
        begun_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun_s

    # --- what all use ---

    def _client(self) -> Client:
        return Client(self._url, namespace=bodies.NAMESPACE)

    def _new_topic(self, client: Client) -> str:
        self._topics += 1
        return client.create_topic(f"spark{self._topics}").name

    def _checkpoint(self) -> str:
        self._topics += 1
        return str(self._scratch / f"checkpoint{self._topics}")


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _rate(rows: int, run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return rows / (time.perf_counter() - begun_s)


def _rates(sides: Mapping[str, Callable[[], object]], rows: int, rounds: int) -> dict[str, list[float]]:
    """Rows a second of each side, a round after another; before them one that warms up."""
    for run in sides.values():
        run()
    return in_turns({name: partial(_rate, rows, run) for name, run in sides.items()}, rounds)
