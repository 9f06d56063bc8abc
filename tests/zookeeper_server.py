"""A real ZooKeeper as a process: started on a free port, frozen, killed, and restarted on the same data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests import hbase_classes
from tests.freezing import freeze
from tests.hbase_server import QUICK_JVM, SMALL, free_ports
from tests.patience import PATIENCE_S

#: ZooKeeper's minimum session time-out is two ticks.
TICK_MS = 250


class ZooKeeperServer:
    """A standalone server, while a ``with`` block runs."""

    def __init__(self, directory: Path) -> None:
        subprocess.run([SMALL, "fetch"], check=True, stdout=subprocess.DEVNULL)
        self.directory = directory
        (self.port,) = free_ports(1)
        directory.mkdir(parents=True, exist_ok=True)
        settings = {
            "tickTime": TICK_MS,
            "dataDir": directory / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "maxSessionTimeout": 1_000_000,
            "4lw.commands.whitelist": "ruok",
        }
        self.file = directory / "zoo.cfg"
        self.file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (directory / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,err\nlog4j.appender.err=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.err.target=System.err\nlog4j.appender.err.layout=org.apache.log4j.SimpleLayout\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> ZooKeeperServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        path = [*map(str, hbase_classes.jars()), str(self.directory)]
        # The class archive made for HBase, which includes ZooKeeper's classes. Without an archive the JVM starts more
        # slowly.
        classes = f"-XX:SharedArchiveFile={hbase_classes.folder() / 'hbase.jsa'}"
        command = [
            "java",
            *QUICK_JVM.split(),
            classes,
            "-Xmx64m",
            "-Dzookeeper.sasl.client=false",
            "-cp",
            ":".join(path),
        ]
        with (self.directory / "zookeeper.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "org.apache.zookeeper.server.ZooKeeperServerMain", str(self.file)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ,
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises TimeoutError with its last output."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._says() != b"imok":
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                said = (self.directory / "zookeeper.log").read_text()[-2000:]
                self.kill()
                raise TimeoutError(f"ZooKeeper is not ready:\n{said}")
            time.sleep(0.02)

    def _says(self) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"ruok")
                return connection.recv(16)
        except OSError:
            return b""

    def kill(self) -> None:
        """Send SIGKILL, which also ends a frozen server, and wait for the process to exit."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Send SIGSTOP."""
        assert self.process is not None
        freeze(self.process.pid)

    def thaw(self) -> None:
        """Send SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
