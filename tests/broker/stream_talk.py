"""A client of streams for tests: WebSocket frames and msgpack, made by hand on a socket."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgpack
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Pong, Request

TARGET = "/v1/namespaces/ns/topics/{topic}/stream"


def request(number, *payloads, **fields):
    """Return the bytes of a request."""
    return msgpack.packb([number, {"messages": list(payloads), **fields}])


class Stream:
    def __init__(self, socket: trio.SocketStream) -> None:
        self.socket = socket
        self.ws = WSConnection(ConnectionType.CLIENT)
        self.heard = []
        self.unpacker = msgpack.Unpacker()

    async def say(self, *events) -> None:
        await self.socket.send_all(b"".join(self.ws.send(event) for event in events))

    async def send(self, *requests: bytes) -> None:
        """Send one message with all of these."""
        await self.say(BytesMessage(b"".join(requests)))

    async def event(self):
        """Return the next event; None after the end of the connection."""
        while not self.heard:
            data = await self.socket.receive_some(65536)
            if not data:
                return None
            self.ws.receive_data(data)
            self.heard += list(self.ws.events())
        return self.heard.pop(0)

    async def answers(self, count: int) -> list:
        """Return this many answers, in order."""
        found = []
        while len(found) < count:
            for answer in self.unpacker:
                found.append(answer)
                if len(found) == count:
                    return found
            event = await self.event()
            assert isinstance(event, BytesMessage | Pong), (event, found)
            if isinstance(event, BytesMessage):
                self.unpacker.feed(event.data)
        return found

    async def closed(self) -> tuple[int, str]:
        """Return code and reason of the close, which must be the next event."""
        event = await self.event()
        assert isinstance(event, CloseConnection), event
        return int(event.code), event.reason or ""


@asynccontextmanager
async def knock(daemon, topic="t", **more):
    """Connect, and yield the stream with the answer to its handshake."""
    host, _, port = str(daemon.http.base_url).rpartition("//")[2].rstrip("/").partition(":")
    async with await trio.open_tcp_stream(host, int(port)) as socket:
        stream = Stream(socket)
        await stream.say(Request(host=f"{host}:{port}", **{"target": TARGET.format(topic=topic), **more}))
        yield stream, await stream.event()


@asynccontextmanager
async def open_stream(daemon, topic="t"):
    """Open a stream of a topic."""
    async with knock(daemon, topic) as (stream, answer):
        assert isinstance(answer, AcceptConnection), answer
        yield stream
