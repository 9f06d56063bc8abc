"""Kafka: for each topic, a Kafka topic with one partition; one broker that is its own controller (KRaft)."""

from __future__ import annotations

import base64
import struct
import subprocess
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.fetch import jars, java
from bench.peers.peer import (
    START_TIMEOUT_S,
    Asked,
    Lacking,
    Peer,
    Running,
    clients,
    exchange_sized,
    free_port,
    process,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
auto.create.topics.enable=false
log.flush.interval.messages=1
"""
PRODUCE, FETCH, CREATE_TOPICS = 0, 1, 19
_TIMEOUT_MS = 30_000
#: Size of a stored message of 100 B. Kafka limits pages by bytes, so this gives them the other peers' message counts.
_MESSAGE_BYTES = 110


class Kafka(Peer):
    """Sends a batch as one record batch; requests are in Kafka's protocol, with `acks=all`."""

    name = "kafka"
    protocol = "kafka"
    synced = "`log.flush.interval.messages=1`: a sync for each request and partition, its log of transactions included"
    transacts = True

    def fetch(self) -> str:
        return f"Kafka {jars('kafka').partition('kafka-clients-')[2].partition('.jar')[0]}"

    @contextmanager
    def run(self, home: Path) -> Iterator[Running]:
        port, controller = free_port(), free_port()
        settings = home / "server.properties"
        text = _PROPERTIES.format(port=port, controller=controller, data=home / "data")
        settings.write_text(text, encoding="utf-8")
        run = [java(), "-Xms1g", "-Xmx1g", "-cp", jars("kafka")]
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        format_command = [*run, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(settings)]
        done = subprocess.run(format_command, cwd=home, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Lacking(f"its storage could not be formatted: {(done.stderr or done.stdout).strip()[-300:]}")
        with process([*run, "kafka.Kafka", str(settings)], port, home) as running:
            yield running

    def create(self, running: Running, topics: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        """Create the topics in one request, with these settings; wait until each can be fetched from."""
        chosen = (settings or {}).items()
        told = struct.pack("!i", len(chosen)) + b"".join(_text(name) + _text(value) for name, value in chosen)
        each = b"".join(_text(topic) + struct.pack("!ihi", 1, 1, 0) + told for topic in topics)
        body = struct.pack("!i", len(topics)) + each + struct.pack("!ib", _TIMEOUT_MS, 0)
        answer = exchange_sized(running.port, _request(CREATE_TOPICS, 2, body))
        at = 16  # size, correlation, throttle, count
        for _ in topics:
            (size,) = struct.unpack_from("!h", answer, at)
            error, message = struct.unpack_from("!hh", answer, at + 2 + size)
            if error:
                raise RuntimeError(f"a topic could not be created: error {error}")
            at += 2 + size + 4 + max(message, 0)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for topic in topics:
            while _error_of_fetch(exchange_sized(running.port, self.walk(running, topic, 1).request)):
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"{topic} was created and cannot be read")
                time.sleep(0.05)

    def publish(self, topic: str, messages: Sequence[bytes]) -> Asked:
        records = record_batch(messages, int(time.time() * 1000))
        body = struct.pack("!hhii", -1, -1, _TIMEOUT_MS, 1) + _text(topic)
        body += struct.pack("!iii", 1, 0, len(records)) + records
        return Asked(_request(PRODUCE, 7, body))

    def transact(
        self, running: Running, topics: Sequence[str], connections: int, seconds: float, size: int
    ) -> dict[str, Any]:
        """Run transactions with Kafka's own producer (Java), one for each connection."""
        return clients(
            [java(), "-cp", jars("kafka")],
            seconds,
            port=running.port,
            topics=",".join(topics),
            connections=connections,
            message_bytes=size,
        )

    def walk(self, running: Running, topic: str, limit: int) -> Asked:
        size = limit * _MESSAGE_BYTES
        body = struct.pack("!iiiib", -1, 0, 0, size, 0) + struct.pack("!i", 1) + _text(topic)
        body += struct.pack("!iiqi", 1, 0, 0, size)
        request = _request(FETCH, 4, body)
        return Asked(request, position_at=len(request) - 12)


def _text(text: str) -> bytes:
    return struct.pack("!h", len(text)) + text.encode()


def _request(key: int, version: int, body: bytes) -> bytes:
    whole = struct.pack("!hhi", key, version, 7) + _text("bench") + body
    return struct.pack("!i", len(whole)) + whole


def _error_of_fetch(answer: bytes) -> int:
    """Return the error code in the response to a Fetch 4 for one topic and partition."""
    at = 4 + 4 + 4 + 4
    (size,) = struct.unpack_from("!h", answer, at)
    error: int = struct.unpack_from("!h", answer, at + 2 + size + 4 + 4)[0]
    return error


def record_batch(messages: Sequence[bytes], now_ms: int) -> bytes:
    """Encode one record batch (magic 2) without keys or headers, uncompressed."""
    records = b""
    for offset, message in enumerate(messages):
        record = b"\0" + _varint(0) + _varint(offset) + _varint(-1) + _varint(len(message)) + message + _varint(0)
        records += _varint(len(record)) + record
    last = len(messages) - 1
    checked = struct.pack("!hiqqqhii", 0, last, now_ms, now_ms, -1, -1, -1, len(messages)) + records
    head = struct.pack("!ibI", -1, 2, crc32c(checked))
    return struct.pack("!qi", 0, len(head) + len(checked)) + head + checked


def _varint(value: int) -> bytes:
    left = (value << 1) ^ (value >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


def crc32c(data: bytes) -> int:
    """Compute CRC-32C, which the standard library lacks; requests are built once, so speed does not matter."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF
