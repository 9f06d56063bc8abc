"""Redis Streams: XADD, synced before each answer."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bench.peers.fetch import debian_program
from bench.peers.peer import Asked, Peer, Running, free_port, process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Redis(Peer):
    """A Redis stream per topic; a batch is a pipeline with a command per message, and waits for all replies."""

    name = "redis"
    protocol = "redis"
    synced = "`appendfsync always`: the log is synced once a turn of its loop, before the answers of that turn"

    def fetch(self) -> str:
        done = subprocess.run([self._server(), "--version"], capture_output=True, text=True, check=True)
        return f"Redis {done.stdout.partition('v=')[2].partition(' ')[0]}"

    def _server(self) -> str:
        return debian_program("redis-server", "redis-server")

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        port = free_port()
        command = [self._server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"]
        with process(command, port, home) as running:
            yield running

    def create(self, running: Running, topics: Sequence[str]) -> None:
        """Do nothing: the first entry creates a stream."""

    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        return Asked(b"".join(_command(b"XADD", topic.encode(), b"*", b"p", each) for each in messages), len(messages))

    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        start = b"(%015d-%015d" % (0, 0)
        request = _command(b"XRANGE", topic.encode(), start, b"+", b"COUNT", str(limit).encode())
        return Asked(request, position_at=request.index(start))


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
