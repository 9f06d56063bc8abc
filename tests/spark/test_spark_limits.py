"""Limits of Spark's interface for Python data sources, one test for each: docs/spark-limits.md names these tests.

A test that fails with another Spark means that the page, and perhaps the connector, can do better there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, GreaterThan, InputPartition
from pyspark.sql.streaming.datasource import ReadMinRows
from tables import Tables

from tests.daemon.harness import Daemon
from tests.patience import SPARK_PATIENCE_S
from tests.spark_session import own_settings, spark_environ

LASTING = Path(__file__).with_name("lasting_program.py")
PAGE = Path(__file__).parents[2] / "docs" / "spark-limits.md"
PYTHON = "org.apache.spark.sql.execution.datasources.v2.python"
CONNECTOR = "org.apache.spark.sql.connector"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


def interfaces(spark, name: str) -> set[str]:
    """Return the interfaces of a class of Spark and of its superclasses, without their packages."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    found, waiting = set(), [spark._jvm.java.lang.Class.forName(f"{PYTHON}.{name}", False, loader)]
    while waiting:
        kind = waiting.pop()
        above = [*kind.getInterfaces(), *([kind.getSuperclass()] if kind.getSuperclass() else [])]
        found |= {each.getName().rpartition(".")[2] for each in kind.getInterfaces()}
        waiting += above
    return found


def sources(kind: str):
    """A source of the numbers 0 to 9 that takes filters; ``kind`` says what it does with them."""

    class Reader(DataSourceReader):
        def __init__(self) -> None:
            self.least = 0

        def pushFilters(self, filters):  # noqa: N802
            for each in filters:
                if isinstance(each, GreaterThan) and each.attribute == ("id",):
                    self.least = each.value + 1
                    if kind == "all":
                        continue
                yield each

        def partitions(self):
            return [InputPartition(number) for number in range(self.least, 10)]

        def read(self, partition):
            yield (partition.value,)

    class Numbers(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"numbers_{kind}"

        def schema(self) -> str:
            return "id INT"

        def reader(self, schema):
            return Reader()

    return Numbers


# --- filters -----------------------------------------------------------------------------------------


def test_a_reader_that_takes_filters_fails_in_a_session_with_defaults(spark):
    spark.dataSource.register(sources("all"))
    with pytest.raises(PySparkException, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        spark.read.format("numbers_all").load().collect()


@pytest.fixture
def pushing(spark):
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield spark
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize("kind", ["all", "none"])
def test_a_filter_that_a_reader_has_seen_stays_for_other_queries_of_the_table(pushing, kind):
    """``none``: the reader leaves every filter to Spark as well, and only plans fewer partitions."""
    pushing.dataSource.register(sources(kind))
    rows = pushing.read.format(f"numbers_{kind}").load()
    assert rows.where("id > 6").count() == 3
    assert rows.count() == 3  # of 10


def test_two_filters_of_a_table_in_one_query_read_the_same_partitions(pushing):
    pushing.dataSource.register(sources("all"))
    rows = pushing.read.format("numbers_all").load()
    assert rows.where("id > 6").union(rows.where("id < 2")).count() != 5


# --- columns, metrics, bounds ------------------------------------------------------------------------


def test_a_scan_is_given_no_columns_and_no_limit(spark, tables):
    wanted = interfaces(spark, "PythonScanBuilder")
    assert "SupportsPushDownFilters" in wanted
    assert not wanted & {"SupportsPushDownRequiredColumns", "SupportsPushDownLimit", "SupportsPushDownAggregates"}
    tables.publish(tables.create("limits-columns"), "x")
    rows = spark.read.format("plainsong").options(**tables.options(subscribe="limits-columns")).load()
    plan = rows.select("seq_id")._jdf.queryExecution().executedPlan().toString()
    assert "payload#" in plan  # the scan makes all columns, and a projection after it leaves them out


def test_a_source_reports_no_partitioning_order_or_statistics_and_takes_no_runtime_filter(spark):
    assert not interfaces(spark, "PythonScan") & {
        "SupportsReportPartitioning", "SupportsReportOrdering", "SupportsReportStatistics", "SupportsRuntimeV2Filtering",
    }  # fmt: skip


def test_a_source_has_no_metrics_of_its_own(spark, tables, tmp_path):
    assert "ReportsSourceMetrics" not in interfaces(spark, "PythonMicroBatchStream")
    tables.publish(tables.create("limits-metrics"), "x")
    rows = spark.readStream.format("plainsong").options(**tables.options(subscribe="limits-metrics")).load()
    query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    query = query.trigger(availableNow=True).start()
    assert query.awaitTermination(SPARK_PATIENCE_S)
    assert query.lastProgress["sources"][0]["metrics"] == {}


def test_a_least_number_of_rows_has_no_longest_delay_of_sparks():
    assert list(ReadMinRows.__dataclass_fields__) == ["min_rows"]


# --- tables ------------------------------------------------------------------------------------------


@pytest.fixture
def dropped(spark):
    """Tables and views that the test makes."""
    yield
    spark.sql("DROP VIEW IF EXISTS limits_view")
    for table in ("limits_read", "limits_write"):
        spark.sql(f"DROP TABLE IF EXISTS {table}")
    spark.catalog.dropTempView("limits_temporary")


def in_sql(options: dict[str, str]) -> str:
    return ", ".join(f"`{name}` '{value}'" for name, value in options.items())


def test_a_table_of_the_catalog_keeps_no_options(spark, tables, dropped):
    options = in_sql(tables.options(subscribe=tables.create("limits-table")))
    with pytest.raises(PySparkException, match="keeps no options of a Python source: name its columns"):
        spark.sql(f"CREATE TABLE limits_read USING plainsong OPTIONS ({options})")
    spark.sql(f"CREATE TABLE limits_read (payload BINARY) USING plainsong OPTIONS ({options})")
    with pytest.raises(PySparkException, match="option url is missing"):
        spark.sql("SELECT * FROM limits_read").collect()


def test_a_table_of_the_catalog_is_read_with_options_in_each_query_or_in_a_view(spark, tables, dropped, tmp_path):
    topic = tables.create("limits-catalog")
    tables.publish(topic, "a", "b")
    options = tables.options(subscribe=topic)
    spark.sql("CREATE TABLE limits_read (payload BINARY) USING plainsong")
    assert spark.sql(f"SELECT payload FROM limits_read WITH ({in_sql(options)})").count() == 2
    spark.sql(f"CREATE VIEW limits_view AS SELECT * FROM limits_read WITH ({in_sql(options)})")
    assert spark.table("limits_view").count() == 2
    tables.publish(topic, "c")
    assert sorted(bytes(row.payload) for row in spark.table("limits_view").collect()) == [b"a", b"b", b"c"]
    writer = spark.readStream.options(**options).table("limits_read").writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    assert query.awaitTermination(SPARK_PATIENCE_S)
    assert query.lastProgress["numInputRows"] == 3


@pytest.mark.torture  # each of its two sessions takes half a minute to start with its metastore
def test_a_table_and_a_view_in_a_hive_metastore_outlast_the_session(tables, tmp_path):
    topic = tables.create("limits-lasting")
    tables.publish(topic, "a", "b")
    options = in_sql(tables.options(subscribe=topic))
    count = "SELECT count(*), min(decode(payload, 'UTF-8')) FROM lasting"
    make = [
        "CREATE TABLE messages (payload BINARY, message_id BINARY) USING plainsong",
        f"CREATE VIEW lasting AS SELECT * FROM messages WITH ({options})",
    ]
    assert in_metastore(tmp_path, *make, count) == [[], [], [[2, "a"]]]
    tables.publish(topic, "c")
    later = f"SELECT count(*) FROM messages WITH ({options})"
    assert in_metastore(tmp_path, count, later) == [[[3, "a"]], [[3]]]


def in_metastore(folder: Path, *statements: str) -> list[list[list[object]]]:
    """Run statements in a new session with the metastore in a folder; return the rows of each."""
    places = str(folder / "metastore"), str(folder / "warehouse")
    environ = own_settings({**os.environ, **spark_environ()})
    done = subprocess.run(
        [sys.executable, LASTING, *places, *statements],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rows_are_inserted_in_sql_with_options_in_the_statement_or_in_a_temporary_view(spark, tables, dropped):
    topic = tables.create("limits-insert")
    options = in_sql(tables.options(topic))
    spark.sql("CREATE TABLE limits_write (payload STRING) USING plainsong")
    spark.sql(f"INSERT INTO limits_write WITH ({options}) VALUES ('a'), ('b')")
    spark.sql(f"CREATE TEMPORARY VIEW limits_temporary (payload STRING) USING plainsong OPTIONS ({options})")
    spark.sql("INSERT INTO limits_temporary SELECT 'c'")
    assert tables.counted(topic) == {b"a": 1, b"b": 1, b"c": 1}
    with pytest.raises(PySparkException, match="only be appended to"):
        spark.sql(f"INSERT OVERWRITE limits_write WITH ({options}) VALUES ('d')")


def test_a_stream_writes_in_append_mode_only(spark, tables, tmp_path):
    source, topic = tables.create("limits-update"), tables.create("limits-updated")
    tables.publish(source, "x")
    rows = spark.readStream.format("plainsong").options(**tables.options(subscribe=source)).load()
    counts = rows.groupBy("payload").count().selectExpr("payload", "cast(payload AS STRING) AS routing_key")
    for mode, why in (("update", "pdate"), ("complete", "only be appended to")):
        writer = counts.writeStream.format("plainsong").options(**tables.options(topic)).outputMode(mode)
        writer = writer.option("checkpointLocation", str(tmp_path / mode)).trigger(availableNow=True)
        with pytest.raises(PySparkException, match=why):
            writer.start().awaitTermination(SPARK_PATIENCE_S)


def test_changed_rows_of_a_stream_are_published_once_with_foreach_batch(spark, tables, tmp_path):
    source, topic = tables.create("limits-changes"), tables.create("limits-changed")
    rows = spark.readStream.format("plainsong").options(**tables.options(subscribe=source)).load()
    counts = rows.groupBy("payload").count()

    def publish(changed, batch):
        payload = "concat(cast(payload AS STRING), '=', count) AS payload"
        options = tables.options(topic, producerName="counts", sequenceId=batch)
        changed.selectExpr(payload).write.format("plainsong").options(**options).mode("append").save()

    def run():
        writer = counts.writeStream.outputMode("update").foreachBatch(publish)
        writer = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        assert writer.start().awaitTermination(SPARK_PATIENCE_S)

    tables.publish(source, "a", "b", "a")
    run()
    for file in (tmp_path / "c/commits").iterdir():  # as if the query had been killed after its save
        file.unlink()
    run()
    assert tables.counted(topic) == {b"a=2": 1, b"b=1": 1}
    tables.publish(source, "a")
    run()
    assert tables.counted(topic) == {b"a=2": 1, b"b=1": 1, b"a=3": 1}


def test_the_page_names_these_tests_and_no_others():
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert named == {name for name in globals() if name.startswith("test_") and "the_page" not in name}
    assert pyspark.__version__[:3] in PAGE.read_text(encoding="utf-8")
