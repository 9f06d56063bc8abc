"""A real HBase with each server in a separate process, on local files or on an HDFS with three data nodes.

ZooKeeper, a master, two region servers and the Thrift gateway; with ``hdfs`` also a name node, and data nodes that
store each block three times. Each can be killed separately.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from storage.hbase.pool import Pool
from tests.daemon.harness import eventually
from tests.hbase_server import QUICK_JVM, SMALL, HBase, free_ports
from tests.zookeeper_server import ZooKeeperServer

HDFS = "org.apache.hadoop.hdfs.server"
REGION_SERVERS = ("region-1", "region-2")
DATA_NODES = ("data-1", "data-2", "data-3")
#: ZooKeeper's session time-out, for frozen servers: longer than any stall of a test machine. Tests expire killed
#: servers explicitly.
SESSION_MS = 60_000
#: Time limit for the start of many JVMs, which has taken five minutes on a machine with a tenfold overload.
READY_S = 1_200.0
#: Maximum heap sizes, together about 2 GiB.
HEAPS = {"master": "-Xmx256m", "thrift": "-Xmx256m", "name": "-Xmx128m"}
REGION_HEAP, DATA_HEAP = "-Xmx384m", "-Xmx96m"


class HBaseServers(HBase):
    """Runs while a ``with`` block runs. ZooKeeper is never killed."""

    master = "master"
    patience_s = READY_S

    def __init__(self, directory: Path, *, hdfs: bool = False) -> None:
        super().__init__(directory)
        self.hdfs = hdfs
        self._masters = 0
        self.data_nodes = DATA_NODES if hdfs else ()
        self.names = (*(("name", *DATA_NODES) if hdfs else ()), "master", *REGION_SERVERS, "thrift")
        self._ports = dict(zip(REGION_SERVERS, free_ports(len(REGION_SERVERS)), strict=True))
        self._keeper = ZooKeeperServer(directory / "keeper")
        self.zookeeper = self._keeper.port
        self._conf = directory / "conf"
        own = {
            "hbase.cluster.distributed": "true",
            "hbase.zookeeper.property.clientPort": self.zookeeper,
            "zookeeper.session.timeout": SESSION_MS,
            "hbase.master.wait.on.regionservers.mintostart": len(REGION_SERVERS),
            "hbase.master.wait.on.regionservers.maxtostart": len(REGION_SERVERS),
            # Local files have no hflush, but survive the death of a process.
            "hbase.unsafe.stream.capability.enforce": "true" if hdfs else "false",
        }
        with (self._conf / "log4j.properties").open("a") as log:
            log.write("log4j.logger.org.apache.hadoop.hbase.master=INFO\n")  # logs where each region moves
        if hdfs:
            own |= self._configure_hdfs()
        _add_properties(self._conf / "hbase-site.xml", own)

    def _configure_hdfs(self) -> dict[str, object]:
        """Configure HDFS; return the properties that HBase needs for it."""
        subprocess.run([SMALL, "fetch-hdfs"], check=True, stdout=subprocess.DEVNULL)
        name, http = free_ports(2)
        uri = f"hdfs://127.0.0.1:{name}"
        _add_properties(
            self._conf / "core-site.xml", {"fs.defaultFS": uri, "hadoop.tmp.dir": self.directory / "hadoop"}
        )
        common = {
            "dfs.replication": len(DATA_NODES),
            "dfs.namenode.name.dir": f"file://{self.directory}/name",
            "dfs.namenode.rpc-address": f"127.0.0.1:{name}",
            "dfs.namenode.http-address": f"127.0.0.1:{http}",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.hostname": "127.0.0.1",
            # A data node counts as dead after twice the first plus ten times the second.
            "dfs.namenode.heartbeat.recheck-interval": 1_000,
            "dfs.heartbeat.interval": 1,
            # With three nodes there is no replacement for a dead one, so writing continues on the other two.
            "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
        }
        _add_properties(self._conf / "hdfs-site.xml", common)
        # The jars lack the web pages, but folders for them must be on the class path.
        (self._conf / "webapps/hdfs").mkdir(parents=True)
        for each in DATA_NODES:
            conf = self.directory / each / "conf"
            (conf / "webapps/datanode").mkdir(parents=True)
            for file in ("core-site.xml", "log4j.properties"):
                (conf / file).write_bytes((self._conf / file).read_bytes())
            data, web, ipc = free_ports(3)
            own = {
                "dfs.datanode.data.dir": f"file://{self.directory}/{each}/data",
                "dfs.datanode.address": f"127.0.0.1:{data}",
                "dfs.datanode.http.address": f"127.0.0.1:{web}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
            }
            _add_properties(conf / "hdfs-site.xml", common | own)
        return {"hbase.rootdir": f"{uri}/hbase"}

    def __enter__(self) -> HBaseServers:
        try:
            self._keeper.start()
            if self.hdfs:
                self._format()
            super().__enter__()
        except BaseException:
            self.end()
            raise
        return self

    def _format(self) -> None:
        """Format an empty name node."""
        command = [SMALL, "hdfs", self.directory, f"{HDFS}.namenode.NameNode", "-format", "-nonInteractive"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=READY_S)
        assert done.returncode == 0, done.stderr[-2000:]

    def start(self, name: str, *options: str, configured: Path | None = None) -> None:
        """Start one process. HBase's processes wait for the processes that they need."""
        jvm = f"{QUICK_JVM} {self._heap(name)}"
        if name == "name":
            self.spawn(name, jvm, "hdfs", self.directory, f"{HDFS}.namenode.NameNode")
        elif name in DATA_NODES:
            self.spawn(name, jvm, "hdfs", self.directory / name, f"{HDFS}.datanode.DataNode")
        elif name == "master":
            self._masters += 1
            self.spawn(name, jvm, "run", self.directory, "org.apache.hadoop.hbase.master.HMaster", "start")
        elif name in REGION_SERVERS:
            port = f"hbase.regionserver.port={self._ports[name]}"
            region_server = "org.apache.hadoop.hbase.regionserver.HRegionServer"
            self.spawn(name, jvm, "run", self.directory, region_server, "-D", port, "start")
        else:
            super().start(name, *options, configured=configured)

    def _heap(self, name: str) -> str:
        if name in REGION_SERVERS:
            return REGION_HEAP
        return DATA_HEAP if name in DATA_NODES else HEAPS[name]

    async def serving(self, table: str) -> str:
        """Return the region server of a table's first region."""
        pool = Pool([self.address], size=1, timeout_s=READY_S)
        try:
            regions = await pool.call("getTableRegions", table.encode())
        finally:
            await pool.aclose()
        return next(name for name, port in self._ports.items() if port == regions[0].port)

    def expire(self, name: str) -> None:
        """End a region server's session, as HBase's scripts do after a death: its regions move to the other server."""
        with self._asking_keeper() as keeper:
            for node in keeper.get_children("/hbase/rs"):
                if node.split(",")[1] == str(self._ports[name]):
                    with suppress(NoNodeError):
                        keeper.delete(f"/hbase/rs/{node}")

    def wait_well(self) -> None:
        """Wait until the latest master is active and has every region server."""
        eventually("the master leads", lambda: self._led() == self._masters, self.patience_s)
        with self._asking_keeper() as keeper:
            wanted = {str(port) for port in self._ports.values()}
            eventually(
                "all region servers have registered",
                lambda: wanted == {node.split(",")[1] for node in keeper.get_children("/hbase/rs")},
                self.patience_s,
            )

    def _led(self) -> int:
        return (self.directory / "master.log").read_bytes().count(b"Master has completed initialization")

    @contextmanager
    def _asking_keeper(self) -> Iterator[KazooClient]:
        keeper = KazooClient(self._keeper.address, timeout=READY_S, connection_retry={"max_tries": -1})
        keeper.start(READY_S)
        try:
            yield keeper
        finally:
            keeper.stop()
            keeper.close()

    def end(self) -> None:
        """Kill all processes."""
        super().end()
        self._keeper.kill()


def _add_properties(file: Path, properties: dict[str, object]) -> None:
    """Append properties to the file's own; of several with one name, the last one counts."""
    text = file.read_text() if file.exists() else '<?xml version="1.0"?>\n<configuration>\n</configuration>\n'
    added = "".join(
        f"  <property><name>{name}</name><value>{value}</value></property>\n" for name, value in properties.items()
    )
    file.write_text(text.replace("</configuration>", f"{added}</configuration>"))
