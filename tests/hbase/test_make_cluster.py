"""``make cluster``: one command starts three instances and prints their addresses; one Ctrl-C ends all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from plainsong import Client
from tests.daemon.harness import clean_environ, eventually
from tests.hbase_classes import make_classes
from tests.hbase_server import QUICK_JVM, ROOT, SMALL, free_ports, why_not

PATIENCE_S = 600.0

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Cluster:
    """A developer's command in a terminal, in its own process group as under a shell."""

    def __init__(self, data: Path, ports: list[int]) -> None:
        self.data = data
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.environ = {
            **clean_environ(),
            "DATA": str(data),
            "PORTS": " ".join(map(str, ports)),
            "HBASE_JVM": QUICK_JVM,
            "HBASE_CLASSES": str(make_classes()),
        }
        self.said = data.with_suffix(".said")

    def __enter__(self) -> Cluster:
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [ROOT / "etc/cluster/up"], env=self.environ, stdout=out, stderr=out, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.said.read_text()

    def wait_ready(self) -> None:
        eventually("it is ready", lambda: "ready: " in self.text() or self.process.poll() is not None, PATIENCE_S)
        assert self.process.poll() is None, self.text()

    def interrupt(self) -> int:
        """Send Ctrl-C, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(PATIENCE_S)

    def left(self) -> list[int]:
        """Return the live processes whose environment contains the cluster's directory."""
        mark = f"CLUSTER_DATA={self.data}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in environ_of(pid)]

    def pid_of(self, word: str) -> int:
        """Return the pid of the daemon with this word in its command line."""
        (pid,) = [pid for pid in self.left() if word in command_of(pid) and "plainsong serve" in command_of(pid)]
        return pid


def environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_three_instances_are_one_service_and_ctrl_c_leaves_nothing_but_the_data(tmp_path):
    data, ports = tmp_path / "cluster", free_ports(3)
    with Cluster(data, ports) as cluster:
        cluster.wait_ready()
        assert all(url in cluster.text() for url in cluster.urls)
        one, two, three = (Client(url) for url in cluster.urls)
        one.create_topic("greetings")
        two.publish("greetings", [b"hello"])
        assert [message.value for message in three.poll("greetings")] == [b"hello"]
        for client in (one, two, three):
            client.close()
        second = subprocess.run(
            [ROOT / "etc/cluster/up"],
            env=cluster.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert (second.returncode, "is running already" in second.stderr) == (1, True)
        assert cluster.interrupt() == 0, cluster.text()
        assert cluster.left() == []
    with Cluster(data, ports) as again:
        again.wait_ready()
        with Client(again.urls[1]) as client:
            assert [message.value for message in client.poll("greetings")] == [b"hello"]
        killed = again.pid_of("cluster.instance=two")
        os.kill(killed, signal.SIGKILL)
        ended = f"error: two ended with 137; its log is {data}/log/two.log"
        eventually("its end is reported", lambda: ended in again.text(), PATIENCE_S)
        with Client([again.urls[0], again.urls[2]]) as client:  # the others have taken over its topics
            assert [message.value for message in client.poll("greetings")] == [b"hello"]
        eventually("it is started again", lambda: "starting two again" in again.text(), PATIENCE_S)
        eventually("it serves", lambda: answers(again.urls[1]), PATIENCE_S)
        assert again.pid_of("cluster.instance=two") != killed
        (hbase,) = [pid for pid in again.left() if "java" in command_of(pid) and "master.HMaster" in command_of(pid)]
        os.kill(hbase, signal.SIGKILL)
        assert again.process.wait(PATIENCE_S) == 1
        assert again.left() == []


def test_a_small_hbase_may_be_given_a_relative_path(tmp_path):
    subprocess.run([SMALL, "configure", "there", "1", "2", "3", "4"], cwd=tmp_path, check=True)
    site = (tmp_path / "there/conf/hbase-site.xml").read_text()
    assert f"<value>file://{tmp_path}/there/data</value>" in site
