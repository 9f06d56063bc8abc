"""The other side of a stream for tests: WebSocket frames and msgpack, made by hand on a socket."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgpack
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Pong, Request

TARGET = "/v1/namespaces/ns/topics/{topic}/stream"


def request(number, *payloads, **fields):
    """A request as it goes over the wire."""
    return msgpack.packb([number, {"messages": list(payloads), **fields}])


class Stream:
    """An open stream."""

    def __init__(self, socket: trio.SocketStream) -> None:
        self.socket = socket
        self.ws = WSConnection(ConnectionType.CLIENT)
        self.heard = []
        self.unpacker = msgpack.Unpacker()

    async def say(self, *events) -> None:
        await self.socket.send_all(b"".join(self.ws.send(event) for event in events))

    async def send(self, *requests: bytes) -> None:
        """One message with all of these."""
        await self.say(BytesMessage(b"".join(requests)))

    async def event(self):
        """The next event, whatever it is; None after the end of the connection."""
        while not self.heard:
            data = await self.socket.receive_some(65536)
            if not data:
                return None
            self.ws.receive_data(data)
            self.heard += list(self.ws.events())
        return self.heard.pop(0)

    async def answers(self, count: int) -> list:
        """So many answers, in order."""
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
        """Code and words of the close, which is the next thing to come."""
        event = await self.event()
        assert isinstance(event, CloseConnection), event
        return int(event.code), event.reason or ""


@asynccontextmanager
async def knock(daemon, topic="t", **more):
    """A connection, and what a handshake for a stream of a topic is answered with."""
    host, _, port = str(daemon.http.base_url).rpartition("//")[2].rstrip("/").partition(":")
    async with await trio.open_tcp_stream(host, int(port)) as socket:
        stream = Stream(socket)
        await stream.say(Request(host=f"{host}:{port}", **{"target": TARGET.format(topic=topic), **more}))
        yield stream, await stream.event()


@asynccontextmanager
async def open_stream(daemon, topic="t"):
    """A stream of a topic."""
    async with knock(daemon, topic) as (stream, answer):
        assert isinstance(answer, AcceptConnection), answer
        yield stream
