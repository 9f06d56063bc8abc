"""HTTP clients for tests: a bare connection for trio, and a blocking one for one request at a time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.requests import PollRequest, PublishRequest, Receipt
from tests.codecs import Message, codec_for
from tests.patience import PATIENCE_S

JSON_HEADERS = {"Content-Type": "application/json"}
#: Encodings of a poll: name, type of the request, accepted type.
ENCODINGS = {
    "json": {"Content-Type": "application/json"},
    "avro": {"Content-Type": "avro/binary"},
    "avro2": {"Content-Type": "avro/binary; version=2"},
    "frames": {"Content-Type": "application/json", "Accept": FRAMES_TYPE},
}


class ConnectionLost(Exception):
    """The connection broke before the complete answer arrived, so the outcome is unknown."""


class NotConnected(Exception):
    """The connection failed: nothing was sent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The problem's code; empty for any other answer."""
        if self.headers.get("content-type") != "application/problem+json":
            return ""
        return str(self.json()["code"])

    def receipt(self) -> Receipt:
        """Decode the answer of a publish with ``Prefer: return=representation``."""
        assert self.status == 200, self
        return codec_for(self.headers["content-type"]).decode_receipt(self.body)

    def messages(self) -> list[tuple[bytes, bytes]]:
        """Decode a poll's ids and payloads, in any encoding."""
        assert self.status == 200, self
        content_type = self.headers["content-type"]
        if content_type.startswith(FRAMES_TYPE):
            return [(frame.message_id, frame.payload) for frame in decode_frames(self.body)]
        return [(message.message_id, message.payload) for message in self.page()]

    def page(self) -> list[Message]:
        """Decode the messages of an answer in JSON or Avro."""
        return codec_for(self.headers["content-type"]).decode_page(self.body)


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v1/namespaces/ring/topics/{topic}{rest}"


def publish_call(
    topic: str, messages: list[bytes], headers: Mapping[str, str] = JSON_HEADERS, ttl_s: int | None = None
) -> tuple[str, str, bytes, Mapping[str, str]]:
    """Return method, path, body and headers of a publish that asks for its receipt."""
    body = codec_for(headers["Content-Type"]).encode_publish(PublishRequest(messages))
    query = "" if ttl_s is None else f"?ttl={ttl_s}"
    return "POST", topic_path(topic, "/publish" + query), body, {**headers, "Prefer": "return=representation"}


def poll_call(
    topic: str, poll: PollRequest, encoding: str = "json", wait_ms: int = 0
) -> tuple[str, str, bytes, Mapping[str, str]]:
    """Return method, path, body and headers of a poll."""
    headers = ENCODINGS[encoding]
    query = f"?wait_ms={wait_ms}" if wait_ms else ""
    return "POST", topic_path(topic, "/poll" + query), codec_for(headers["Content-Type"]).encode_poll(poll), headers


def ask(
    address: tuple[str, int], method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """Send one request on its own connection, blocking."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def create(address: tuple[str, int], topic: str, **properties: object) -> None:
    """Create a topic, unless one with equal properties exists."""
    body = json_body(properties)
    answer = ask(address, "PUT", topic_path(topic) + "?ifNotExists=true", body, JSON_HEADERS)
    assert answer.status == 200, answer


def publish(address: tuple[str, int], topic: str, *messages: bytes) -> Receipt:
    """Publish, and return the receipt."""
    return ask(address, *publish_call(topic, list(messages))).receipt()


def poll(address: tuple[str, int], topic: str, request: PollRequest | None = None) -> list[tuple[bytes, bytes]]:
    """Return one page of a topic."""
    return ask(address, *poll_call(topic, request or PollRequest())).messages()


def read_all(address: tuple[str, int], topic: str) -> list[tuple[bytes, bytes]]:
    """Return all messages of a topic, from one answer."""
    return ask(address, *poll_call(topic, PollRequest(), "avro")).messages()


def json_body(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode()


def metric(address: tuple[str, int], name: str) -> float:
    """Return the value of a metric without labels."""
    for line in ask(address, "GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(f"there is no metric {name}")


class Talk:
    """A persistent connection for trio: one request at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    @classmethod
    async def to(cls, address: tuple[str, int]) -> Talk:
        """Connect.

        Raises:
          NotConnected: the connection was refused.
        """
        try:
            return cls(await trio.open_tcp_stream(*address))
        except OSError as error:
            raise NotConnected(str(error)) from error

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self.stream)

    async def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and return its answer. Raises ConnectionLost."""
        await self.send(method, path, body, headers)
        return await self.answer()

    async def send(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send a request without waiting for its answer."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        await self.send_raw("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)

    async def send_raw(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionLost(str(error)) from error

    async def answer(self) -> Answer:
        """Return the next complete answer."""
        head = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        else:
            body = await self._exactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._until(b"\r\n"), 16):
            parts.append(await self._exactly(size))
            await self._exactly(2)
        await self._until(b"\r\n")
        return b"".join(parts)

    async def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            await self._more()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> None:
        try:
            data = await self.stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed")
        self._buffer += data
