"""Several real daemons over one real HBase and its ZooKeeper: killed, frozen, cut off, restarted, and never left behind.

Each instance reaches HBase's Thrift gateway through a proxy of its own, and ZooKeeper through another, so that one of
them can be cut off while the others go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio

from tests.cluster.proxy import Proxy, open_proxy
from tests.daemon.harness import Daemon, DaemonEnded, free_port
from tests.freezing import freeze
from tests.hbase_server import HBase

#: Nothing waits for long, so that what has to be over soon is. A start sends each gateway a frame of two cells, and
#: with the default dozens of starts would send 18 MiB each through a proxy.
SETTINGS = (
    *("storage.min_free_bytes=0", "storage.hbase.timeout_s=3", "retention.interval_s=1"),
    "storage.hbase.max_cell_bytes=1 MiB",
)
#: ZooKeeper takes no less than two of its ticks.
SESSION_TIMEOUT_S = 4
#: How long it may take until a daemon stays, HBase being slow.
AGAIN_S = 90.0

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def why_no_wrong_clocks() -> str | None:
    """Why no instance can have a wrong clock here; None: it can."""
    return None if LIBRARIES else "NOT TESTED: wrong clocks, since libfaketime is not installed"


#: The library makes Python's own sleep fail, by which threads of other libraries end.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"


def shifted_clock(shift: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead by what the file says; the file may be written anew."""
    site = shift.with_suffix(".site")
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLEEP, encoding="utf-8")
    return {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(shift),
        "FAKETIME_CACHE_DURATION": "1",
        # The monotonic clock stays as it is: it times waits, not messages.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        # Its remedy for old C libraries has threads that wait for the interpreter's lock wake again and again.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        # Nor are the times of files what this is about: modules that seem to have changed would be compiled anew.
        "NO_FAKE_STAT": "1",
    }


class Instance:
    """One daemon, with its proxies to HBase and, in a cluster, to ZooKeeper."""

    def __init__(
        self,
        name: str,
        daemon: Daemon,
        thrift: Proxy,
        zookeeper: Proxy | None,
        shift: Path | None,
        links: Proxy | None = None,
    ) -> None:
        self.name, self.daemon, self.thrift, self.zookeeper, self._shift = name, daemon, thrift, zookeeper, shift
        self.links = links
        """Before its advertised address: what other instances send it goes through here."""
        self.up = trio.Event()
        self.state = "down"
        """``up``, ``down`` or ``frozen``."""

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect to."""
        return self.daemon.address

    @property
    def proxies(self) -> list[Proxy]:
        return [each for each in (self.thrift, self.zookeeper, self.links) if each is not None]

    async def start(self) -> None:
        """Until it says that it serves. Raises DaemonEnded."""
        await trio.to_thread.run_sync(self.daemon.start)
        self.state = "up"

    async def start_again(self) -> None:
        """The same, as whatever keeps daemons running does: one that HBase did not answer in time has ended, and is started anew."""
        with trio.fail_after(AGAIN_S):
            while self.state != "up":
                try:
                    await self.start()
                except DaemonEnded as error:
                    print(error)  # for whoever reads why a run did not come to its end

    async def kill(self) -> None:
        """SIGKILL."""
        self.state = "down"
        await trio.to_thread.run_sync(self.daemon.kill)

    async def stop(self) -> int:
        """SIGTERM, as in an upgrade; its exit code."""
        self.state = "down"
        return await trio.to_thread.run_sync(self.daemon.stop)

    async def kill_owner(self) -> None:
        """SIGKILL to the process that owns the topics; its front ends see that, and go by themselves."""
        self.state = "down"
        self.daemon.signal(signal.SIGKILL)
        await trio.to_thread.run_sync(self.daemon.wait)

    def front_ends(self) -> list[int]:
        """The processes that clients are connected with, where it has some."""
        return self.daemon.children()

    def freeze(self) -> None:
        """SIGSTOP: its connections stand, and nothing comes."""
        self.state = "frozen"
        freeze(self.daemon.pid)

    def thaw(self) -> None:
        """SIGCONT: it goes on as if nothing had been."""
        self.state = "up"
        self.daemon.signal(signal.SIGCONT)

    def set_clock(self, ahead_s: int) -> None:
        """Its wall clock jumps, within a second."""
        assert self._shift is not None
        write_shift(self._shift, ahead_s)

    def heal(self) -> None:
        """Whatever was done to it, but for its death, is over."""
        if self.state == "frozen":
            self.thaw()
        for proxy in self.proxies:
            proxy.heal()
        if self._shift is not None:
            self.set_clock(0)


def write_shift(shift: Path, ahead_s: int) -> None:
    """Whole at once: the file may be read at any moment."""
    new = shift.with_suffix(".new")
    new.write_text(f"{ahead_s:+d}s\n")
    new.rename(shift)


class Cluster:
    """The instances, and the HBase they share."""

    def __init__(self, hbase: HBase, instances: list[Instance], table_prefix: str) -> None:
        self.hbase, self.instances, self.table_prefix = hbase, instances, table_prefix

    def __getitem__(self, at: int) -> Instance:
        return self.instances[at]

    @property
    def up(self) -> list[Instance]:
        """Those that run, frozen or not."""
        return [each for each in self.instances if each.state != "down"]

    async def kill_hbase(self, name: str) -> None:
        """SIGKILL to one of its processes: ``hbase`` (master, region server and ZooKeeper), ``thrift``, or another."""
        await trio.to_thread.run_sync(self.hbase.kill, name)

    async def start_hbase(self, name: str) -> None:
        """Start it again, and wait for nothing."""
        await trio.to_thread.run_sync(self.hbase.start, name)

    async def heal(self) -> None:
        """Everything runs, and reaches everything."""
        for name in self.hbase.lacking():
            await self.start_hbase(name)
        for each in self.instances:
            each.heal()
        for each in self.instances:
            if each.state == "down":
                await each.start_again()


@asynccontextmanager
async def open_cluster(
    hbase: HBase,
    directory: Path,
    count: int,
    *sets: str,
    alone: bool = False,
    clocks: bool = False,
    links: bool = False,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """So many instances on empty tables, serving; all are gone when the block is left.

    Args:
      sets: settings of all of them, as ``section.key=value``.
      alone: without ZooKeeper: each owns everything, which only one at a time may.
      clocks: their clocks can be set.
      links: what they send each other goes through proxies, too.
    """
    prefix = "t" + directory.name.replace("-", "_")[-40:] + "_"
    async with AsyncExitStack() as stack:
        instances = []
        for number in range(count):
            name = "abcdefgh"[number]
            thrift = await stack.enter_async_context(open_proxy(hbase.address, framed=True))
            settings = [*SETTINGS, "storage.kind=hbase", f"storage.hbase.thrift={thrift.text}"]
            settings += [f"storage.hbase.table_prefix={prefix}"]
            port, zookeeper, before = free_port(), None, None
            bind = advertised = f"127.0.0.1:{port}"
            if links:
                before = await stack.enter_async_context(open_proxy(("127.0.0.1", port)))
                advertised = before.text
            if not alone:
                zookeeper = await stack.enter_async_context(open_proxy(("127.0.0.1", hbase.zookeeper)))
                settings += [f"cluster.zookeeper={zookeeper.text}/{prefix}", f"cluster.instance={name}"]
                settings += [f"cluster.session_timeout_s={SESSION_TIMEOUT_S}", f"cluster.advertise={advertised}"]
            shift = directory / f"{name}.shift" if clocks else None
            said = dict(environ or {})
            if shift is not None:
                write_shift(shift, 0)
                said |= shifted_clock(shift)
            daemon = Daemon(directory / name, *settings, *sets, bind=bind, environ=said)
            stack.callback(daemon.end)
            instances.append(Instance(name, daemon, thrift, zookeeper, shift, before))
        for each in instances:
            await each.start_again()
        yield Cluster(hbase, instances, prefix)
