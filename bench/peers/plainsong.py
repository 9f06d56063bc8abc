"""Plainsong itself and the original Java service: one protocol, so the same bytes."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import plainsong
from bench import bodies
from bench.daemon import daemon
from bench.load import post
from bench.peers.fetch import jars, java
from bench.peers.peer import Asked, Peer, Running, clients, free_port, process
from plainsong.protocol.codec import AVRO
from plainsong.protocol.ids import ID_BYTES
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Http(Peer):
    """The HTTP interface of both: Avro, version 1."""

    protocol = "http"
    transacts = True

    def create(self, running: Running, topics: Sequence[str]) -> None:
        connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
        for topic in topics:
            connection.request("PUT", bodies.path(topic))
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{topic}: {answer.status} {answer.read()!r}")
            answer.read()
        connection.close()

    def pointer(self, running: Running) -> int:
        """Begin a transaction; return its write pointer."""
        connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
        connection.request("POST", "/v1/transactions", b'{"timeoutSeconds": 600}', {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            said = answer.read()
        connection.close()
        if answer.status not in (200, 201):
            raise RuntimeError(f"{answer.status} {said!r}")
        pointer: int = json.loads(said)["writePointer"]
        return pointer

    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        body = AVRO.encode_publish(PublishRequest(messages))
        return Asked(post(bodies.path(topic, "publish"), body, [bodies.AVRO_TYPE]))

    def transact(
        self, running: Running, topics: Sequence[str], connections: int, seconds: float, size: int
    ) -> dict[str, Any]:
        """Run transactions with Tephra's own client (Java)."""
        paths = ",".join(bodies.path(topic, "publish") for topic in topics)
        return clients(
            [java(), "-cp", jars("original")],
            seconds,
            port=running.port,
            tephra=running.tephra_port,
            paths=paths,
            connections=connections,
            message_bytes=size,
        )

    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        # Start from the lowest id instead of none, so that all requests of a walk have the same form.
        start = bytes(ID_BYTES)
        body = AVRO.encode_poll(PollRequest(start, inclusive=False, limit=limit))
        request = post(bodies.path(topic, "poll"), body, [bodies.AVRO_TYPE])
        return Asked(request, position_at=request.index(start))


class Plainsong(Http):
    """The daemon of this tree, at default settings."""

    name = "plainsong"
    synced = "always, by group commit"

    def fetch(self) -> str:
        return plainsong.__version__

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        port = free_port()
        with daemon(home / "data", transactions_thrift=f"127.0.0.1:{port}") as ours:
            yield Running(ours.port, ours.process.pid, home, port)


class Original(Http):
    """CDAP's messaging service as published, in local mode on LevelDB; `bench/peers/original` starts it."""

    name = "original"
    synced = "always: a synced write of its store for each request"

    def fetch(self) -> str:
        found = jars("original")
        version = found.partition("cdap-tms-")[2].partition(".jar")[0]
        return f"cdap-tms {version}"

    def pointer(self, running: Running) -> int:
        """Return a new number: the service accepts any pointer and leaves transactions to its clients."""
        return time.time_ns()

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        port = free_port()
        command = [
            java(),
            "--add-opens",
            "java.base/java.lang=ALL-UNNAMED",
            "-Xms2g",
            "-Xmx2g",
            "-cp",
            jars("original"),
        ]
        tephra_port = free_port()
        command += ["peer.TmsServer", "--port", str(port), "--data", str(home / "data"), "--tephra", str(tephra_port)]
        with process(command, port, home, ready=b"ready ") as running:
            yield replace(running, tephra_port=tephra_port)
