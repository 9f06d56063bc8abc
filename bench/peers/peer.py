"""The loads' interface to a peer: fetch it, start it, build its requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.daemon import TICKS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class Lacking(Exception):
    """The peer is not available here; the message says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as bytes, and its number of replies."""

    request: bytes
    replies: int = 1
    position_at: int | None = None
    """Offset of the start position in a page's request; 0 if the server keeps it, None if reading does not advance."""
    prepared: bytes = b""
    """Bytes that a connection sends after the hello and before its first such request; they bring one reply."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running peer."""

    port: int
    pid: int
    home: Path
    tephra_port: int = 0
    """Port of its transaction service for Tephra's protocol; 0 if it has none."""

    def cpu_s(self) -> float:
        """Return the processor time used so far by all its processes, including ended and reaped ones."""
        return sum(_cpu_s(pid) for pid in self.family())

    def family(self) -> list[int]:
        """Return its process and all descendants."""
        found = [self.pid]
        for parent in found:  # the loop appends to it
            try:
                for task in Path(f"/proc/{parent}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
            except FileNotFoundError:
                continue
        return found


class Peer(ABC):
    """A broker or store under measurement.

    The load generator sends a peer's requests as bytes. A peer must answer a request only after all its messages are
    synced. The generator parses only as much of the peer's protocol as it needs to find the end of a response.
    """

    name: str
    protocol: str
    hello: bytes = b""
    """Bytes that a connection sends first."""
    hello_replies = 1
    synced: str
    """The configuration that makes the peer sync before it acknowledges."""
    transacts = False
    """True if ``transact`` runs whole transactions."""

    @abstractmethod
    def fetch(self) -> str:
        """Install the peer if necessary; return its version. Raises Lacking."""

    @abstractmethod
    def run(self, home: Path) -> AbstractContextManager[Running]:
        """Run the peer on an empty directory, on a free port of the loopback interface."""

    @abstractmethod
    def create(self, running: Running, topics: Sequence[str]) -> None:
        """Create topics; they accept messages when this returns."""

    @abstractmethod
    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        """Return one request with these messages, answered when all of them are synced."""

    def page(self, running: Running, topic: str, limit: int) -> Asked | None:
        """Return a request for the topic's first messages; None if the peer cannot read a page twice."""
        return self.walk(running, topic, limit)

    @abstractmethod
    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        """Return the first request of a reader that reads page by page from the topic's start."""

    def transact(
        self, running: Running, topics: Sequence[str], connections: int, seconds: float, size: int
    ) -> dict[str, Any] | None:
        """Run whole transactions with a message to each topic; return their result, or None if it has none.

        The peer's own client runs them for ``seconds`` twice. Only the second half counts, because JVMs compile.

        Args:
          size: bytes of each message.

        Raises:
          Lacking: the client is not available.
          RuntimeError: a transaction failed.
        """
        return None


def clients(command: Sequence[str], seconds: float, **options: object) -> dict[str, Any]:
    """Run ``peer.Transactor``, a program in Java, for ``seconds`` after as long a warm-up; return its result."""
    words = [*command, "peer.Transactor", "--seconds", str(seconds), "--warm-up", str(seconds)]
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result: dict[str, Any] = json.loads(output_of(words, seconds).splitlines()[-1])
    return result


def output_of(command: Sequence[str], seconds: float) -> str:
    """Return the output of a client's program that should take twice ``seconds``. Raises RuntimeError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120 + 4 * seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError("its transactions did not end") from None
    if done.returncode:
        raise RuntimeError(f"a transaction failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def free_port() -> int:
    """Return a port that is unused at the moment."""
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
    """Run a server with its output in ``home``; yield once it listens and has printed ``ready``. Raises Lacking."""
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
    """Send ``data``; return the response up to the ``times``-th occurrence of ``until``."""
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
    """Send ``data``; return one response including its prefix, the size in four bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT_S) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as answers:
            size = answers.read(4)
            return size + answers.read(int.from_bytes(size, "big"))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has ended
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def is_root() -> bool:
    """True if Debian packages can be installed; PostgreSQL then needs another user."""
    return os.geteuid() == 0
