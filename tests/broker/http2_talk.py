"""An HTTP/2 client for tests, which can also send requests that a library would refuse to send."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Answered:
    """A stream's answer, as far as it has arrived."""

    status: int = 0
    body: bytes = b""
    ended: bool = False
    reset: int | None = None


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream_id: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


@dataclass
class Http2:
    """A connection that speaks HTTP/2 from its first byte."""

    stream: trio.abc.HalfCloseableStream
    h2: H2Connection = field(
        default_factory=lambda: H2Connection(
            H2Configuration(
                client_side=True,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                header_encoding=None,
            )
        )
    )
    streams: dict[int, Answered] = field(default_factory=dict)
    goaway: int | None = None
    ended: bool = False

    async def open(self) -> None:
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        if data := self.h2.data_to_send():
            await self.stream.send_all(data)

    async def ask(self, method=b"POST", path=b"/v1/namespaces/ns/topics/t/store", body=None, *headers, **pseudo) -> int:
        """Send a request, without its end if the body is None, and return its stream's id."""
        stream_id = self.h2.get_next_available_stream_id()
        given = {b":method": method, b":scheme": b"http", b":authority": b"localhost", b":path": path}
        given |= {b":" + name.encode(): value for name, value in pseudo.items()}
        sent = [(name, value) for name, value in given.items() if value is not None]
        self.streams[stream_id] = Answered()
        self.h2.send_headers(stream_id, [*sent, *headers], end_stream=body == b"")
        if body:
            self.h2.send_data(stream_id, body, end_stream=True)
        await self.flush()
        return stream_id

    async def hear(self) -> None:
        """Receive and process data."""
        try:
            data = await self.stream.receive_some(65_536)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            self.ended = True
            return
        for event in self.h2.receive_data(data):
            if isinstance(event, ConnectionTerminated):
                self.goaway = int(event.error_code)
            found = self.streams.get(getattr(event, "stream_id", 0) or 0)
            if found is None:
                continue
            if isinstance(event, ResponseReceived):
                found.status = int(dict(event.headers)[b":status"])
            elif isinstance(event, DataReceived):
                found.body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                found.ended = True
            elif isinstance(event, StreamReset):
                found.reset = int(event.error_code)
        if self.goaway is None:
            await self.flush()

    async def until(self, is_so) -> None:
        """Receive and process data until ``is_so()``."""
        with trio.fail_after(PATIENCE_S):
            while not is_so():
                assert not self.ended, "the connection has ended"
                await self.hear()

    async def answer(self, stream_id: int) -> Answered:
        """Wait for a stream's complete answer, or its reset."""
        found = self.streams[stream_id]
        await self.until(lambda: found.ended or found.reset is not None)
        return found

    async def end(self) -> int | None:
        """Wait for the connection's end, and return the code of its GOAWAY; None if there was none."""
        with trio.fail_after(PATIENCE_S):
            while not self.ended:
                await self.hear()
        return self.goaway


@asynccontextmanager
async def http2(listener) -> AsyncIterator[Http2]:
    """Connect to a listener and wait for its settings."""
    async with await listener.connect() as stream:
        client = Http2(stream)
        await client.open()
        await client.hear()
        yield client
