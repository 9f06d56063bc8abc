"""Class archives for HBase's JVMs; a JVM maps an archive instead of reading eighty jars.

With them, starting HBase and its gateway takes 4.3 s of processor time instead of 7.5 s.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import zipfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import trio

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from storage.hbase.settings import HBaseConfig
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.hbase_server import CACHE, JARS, PATIENCE_S, HBase

OPTIONS = HBaseConfig(table_prefix="archived_", timeout_s=PATIENCE_S)


def jars() -> list[Path]:
    """Return HBase's jars in the order of ``etc/hbase/small``."""
    return sorted(JARS.glob("*.jar"))


def folder() -> Path:
    """Return the folder of the archives, which fit only one Java and one class path."""
    java = os.path.realpath(shutil.which("java") or "java")
    parts = [str(CACHE), java, f"{os.stat(java).st_mtime_ns}"]
    parts += [f"{path.name} {path.stat().st_mtime_ns}" for path in jars()]
    return CACHE / f"classes-{sha256(os.linesep.join(parts).encode()).hexdigest()[:16]}"


@cache
def make_classes() -> Path:
    """Return the folder with ``hbase.jsa`` and ``thrift.jsa``; create it if necessary, which takes half a minute."""
    with (CACHE / "classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = folder()
        if not wanted.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                made = Path(scratch) / wanted.name
                made.mkdir()
                with Recorded(Path(scratch) / "hbase", made) as server:
                    trio.run(use, server)
                for outdated in CACHE.glob("classes-*"):
                    shutil.rmtree(outdated)
                made.replace(wanted)
    return wanted


class Recorded(HBase):
    """An HBase whose JVMs write their class archives when they end."""

    def __init__(self, directory: Path, archives: Path) -> None:
        super().__init__(directory, jvm="")
        self._archives = archives
        # With an archive, no directory may be on the class path.
        with zipfile.ZipFile(directory / "conf.jar", "w") as jar:
            for file in (directory / "conf").iterdir():
                jar.write(file, file.name)
        self.environ = {"HBASE_CONF": str(directory / "conf.jar")}

    def start(self, name: str, *options: str, configured: Path | None = None) -> None:
        jvm = f"-XX:TieredStopAtLevel=1 -Xlog:disable -XX:ArchiveClassesAtExit={self._archives / name}.jsa"
        self.spawn(name, jvm, name, configured or self.directory, *options)

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, to the gateway first."""
        for name in reversed(self.names):
            self.processes[name].terminate()
            try:
                self.processes[name].wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.end()
                raise


async def use(server: HBase) -> None:
    """Exercise a little of everything, so that its classes are loaded."""
    name = TopicName("ns", "topic")
    async with await HBaseStore.open([server.address], OPTIONS) as store:
        await store.write([put_one(Table.METADATA, metadata_key(name), b"value")], claim=await store.claim(name))
        assert await store.get(Table.METADATA, metadata_key(name)) == b"value"
        for table in Table:
            for call in ("disableTable", "deleteTable"):
                await store._pool.call(call, Tables(OPTIONS.table_prefix)[table])
