"""Hypercorn's HTTP/2, extended: requests are refused one by one, small frames are bounded, uploads get large windows.

Hypercorn 0.18 lets an exception end the connection, with all its streams, for a request without a path (CONNECT), for
bytes beyond ASCII in one, and for DATA of a stream that was already answered. On a load balancer's connection the
streams belong to many clients.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import StreamState
from h2.utilities import HeaderValidationFlags, validate_headers
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.trio.task_group import TaskGroup, _handle

from broker.http.budgets import FEW_PARTS
from broker.http.floods import FrameAllowance
from broker.http.messages import new_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from h2.events import Event as H2Event
    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper, ASGIReceiveCallable, ASGIReceiveEvent, ASGISendEvent, Scope

    from broker.http.budgets import HttpSettings, LongWork

#: Flow-control windows: how much a client may send before the application has read it, on one stream and on a
#: connection. None of it is buffered, since a connection is not read while the application reads nothing.
STREAM_WINDOW_BYTES = 2 << 20
CONNECTION_WINDOW_BYTES = 4 << 20
_FIRST_WINDOW_BYTES = 65_535
_PREFACE_BYTES = 24
_FRAME_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
#: Control frames that are free with each request, such as those that open the windows of its answer; a reset takes them
#: back, plus one.
_CONTROLS_OF_REQUEST = 4
_END_STREAM = 1
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VISIBLE = re.compile(rb"[\x21-\x7e]+")


class FrameCutter:
    """Finds the ends of frames in received data, so that it can be handled a few frames at a time."""

    __slots__ = ("_allowance", "_head", "_left")

    def __init__(self, allowance: FrameAllowance) -> None:
        self._allowance = allowance
        #: The received part of a frame's head, and the missing bytes of the current frame.
        self._head = b""
        self._left = _PREFACE_BYTES

    def cut(self, data: bytes, at: int) -> tuple[int, bool]:
        """Return the end of the next few frames from ``at``, and whether the client's allowance covers them."""
        frames = controls = content_bytes = 0
        size = len(data)
        while at < size:
            if self._left:
                taken = min(self._left, size - at)
                self._left -= taken
                at += taken
                continue
            if not self._head and frames >= FEW_PARTS:
                break
            missing = _FRAME_HEAD_BYTES - len(self._head)
            self._head += data[at : at + missing]
            at = min(at + missing, size)
            if len(self._head) < _FRAME_HEAD_BYTES:
                break
            self._left, kind, flags = int.from_bytes(self._head[:3], "big"), self._head[3], self._head[4]
            self._head = b""
            frames += 1
            if kind == _HEADERS:
                controls -= _CONTROLS_OF_REQUEST
            elif kind == _RST_STREAM:
                controls += _CONTROLS_OF_REQUEST + 1
            elif kind != _DATA or not (self._left or flags & _END_STREAM):
                controls += 1
            else:
                content_bytes += self._left
        self._allowance.content(content_bytes)
        return at, not controls or self._allowance.control(controls)


class _Connection(H2Connection):
    """Leaves body lengths to the gate: h2 ends the connection, with all its streams, if a body contradicts its own."""

    def _begin_new_stream(self, stream_id: int, allowed_ids: Any) -> Any:
        stream: Any = super()._begin_new_stream(stream_id, allowed_ids)
        stream._initialize_content_length = stream._track_content_length = _ignores
        return stream


def _ignores(*_: object) -> None: ...


class BoundedH2(H2Protocol):
    """Hypercorn's HTTP/2 protocol on one connection.

    Args:
      others: hypercorn's own arguments.
      long_work: grants slices of time for the frames of one read beyond the first few.
      refused: counts refused requests and connections, with the reason.
    """

    def __init__(
        self, *others: Any, settings: HttpSettings, long_work: LongWork, refused: Callable[[str], None]
    ) -> None:
        super().__init__(*others)
        self._long_work = long_work
        self._refused = refused
        self._allowance = FrameAllowance()
        self._frames = FrameCutter(self._allowance)
        self._window_bytes = min(CONNECTION_WINDOW_BYTES, max(settings.max_inflight_bytes, _FIRST_WINDOW_BYTES))
        config = self.config
        self.connection = _Connection(self.connection.config)
        self.connection.config.validate_inbound_headers = False  # ``fault_of`` validates them
        # No extended CONNECT (RFC 8441), which hypercorn announces: browsers would open WebSockets that way.
        self.connection.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: config.h2_max_header_list_size,
                SettingCodes.INITIAL_WINDOW_SIZE: min(STREAM_WINDOW_BYTES, self._window_bytes),
            },
        )

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        """Send our settings, and open the window of the connection."""
        await super().initiate(headers, settings)
        if self._window_bytes > _FIRST_WINDOW_BYTES:
            self.connection.increment_flow_control_window(self._window_bytes - _FIRST_WINDOW_BYTES)
            await self._flush()

    async def handle(self, event: Event) -> None:
        """Handle received data a few frames at a time: each frame takes as much time as thousands of bytes."""
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        at, is_first = 0, True
        while not self.closed and (at < len(event.data) or is_first):
            end, is_allowed = self._frames.cut(event.data, at)
            if not is_allowed:
                await self._end(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames without content")
                return
            piece = event.data[at:end]
            if is_first:
                events = self._events(piece)
            else:
                async with self._long_work:
                    events = self._events(piece)
            at, is_first = end, False
            if events is None:
                await self._flush()
                await self.send(Closed())
                return
            await self._handle_events(events)

    def _events(self, data: bytes) -> list[H2Event] | None:
        """Return the events in ``data``; None: the connection must end, and GOAWAY is ready to be sent."""
        try:
            return self.connection.receive_data(data)
        except ProtocolError as error:
            self._refused(type(error).__name__)  # only the class: the message may quote a header
        except Exception as error:  # noqa: BLE001 - what a client sends ends its own connection, in one counted line
            self._refused(type(error).__name__)
            self._go_away(ErrorCodes.PROTOCOL_ERROR)
        return None

    async def _end(self, code: ErrorCodes, why: str) -> None:
        self._refused(why)
        self._go_away(code)
        await self._flush()
        await self.send(Closed())

    def _go_away(self, code: ErrorCodes) -> None:
        with suppress(ProtocolError):
            self.connection.close_connection(code)

    async def _handle_events(self, events: Sequence[H2Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived):
                # The stream may have been answered already: its data is dropped, and the connection's window opens
                # again.
                stream = self.streams.get(event.stream_id)
                if stream is not None:
                    await stream.handle(Body(stream_id=event.stream_id, data=event.data))
                with suppress(ProtocolError):
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, RequestReceived) and (why := fault_of(event.headers or ())) is not None:
                self._refused(why)
                with suppress(ProtocolError):
                    self.connection.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            elif isinstance(event, RequestReceived) and _is_unknown(event.headers or ()):
                self._refused("CONNECT, or a method in lower case")
                await self._answer_unknown(event.stream_id)
            else:
                with suppress(ProtocolError):
                    await super()._handle_events([event])
        await self._flush()

    async def _answer_unknown(self, stream_id: int) -> None:
        headers = [
            (b":status", b"501"),
            (b"content-length", b"0"),
            (b"x-request-id", new_request_id().encode()),
            *self.config.response_headers("h2"),
        ]
        with suppress(ProtocolError):
            self.connection.send_headers(stream_id, headers, end_stream=True)
            self._stop_sender(stream_id)
        await self._flush()
        await self.send(Updated(idle=self.idle))

    async def _flush(self) -> None:
        data = self.connection.data_to_send()
        if data:
            self._allowance.content(len(data))
            await self.send(RawData(data=data))

    async def _send_data(self, stream_id: int) -> None:
        """Send a piece of an answer. After the last one, reset the stream if the client still sends its request."""
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers:
            with suppress(ProtocolError):
                self._stop_sender(stream_id)
            await self._flush()

    def _stop_sender(self, stream_id: int) -> None:
        stream = self.connection.streams.get(stream_id)
        if stream is not None and stream.state_machine.state is StreamState.HALF_CLOSED_LOCAL:
            self.connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    async def _priority_updated(self, event: Any) -> None:
        """Ignore priorities, as RFC 9113 allows: hypercorn keeps a tree of them that clients can fill."""


_OF_REQUEST = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)


def fault_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return why a request is malformed (RFC 9113, section 8.1.1), without quoting it; None if it is well-formed.

    h2 can check the same, but then ends the connection, with all its other requests.
    """
    try:
        for _ in validate_headers(headers, _OF_REQUEST):
            pass
    except ProtocolError:
        return "a malformed, missing or forbidden header"
    for name, value in headers:
        if name == b":method":
            if not _TOKEN.fullmatch(value):
                return "the method is not a token"
        elif name in (b":path", b":authority", b":scheme"):
            if not _VISIBLE.fullmatch(value):
                return f"{name.decode()} has bytes beyond visible ASCII"
            if name == b":path" and not (value.startswith(b"/") or value == b"*"):
                return "the path does not begin with a slash"
        elif name != b":protocol" and not _TOKEN.fullmatch(name):
            return "the name of a header is not a token"
    return None


def _is_unknown(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True for CONNECT, and for a method in lower case, which hypercorn would treat as another method.

    A WebSocket over HTTP/2 (RFC 8441) is no such CONNECT: its answer says to open it over HTTP/1.1.
    """
    method = _value(headers, b":method") or b""
    return method != method.upper() or (method == b"CONNECT" and _value(headers, b":protocol") is None)


def _value(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for each, value in headers if each == name), None)


class Tasks(TaskGroup):
    """Hypercorn's task group of a connection, for applications that do not read the whole body.

    Hypercorn waits for the application to read a part of a body, forever, even after the application has ended. Nothing
    more would be read from the connection, whatever its other streams wait for.
    """

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start a request; return the function that passes events to it."""
        sending, receiving = trio.open_memory_channel[Any](config.max_app_queue_size)

        async def receive() -> Any:
            try:
                return await receiving.receive()
            except trio.EndOfChannel:
                return {"type": "http.disconnect"}

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] == "http.disconnect":
                sending.close()
                return
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await sending.send(message)

        async def send_on(message: ASGISendEvent | None) -> None:
            if message is None:
                receiving.close()
            await send(message)

        asked: ASGIReceiveCallable = receive
        assert self._nursery is not None
        self._nursery.start_soon(
            _handle, app, config, scope, asked, send_on, trio.to_thread.run_sync, trio.from_thread.run
        )
        return put
