"""An archive on a real HDFS of a name node and three data nodes: Spark writes the files, the library commits them."""

from __future__ import annotations

import os

import pytest
from deltalake import DeltaTable

from plainsong import Client
from plainsong.cli.connection import Where
from pyspark_plainsong.pipeline.archive import archiving, read
from pyspark_plainsong.pipeline.archive.archiving import append, compact, verify
from pyspark_plainsong.pipeline.archive.layout import FIRST
from pyspark_plainsong.pipeline.archive.reading import LAST
from pyspark_plainsong.pipeline.archive.table import Conflict, TopicTable
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.job import Run
from tests.daemon.harness import Daemon, eventually
from tests.hbase_server import why_not
from tests.hbase_servers import DATA_NODES, HBaseServers
from tests.patience import SPARK_PATIENCE_S
from tests.pipeline.archives import after, id_at, in_topic, published, url_of
from tests.pipeline.former_archives import write_batch

pytestmark = [pytest.mark.torture, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class HDFS(HBaseServers):
    """A name node and three data nodes, without HBase."""

    def __init__(self, directory) -> None:
        super().__init__(directory, hdfs=True)
        self.names = ("name", *DATA_NODES)
        self.configuration = self._conf

    def wait_ready(self) -> None:
        """The test waits until it can write."""


@pytest.fixture(scope="module")
def hdfs(spark, tmp_path_factory):
    """The URL of the file system."""
    with HDFS(tmp_path_factory.mktemp("hdfs")) as servers, pytest.MonkeyPatch.context() as patched:
        patched.setenv("HADOOP_CONF_DIR", str(servers.configuration))  # for the library
        text = (servers.configuration / "core-site.xml").read_text()
        url = text.partition("<name>fs.defaultFS</name><value>")[2].partition("</value>")[0]
        files = open_files(f"{url}/ready", lambda: spark)

        def is_ready() -> bool:
            try:
                files.write("file", b"ready")
            except Exception:  # noqa: BLE001 - the error varies until there are data nodes
                return False
            return True

        eventually("a file can be written", is_ready, SPARK_PATIENCE_S)
        yield url


@pytest.fixture
def root(hdfs, request):
    return f"{hdfs}/{request.node.name}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("archived") / "data") as running:
        yield running


def test_a_topic_is_archived_verified_compacted_and_read(spark, daemon, root):
    run = Run("archive", Where((url_of(daemon),), "hdfs"), spark=spark)
    with Client(url_of(daemon), namespace="hdfs") as client:
        for first in (0, 200):
            published(client, first, 200)
            append(run, ["orders"], root, every=None, batch_rows=100)
        there = in_topic(client)
    rows = read(spark, root, topic="orders").orderBy("message_id").collect()
    assert [bytes(row.message_id) for row in rows] == there
    compact(run, [], root, compression="zstd", today=True, keep_ms=0)
    found = DeltaTable(f"{root}/hdfs/orders").to_pyarrow_table(columns=["message_id"])
    assert sorted(found["message_id"].to_pylist()) == there
    assert verify(run, "orders", root, FIRST, LAST, None).is_good


def test_of_two_that_append_from_the_same_place_only_the_first_commits(spark, root):
    files = open_files(root, lambda: spark)
    one = TopicTable.create(files, "default", "orders")
    other = TopicTable.open(files, "default", "orders")
    one.append(1, FIRST, after(id_at(1)), [])
    with pytest.raises(Conflict):
        other.append(1, FIRST, after(id_at(2)), [])
    other.reload()
    assert other.end(1) == after(id_at(1))


def test_an_archive_of_an_earlier_version_is_migrated(spark, root, tmp_path):
    start = FIRST
    for number in range(2):
        start = write_batch(spark, tmp_path, number, [1000 * number + at for at in range(5)], start)
    path = spark._jvm.org.apache.hadoop.fs.Path
    target = path(f"{root}/default")
    system = target.getFileSystem(spark._jsc.hadoopConfiguration())
    system.copyFromLocalFile(path(str(tmp_path / "default")), target)
    archiving.migrate(Run("archive", spark=spark), [], root, compression="zstd")
    assert read(spark, root).count() == 10
    assert not open_files(root, lambda: spark).names("default/orders/gen=1")
    assert os.environ["HADOOP_CONF_DIR"]
