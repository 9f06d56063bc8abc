"""Several real daemons on one real HBase and its ZooKeeper; tests kill, freeze, cut off and restart them.

Each instance has its own proxies to HBase's Thrift gateway and to ZooKeeper, so that a test can cut off one instance
while the others continue. No process outlives its test.
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
from tests.patience import PATIENCE_S

#: Short time limits, so that tests do not wait. Each start sends every gateway a frame with two cells of the maximum
#: size: with the default, dozens of starts would each send 18 MiB through a proxy.
SETTINGS = (
    *("storage.min_free_bytes=0", "storage.hbase.timeout_s=3", "retention.interval_s=1"),
    "storage.hbase.max_cell_bytes=1 MiB",
)
#: ZooKeeper's minimum is two ticks.
SESSION_TIMEOUT_S = 4
#: Time limit for restarting a daemon, including failed attempts while HBase is slow.
AGAIN_S = 3 * PATIENCE_S

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def why_no_wrong_clocks() -> str | None:
    """Return the reason why instances cannot have wrong clocks on this machine; None if they can."""
    return None if LIBRARIES else "NOT TESTED: wrong clocks, since libfaketime is not installed"


#: libfaketime makes ``time.sleep`` fail, which ends threads of other libraries.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"


def shifted_clock(shift: Path) -> dict[str, str]:
    """Return the environment of a process whose wall clock is ahead by the file's content, which may change."""
    site = shift.with_suffix(".site")
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLEEP, encoding="utf-8")
    return {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(shift),
        "FAKETIME_CACHE_DURATION": "1",
        # The monotonic clock stays real: it times waits, not messages.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        # libfaketime's workaround for old C libraries repeatedly wakes threads that wait for the interpreter's lock.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        # File times stay real; otherwise modules would seem changed and be compiled again.
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
        """In front of its advertised address, for traffic from other instances."""
        self.up = trio.Event()
        self.state = "down"
        """``up``, ``down`` or ``frozen``."""

    @property
    def address(self) -> tuple[str, int]:
        """The address that clients connect to."""
        return self.daemon.address

    @property
    def proxies(self) -> list[Proxy]:
        return [each for each in (self.thrift, self.zookeeper, self.links) if each is not None]

    async def start(self) -> None:
        """Start the daemon, and wait until it serves. Raises DaemonEnded."""
        await trio.to_thread.run_sync(self.daemon.start)
        self.state = "up"

    async def start_again(self) -> None:
        """Start the daemon until it stays up, as a supervisor does: it exits if HBase does not answer in time."""
        with trio.fail_after(AGAIN_S):
            while self.state != "up":
                try:
                    await self.start()
                except DaemonEnded as error:
                    print(error)  # for the diagnosis of a run that does not finish

    async def kill(self) -> None:
        """Send SIGKILL."""
        self.state = "down"
        await trio.to_thread.run_sync(self.daemon.kill)

    async def stop(self) -> int:
        """Send SIGTERM, as in an upgrade; return its exit code."""
        self.state = "down"
        return await trio.to_thread.run_sync(self.daemon.stop)

    async def kill_owner(self) -> None:
        """Kill the process that owns the topics; its front ends notice and exit."""
        self.state = "down"
        self.daemon.signal(signal.SIGKILL)
        await trio.to_thread.run_sync(self.daemon.wait)

    def front_ends(self) -> list[int]:
        """Return the pids of the front ends; empty without front ends."""
        return self.daemon.children()

    def freeze(self) -> None:
        """Send SIGSTOP: its connections stay open and silent."""
        self.state = "frozen"
        freeze(self.daemon.pid)

    def thaw(self) -> None:
        """Send SIGCONT."""
        self.state = "up"
        self.daemon.signal(signal.SIGCONT)

    def set_clock(self, ahead_s: int) -> None:
        """Make the daemon's wall clock jump; takes effect within a second."""
        assert self._shift is not None
        write_shift(self._shift, ahead_s)

    def heal(self) -> None:
        """Undo every fault except the daemon's death."""
        if self.state == "frozen":
            self.thaw()
        for proxy in self.proxies:
            proxy.heal()
        if self._shift is not None:
            self.set_clock(0)


def write_shift(shift: Path, ahead_s: int) -> None:
    """Write the file atomically, since it may be read at any moment."""
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
        """The instances that are not down, frozen ones included."""
        return [each for each in self.instances if each.state != "down"]

    async def kill_hbase(self, name: str) -> None:
        """Kill one of HBase's processes: ``hbase`` (master, region server and ZooKeeper), ``thrift``, or another."""
        await trio.to_thread.run_sync(self.hbase.kill, name)

    async def start_hbase(self, name: str) -> None:
        """Start the process again, without waiting until it serves."""
        await trio.to_thread.run_sync(self.hbase.start, name)

    async def heal(self) -> None:
        """Start everything that is down, and undo every fault."""
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
    """Run ``count`` instances on empty tables while the block runs.

    Args:
      sets: settings of all instances, as ``section.key=value``.
      alone: True to run without ZooKeeper: each instance owns everything, so only one may run at a time.
      clocks: True if the test may set the instances' clocks.
      links: True if traffic between instances also goes through proxies.
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
