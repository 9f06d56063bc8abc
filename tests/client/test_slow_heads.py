"""Following events and opening a stream when the connection is fast but the daemon's first answer is slow."""

from __future__ import annotations

import logging
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha1
from types import ModuleType
from typing import Any

import pytest

from plainsong._async import events as async_events
from plainsong._async import stream as async_stream
from plainsong._sync import events as sync_events
from plainsong._sync import stream as sync_stream
from plainsong.errors import ConnectFailed
from tests.client.simulation import Simulation, kind

pytestmark = pytest.mark.usefixtures("both_clients")

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'id: 1\nevent: attention\ndata: "something"\n\n'


class Wire:
    """Connections whose answers take simulated time. ``script``: for each connection, its answer or an error.

    ``limits`` are the time-outs for connecting.
    """

    def __init__(
        self, simulation: Simulation, took_s: float, script: list[Callable[[bytes], bytes] | Exception]
    ) -> None:
        self.limits: list[float] = []
        self._simulation = simulation
        self._took_s = took_s
        self._script = script
        is_async = kind().name == "async"
        self.connect = self._connect_async if is_async else self._connect
        self.send = self._send_async if is_async else self._send
        self.receive = self._receive_async if is_async else self._receive
        self.aclose, self.close = self._close_async, lambda: None

    def _connect(self, host: str, port: int, *, tls: object, timeout_s: float, stop: Any = None) -> Wire:
        self.limits.append(timeout_s)
        if isinstance(self._script[0], Exception):
            raise self._script.pop(0)  # type: ignore[misc] # just looked
        return self

    def _send(self, data: bytes, timeout_s: float) -> None:
        self._request = data

    def _receive(self, timeout_s: float) -> bytes:
        self._simulation.now_s += min(timeout_s, self._took_s)
        answer = self._script.pop(0)
        assert not isinstance(answer, Exception)
        return answer(self._request) if self._took_s <= timeout_s else b""

    async def _connect_async(self, host: str, port: int, *, tls: object, timeout_s: float, stop: Any = None) -> Wire:
        return self._connect(host, port, tls=tls, timeout_s=timeout_s)

    async def _send_async(self, data: bytes, timeout_s: float) -> None:
        self._send(data, timeout_s)

    async def _receive_async(self, timeout_s: float) -> bytes:
        return self._receive(timeout_s)

    async def _close_async(self) -> None:
        """Do nothing: there is nothing to close."""


def events_of(monkeypatch: pytest.MonkeyPatch, simulation: Simulation, wire: Wire) -> Any:
    module: ModuleType = {"async": async_events, "sync": sync_events}[kind().name]
    monkeypatch.setattr(module, "connect", wire.connect)
    made = module.AsyncEvents if kind().name == "async" else module.Events
    return made(simulation.channel(), "/v1/events")


def first_of(events: Any) -> Any:
    async def following() -> Any:
        return await anext(events)

    return following if kind().name == "async" else events.__next__


def test_events_arrive_although_their_head_is_slow_when_connecting_was_quick(monkeypatch: pytest.MonkeyPatch):
    simulation = Simulation([])
    wire = Wire(simulation, 20, [lambda _: HEAD + EVENT])
    event = simulation.run(first_of(events_of(monkeypatch, simulation, wire)))
    assert (event.kind, event.data) == ("attention", "something")
    assert wire.limits == [5]


def test_a_head_that_takes_longer_than_a_request_may_is_requested_again_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    simulation = Simulation([])
    wire = Wire(simulation, 31, [lambda _: b""] * 4)
    events = events_of(monkeypatch, simulation, wire)
    with caplog.at_level(logging.WARNING, "plainsong.client"), pytest.raises(IndexError):  # the script has ended
        simulation.run(first_of(events))
    assert simulation.now_s > 4 * 30
    (told,) = caplog.messages
    assert "no answer within 30 s" in told


def test_failures_of_a_restart_are_not_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    simulation = Simulation([])
    wire = Wire(simulation, 0, [*[OSError("refused")] * 6, lambda _: HEAD + EVENT])
    with caplog.at_level(logging.WARNING, "plainsong.client"):
        assert simulation.run(first_of(events_of(monkeypatch, simulation, wire))).data == "something"
    assert not caplog.messages


def accepting(request: bytes) -> bytes:
    found = re.search(rb"(?i)sec-websocket-key: *(\S+)", request)
    assert found is not None
    accepted = b64encode(sha1(found[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    return b"\r\n".join([*lines, b"Sec-WebSocket-Accept: " + accepted, b"", b""])


@pytest.mark.parametrize(("took_s", "opens"), [(20, True), (31, False)])
def test_a_stream_shakes_hands_within_the_time_of_a_request(
    monkeypatch: pytest.MonkeyPatch, took_s: float, opens: bool
):
    simulation = Simulation([])
    wire = Wire(simulation, took_s, [accepting])
    module: ModuleType = {"async": async_stream, "sync": sync_stream}[kind().name]
    monkeypatch.setattr(module, "connect", wire.connect)
    monkeypatch.setattr(module, "now", lambda: simulation.now_s)
    made = module.AsyncStream if kind().name == "async" else module.Stream
    stream = made(simulation.channel(), "t", max_pending_bytes=1 << 20, serializer=None)
    if opens:
        assert simulation.run(stream._connected)[0] is wire
    else:
        with pytest.raises(ConnectFailed, match="no answer within 30 s"):
            simulation.run(stream._connected)
    assert wire.limits == [5]
