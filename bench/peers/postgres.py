"""PostgreSQL: a table for each topic, a transaction for each request."""

from __future__ import annotations

import math
import os
import pwd
import struct
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.peers.fetch import debian_program
from bench.peers.peer import Asked, Lacking, Peer, Running, exchange, free_port, is_root, output_of, process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Debian does not put the server's programs on the path.
_PLACES = "/usr/lib/postgresql/*/bin"
_USER = "plainsong"
_STATEMENT = b"it\0"
_SYNC = b"S\0\0\0\4"
#: ReadyForQuery, not in a transaction.
_READY = b"Z\0\0\0\5I"


class Postgres(Peer):
    """Publishes single messages with a prepared INSERT and batches with COPY; reads pages by primary key."""

    name = "postgres"
    protocol = "postgres"
    synced = "`fsync` and `synchronous_commit` on, as is its default"
    transacts = True

    def __init__(self) -> None:
        words = b"".join(word.encode() + b"\0" for word in ("user", _USER, "database", "postgres")) + b"\0"
        self.hello = struct.pack("!II", 8 + len(words), 196608) + words

    def fetch(self) -> str:
        done = subprocess.run([self._program("postgres"), "--version"], capture_output=True, text=True, check=True)
        return f"PostgreSQL {done.stdout.split()[2]}"

    def _program(self, name: str) -> str:
        return debian_program(name, "postgresql", _PLACES)

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        # PostgreSQL refuses to run as root.
        user = "postgres" if is_root() else None
        data = home / "data"
        if user is not None:
            try:
                owner = pwd.getpwnam(user)
            except KeyError:
                raise Lacking("it refuses to run as root, and there is no user postgres") from None
            os.chown(home, owner.pw_uid, owner.pw_gid)
        command = [self._program("initdb"), "-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C"]
        done = subprocess.run(command, user=user, cwd=home, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Lacking(f"initdb failed: {done.stderr.strip()[-300:]}")
        port = free_port()
        command = [self._program("postgres"), "-D", str(data), "-p", str(port), "-k", str(home), "-h", "127.0.0.1"]
        with process(command, port, home, user=user, ready=b"ready to accept connections") as running:
            yield running

    def create(self, running: Running, topics: Sequence[str]) -> None:
        for topic in topics:
            self._query(running, f'CREATE TABLE "{topic}" (id bigserial PRIMARY KEY, payload bytea NOT NULL)')

    def _query(self, running: Running, text: str) -> None:
        query = _message(b"Q", text.encode() + b"\0")
        answer = exchange(running.port, self.hello + query, _READY, times=2)
        if b"SERROR\0" in answer:
            raise RuntimeError(f"{text}: {answer[-300:]!r}")

    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        if len(messages) == 1:
            prepared = _parse(f'INSERT INTO "{topic}" (payload) VALUES ($1)')
            return Asked(_execute(messages[0]), prepared=prepared)
        # The payloads are text without backslashes, so COPY needs no escaping. The server reads on while it answers.
        copied = _message(b"d", b"".join(each + b"\n" for each in messages))
        copy = _message(b"Q", f'COPY "{topic}" (payload) FROM STDIN'.encode() + b"\0")
        return Asked(copy + copied + _message(b"c", b""))

    def transact(
        self, running: Running, topics: Sequence[str], connections: int, seconds: float, size: int
    ) -> dict[str, Any]:
        """Run transactions with pgbench: begin, an insert into each table, commit, each a round trip."""
        inserts = [f'INSERT INTO "{topic}" (payload) VALUES (:payload);' for topic in topics]
        # pgbench takes whole seconds.
        lasts_s = max(2, math.ceil(2 * seconds))
        with TemporaryDirectory() as directory:
            script, log = Path(directory) / "transaction", Path(directory) / "log"
            script.write_text("\n".join(["BEGIN;", *inserts, "COMMIT;"]), encoding="utf-8")
            command = [self._program("pgbench"), "-h", "127.0.0.1", "-p", str(running.port), "-U", _USER]
            command += ["--no-vacuum", "--protocol=prepared", "--client", str(connections), "--time", str(lasts_s)]
            command += ["--define", f"payload={'x' * size}", "--file", str(script)]
            output_of([*command, "--log", "--log-prefix", str(log), "postgres"], seconds)
            logs = [file.read_text(encoding="ascii").splitlines() for file in Path(directory).glob("log.*")]
        # Columns: client, transaction number, duration in µs, script, and the time of its end in seconds and µs.
        fields = [[int(word) for word in line.split()] for lines in logs for line in lines]
        return _counted([(each[4] * 1_000_000 + each[5], each[2]) for each in fields], seconds)

    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        start = struct.pack("!q", 0)
        prepared = _parse(f'SELECT id, payload FROM "{topic}" WHERE id > $1 ORDER BY id LIMIT {limit}')
        request = _execute(start)
        return Asked(request, position_at=request.index(b"\0\0\0\x08" + start) + 4, prepared=prepared)


def _counted(transactions: Sequence[tuple[int, int]], seconds: float) -> dict[str, Any]:
    """Return the result of the last ``seconds``, from the end and the duration of each transaction in µs."""
    since_us = max((ended_us for ended_us, _ in transactions), default=0) - seconds * 1e6
    took_ms = sorted(took_us / 1e3 for ended_us, took_us in transactions if ended_us - took_us >= since_us)

    def at(share: float) -> float:
        return took_ms[min(len(took_ms) - 1, int(share * len(took_ms)))] if took_ms else 0.0

    return {"requests": len(took_ms), "seconds": seconds, "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", 4 + len(body)) + body


def _parse(text: str) -> bytes:
    """Build a Parse message for the named statement."""
    return _message(b"P", _STATEMENT + text.encode() + b"\0" + b"\0\0") + _SYNC


def _execute(parameter: bytes) -> bytes:
    """Build Bind and Execute with one parameter; parameter and results are in binary format."""
    value = struct.pack("!HI", 1, len(parameter)) + parameter
    bound = _message(b"B", b"\0" + _STATEMENT + b"\0\1\0\1" + value + b"\0\1\0\1")
    return bound + _message(b"E", b"\0\0\0\0\0") + _SYNC
