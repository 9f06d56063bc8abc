"""A small real HBase as processes: started on free ports, used, killed, and stopped with its test."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import trio

from storage.base import StoreError, StoreUnusable
from storage.hbase.pool import Pool
from storage.hbase.tables import Tables
from tests.ports import free_ports as free_ports

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "etc/hbase/small"
CACHE = ROOT / ".cache/hbase"
JARS = CACHE / "2.6.1"
#: A start took half a minute on a busy machine.
PATIENCE_S = 300.0
#: JVM options for a fast start. A deployment needs more optimization and verification than a test.
QUICK_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -XX:ArchiveRelocationMode=0 "
    "-XX:-UsePerfData -Xlog:disable"
)


def why_not() -> str | None:
    """Return the reason why HBase cannot run on this machine; None if it can."""
    for program, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            return f"NOT TESTED: HBase, since there is no {program} (Debian: apt-get install {package})"
    return None


class HBase:
    """Master, region server, ZooKeeper and Thrift gateway on local files, while a ``with`` block runs."""

    names: tuple[str, ...] = ("hbase", "thrift")
    """The processes, in start order."""
    master = "hbase"
    """The process whose log shows that HBase is ready."""
    patience_s = PATIENCE_S
    """Time limit for becoming ready."""

    def __init__(self, directory: Path, *, jvm: str = QUICK_JVM) -> None:
        """``jvm``: options of both processes; empty for measurements."""
        self.directory = directory
        self._jvm = jvm
        self.zookeeper, master, region, self.thrift = free_ports(4)
        subprocess.run([SMALL, "fetch"], check=True, stdout=subprocess.DEVNULL)
        ports = map(str, (self.zookeeper, master, region, self.thrift))
        subprocess.run([SMALL, "configure", directory, *ports], check=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environ: dict[str, str] = {}
        """Variables for its processes, in addition to this process's environment."""
        if jvm:
            from tests.hbase_classes import make_classes  # starts its own HBase the first time

            self.environ["HBASE_CLASSES"] = str(make_classes())

    @property
    def address(self) -> tuple[str, int]:
        """The gateway's address."""
        return "127.0.0.1", self.thrift

    def __enter__(self) -> HBase:
        try:
            for name in self.names:
                self.start(name)
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, *options: str, configured: Path | None = None) -> None:
        """Start ``hbase`` or ``thrift``, or another gateway, which has its own name and options."""
        verb = "hbase" if name == "hbase" else "thrift"
        self.spawn(name, self._jvm, verb, configured or self.directory, *options)

    def spawn(self, name: str, jvm: str, *arguments: str | Path) -> None:
        """Start ``etc/hbase/small`` with these arguments as the process with this name."""
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [SMALL, *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"HBASE_JVM": jvm} | self.environ,
            )

    def run_script(self, script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script in HBase's shell, and return the result."""
        # Compiling the script to classes would take longer than running these few lines.
        jvm = f"{QUICK_JVM} -Djruby.compile.mode=OFF"
        return subprocess.run(
            [SMALL, "script", self.directory, script],
            check=False,
            env=os.environ | {"HBASE_JVM": jvm} | environ,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def kill(self, name: str) -> None:
        """Send SIGKILL, and wait for the end."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def lacking(self) -> list[str]:
        """Return the processes that are not running, for whatever reason."""
        return [name for name in self.names if name not in self.processes or self.processes[name].poll() is not None]

    def wait_ready(self) -> None:
        """Wait until a table can be created. Raises TimeoutError with the processes' last output."""
        deadline_s = time.monotonic() + self.patience_s
        log = self.directory / f"{self.master}.log"
        while b"Master has completed initialization" not in log.read_bytes():
            self._look(deadline_s)
            time.sleep(0.1)
        trio.run(self._make_a_table, deadline_s)

    async def _make_a_table(self, deadline_s: float) -> None:
        while True:
            pool = Pool([self.address], size=1, timeout_s=self.patience_s)
            try:
                await Tables("ready_").prepare(pool, create=True)
            except (StoreError, StoreUnusable):
                self._look(deadline_s)
                await trio.sleep(0.5)
            else:
                return
            finally:
                await pool.aclose()

    def _look(self, deadline_s: float) -> None:
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline_s:
            said = "\n".join((self.directory / f"{name}.log").read_text()[-2000:] for name in self.names)
            raise TimeoutError(f"HBase is not ready{f', {ended} ended' if ended else ''}:\n{said}")

    def end(self) -> None:
        """Kill all processes."""
        for name in list(self.processes):
            self.kill(name)
