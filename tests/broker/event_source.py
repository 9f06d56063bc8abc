"""A reader of server-sent events, as in browsers: WHATWG HTML, section 9.2, implemented from its text."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import NamedTuple

import h11
import trio

from tests.patience import PATIENCE_S


class Event(NamedTuple):
    kind: str
    data: str
    last_event_id: str

    @property
    def value(self):
        return json.loads(self.data)


class EventSource:
    """One connection; ``last_event_id`` is what a browser would send when it reconnects.

    Args:
      chunks: the body, in pieces of any size.
    """

    def __init__(self, chunks):
        self.last_event_id = ""
        self.retry_ms = None
        self.comments = 0
        self.body = self._chunks = chunks
        self._rest = b""
        self._kind, self._data, self._event_id = "", [], ""

    def __aiter__(self):
        return self

    async def __anext__(self):
        """Return the next dispatched event; the end of the stream dispatches none."""
        while True:
            while b"\n" not in self._rest:
                self._rest += await anext(self._chunks)
            line, _, self._rest = self._rest.partition(b"\n")
            event = self._take(line.decode())
            if event is not None:
                return event

    def _take(self, line):
        if line == "":
            self.last_event_id = self._event_id
            kind, data, self._kind, self._data = self._kind, self._data, "", []
            return Event(kind or "message", "\n".join(data), self._event_id) if data else None
        if line.startswith(":"):
            self.comments += 1
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._kind = value
        elif field == "data":
            self._data.append(value)
        elif field == "id" and "\0" not in value:
            self._event_id = value
        elif field == "retry" and value.isdigit():
            self.retry_ms = int(value)
        return None


class Body:
    """The body of an answer, as it arrives."""

    def __init__(self, connection, stream):
        self._connection = connection
        self.stream = stream
        self.ended = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        event = await self.next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        assert isinstance(event, h11.EndOfMessage), event
        self.ended = True
        raise StopAsyncIteration

    async def next_event(self):
        while True:
            event = self._connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._connection.receive_data(bytes(await self.stream.receive_some()))


@asynccontextmanager
async def event_source(base_url, path, **headers):
    """Open a stream; an answer that is not an event stream is refused, as browsers refuse it."""
    host, _, port = str(base_url).removeprefix("http://").rstrip("/").rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        connection = h11.Connection(h11.CLIENT)
        sent = {"Host": f"{host}:{port}", "Accept": "text/event-stream", **headers}
        request = h11.Request(method="GET", target=path, headers=list(sent.items()))
        await stream.send_all(connection.send(request) + connection.send(h11.EndOfMessage()))
        body = Body(connection, stream)
        with trio.fail_after(PATIENCE_S):
            response = await body.next_event()
        assert response.status_code == 200, response
        answered = dict(response.headers)
        assert answered[b"content-type"] == b"text/event-stream", answered
        assert b"content-encoding" not in answered
        yield EventSource(body)


async def take(source, count):
    """Return the next events of a stream."""
    found = []
    with trio.fail_after(PATIENCE_S):
        async for event in source:
            found.append(event)
            if len(found) == count:
                break
    return found
