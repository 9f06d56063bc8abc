"""What the loads need to know of a peer: how it is had, started and spoken to."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.daemon import TICKS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class Lacking(Exception):
    """This peer cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, byte for byte, and how many replies it brings."""

    request: bytes
    replies: int = 1
    position_at: int | None = None
    """Where a page's request says from where on; 0 when the server remembers it, None when it does not read on."""
    prepared: bytes = b""
    """What a connection says, after the peer's hello, before it sends such requests; it brings one reply."""


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that runs."""

    port: int
    pid: int
    home: Path

    def cpu_s(self) -> float:
        """Processor time used so far by all its processes, those that have ended included."""
        return sum(_cpu_s(pid) for pid in self.family())

    def family(self) -> list[int]:
        """Its process and all that descend from it."""
        found = [self.pid]
        for parent in found:  # which grows meanwhile
            try:
                for task in Path(f"/proc/{parent}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
            except FileNotFoundError:
                continue
        return found


class Peer(ABC):
    """One of those that are measured.

    The load generator sends the bytes that a peer gives it, each a request that is answered once all of its messages
    are synced, and knows of the peer's protocol only where an answer ends.
    """

    name: str
    protocol: str
    hello: bytes = b""
    """What a connection says first."""
    hello_replies = 1
    synced: str
    """What makes an acknowledged message a synced one."""

    @abstractmethod
    def fetch(self) -> str:
        """Make sure that it is there; its version. Raises Lacking."""

    @abstractmethod
    def run(self, home: Path) -> AbstractContextManager[Running]:
        """The peer at work over an empty directory, on a free port of the loopback device."""

    @abstractmethod
    def create(self, running: Running, topics: Sequence[str]) -> None:
        """Create topics; they can be written to when this returns."""

    @abstractmethod
    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        """One request with these messages, answered when all of them are synced."""

    def page(self, running: Running, topic: str, limit: int) -> Asked | None:
        """A request for the topic's first messages; None: the peer reads no page twice."""
        return self.walk(running, topic, limit)

    @abstractmethod
    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        """The first request of a reader that reads on page by page from the topic's start."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(
    command: Sequence[str],
    port: int,
    home: Path,
    *,
    ready: bytes = b"",
    user: str | None = None,
    cwd: Path | None = None,
) -> Iterator[Running]:
    """A server with its output in ``home``, once it listens and has said ``ready``; stopped at the end."""
    log = home / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, user=user, cwd=cwd or home
        )
    try:
        _wait_until_it_listens(started, port, log, ready)
        yield Running(port, started.pid, home)
    finally:
        started.terminate()
        try:
            started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _wait_until_it_listens(started: subprocess.Popen[bytes], port: int, log: Path, ready: bytes) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if started.poll() is not None:
            break
        if ready in log.read_bytes():
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                pass
            else:
                return
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise Lacking(f"it did not start: {said.strip()}")


def exchange(port: int, data: bytes, until: bytes, times: int = 1) -> bytes:
    """What a server answers to ``data``, up to the time that it has said ``until`` so often."""
    with socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT_S) as connection:
        connection.sendall(data)
        answer = b""
        while answer.count(until) < times:
            piece = connection.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"the server closed the connection after {answer[-300:]!r}")
            answer += piece
        return answer


def exchange_sized(port: int, data: bytes) -> bytes:
    """One answer that begins with its size in four bytes, these included."""
    with socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT_S) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as answers:
            size = answers.read(4)
            return size + answers.read(int.from_bytes(size, "big"))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has ended meanwhile
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def is_root() -> bool:
    """Whether Debian's packages can be installed, and PostgreSQL needs another user."""
    return os.geteuid() == 0
