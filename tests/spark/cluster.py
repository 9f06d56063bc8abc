"""A standalone Spark cluster from the installed package: a master and two workers with different host names."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.daemon.harness import clean_environ, eventually, free_port
from tests.spark_session import QUICK_JVM, spark_environ

if TYPE_CHECKING:
    from pathlib import Path

#: Speculation never starts a copy on the host of the first attempt, so there must be two.
HOSTS = ("127.0.0.1", "127.0.0.2")
_START_S = 240.0


class Cluster:
    """Runs during a ``with`` block: two workers with one core each, each running one executor of 512 MiB.

    ``url`` is for ``master()``. Drivers should set ``spark.executor.memory`` to 512m.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[str] = []

    @property
    def url(self) -> str:
        return f"spark://{HOSTS[0]}:{self.port}"

    def __enter__(self) -> Cluster:
        try:
            self._spawn("master.Master", "--host", HOSTS[0], "--port", str(self.port), "--webui-port", "0")
            eventually("the master leads", lambda: self._said("elected leader"), _START_S)
            for host in HOSTS:
                work = str(self.folder / f"work-{host}")
                options = ("--cores", "1", "--memory", "512m", "--webui-port", "0", "--work-dir", work)
                self._spawn("worker.Worker", "--host", host, *options, self.url)
            eventually("both workers are known", lambda: self._said("Registering worker") == len(HOSTS), _START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _said(self, words: str) -> int:
        assert all(process.poll() is None for process in self._processes), "\n".join(self._lines)
        return sum(words in line for line in self._lines)

    def _spawn(self, name: str, *arguments: str) -> None:
        home = os.environ["SPARK_HOME"]
        environ = {
            **clean_environ(),
            **spark_environ(),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
        }
        environ.pop("SPARK_LOCAL_IP")  # it would give both workers the same name
        process = subprocess.Popen(
            [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments],
            cwd=self.folder,
            env={**environ, "SPARK_HOME": home},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for raw in process.stderr:
                self._lines.append(raw.decode(errors="replace").rstrip())
