"""NATS JetStream: a file stream for each topic, published to with acknowledgements."""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.fetch import go_program
from bench.peers.peer import Asked, Peer, Running, exchange, free_port, process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PACKAGE = "github.com/nats-io/nats-server/v2"
_CONFIG = """
listen: "127.0.0.1:{port}"
ping_interval: "1h"
jetstream {{ store_dir: "{data}", sync_interval: always }}
"""
#: The generator replaces "@@@@" with the connection's number.
_INBOX = b"in.@@@@"
_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
#: NATS's limit for an atomic batch.
_LARGEST_BATCH = 1000


class Nats(Peer):
    """A batch is an atomic batch (2.12): one acknowledgement for all of it; pages are pulled by an ephemeral consumer."""

    name = "nats"
    protocol = "nats"
    synced = "`sync_interval: always`: a sync for each message stored"
    hello = _HELLO + b"SUB " + _INBOX + b" 1\r\nPING\r\n"

    def __init__(self) -> None:
        self._consumers = 0

    def fetch(self) -> str:
        done = subprocess.run([str(self._server()), "--version"], capture_output=True, text=True, check=True)
        return f"NATS {done.stdout.rpartition('v')[2].strip()}"

    def _server(self) -> Path:
        return go_program("nats", _PACKAGE)

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        port = free_port()
        config = home / "nats.conf"
        config.write_text(_CONFIG.format(port=port, data=home / "data"), encoding="utf-8")
        with process([str(self._server()), "-c", str(config)], port, home, ready=b"Server is ready") as running:
            yield running

    def create(self, running: Running, topics: Sequence[str]) -> None:
        for topic in topics:
            stream = {"name": topic, "subjects": [f"t.{topic}"], "storage": "file", "allow_atomic": True}
            self._call(running, f"STREAM.CREATE.{topic}", stream | {"num_replicas": 1, "retention": "limits"})

    def _call(self, running: Running, call: str, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        asked = b"SUB in.api 1\r\nPUB $JS.API.%s in.api %d\r\n%s\r\n" % (call.encode(), len(text), text)
        # The response is the first JSON with this type; the server's greeting has none.
        answer = exchange(running.port, _HELLO + asked, b'"type":"io.nats.jetstream.api')
        if b'"error"' in answer:
            raise RuntimeError(f"{call}: {answer[-300:]!r}")

    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        subject = b"t." + topic.encode()
        if len(messages) == 1:
            return Asked(b"PUB %s %s %d\r\n%s\r\n" % (subject, _INBOX, len(messages[0]), messages[0]))
        if len(messages) > _LARGEST_BATCH:
            raise ValueError(f"an atomic batch has at most {_LARGEST_BATCH} messages")
        out = b""
        for number, message in enumerate(messages, 1):
            last = number == len(messages)
            head = b"NATS/1.0\r\nNats-Batch-Id: b@@@@\r\nNats-Batch-Sequence: %d\r\n" % number
            head += b"Nats-Batch-Commit: 1\r\n\r\n" if last else b"\r\n"
            reply = _INBOX + b" " if last else b""
            sizes = b"%d %d" % (len(head), len(head) + len(message))
            out += b"HPUB %s %s%s\r\n%s%s\r\n" % (subject, reply, sizes, head, message)
        return Asked(out)

    def page(self, running: Running, topic: str, limit: int) -> Asked | None:
        return None

    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        self._consumers += 1
        name = f"c{self._consumers}"
        consumer = {"name": name, "deliver_policy": "all", "ack_policy": "none", "inactive_threshold": 300_000_000_000}
        self._call(running, f"CONSUMER.CREATE.{topic}.{name}", {"stream_name": topic, "config": consumer})
        body = json.dumps({"batch": limit, "no_wait": True}).encode()
        call = f"$JS.API.CONSUMER.MSG.NEXT.{topic}.{name}".encode()
        return Asked(b"PUB %s %s %d\r\n%s\r\n" % (call, _INBOX, len(body), body), limit, position_at=0)
