"""HTTP/2: only a malformed request is refused, and no client loses the other streams of its connection."""

from __future__ import annotations

import json
import logging

import pytest
import trio
import trio.testing
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from broker.http import floods
from broker.http.budgets import FEW_PARTS
from broker.http.http2.frame_floods import FrameCutter
from tests.broker.http2_talk import frame, http2
from tests.broker.listeners import running
from tests.patience import PATIENCE_S

POLL = b"/v1/namespaces/ns/topics/t/poll"
STORE = b"/v1/namespaces/ns/topics/t/store"


async def parked(listener, client):
    """Park a poll and return its stream's id."""
    stream_id = await client.ask(b"POST", POLL, b"")
    with trio.fail_after(PATIENCE_S):
        while not listener.toys.parked:
            await trio.testing.wait_all_tasks_blocked(0.01)
    return stream_id


async def is_served(listener, client, poll):
    """Check that a parked poll and a new request are answered."""
    answer = await client.answer(await client.ask(b"POST", STORE, b"hello"))
    assert json.loads(answer.body)["body"] == b"hello".hex()
    listener.toys.release.set()
    assert (await client.answer(poll)).status == 200


@pytest.mark.parametrize(
    "request_of",
    [
        {"path": b"/v1/\xc3\xa4"},
        {"path": b"/v1/x y"},
        {"path": b"?a=1"},
        {"method": b"G\xc3\x84T"},
        {"method": b"CONNECT", "path": None, "scheme": None},
        {"method": b"GET", "protocol": b"websocket"},
        {"method": b"CONNECT", "protocol": b"websocket", "path": None},
        {"method": b"get"},
        {"authority": b"h\xc3\xb6st"},
    ],
    ids=["path", "space", "no-slash", "method", "connect", "protocol", "no-path", "lower-case", "authority"],
)
async def test_malformed_requests_end_no_other_stream_and_are_counted_in_one_line(caplog, request_of):
    caplog.set_level(logging.WARNING)
    async with running() as listener, http2(listener) as client:
        poll = await parked(listener, client)
        for _ in range(20):
            refused = await client.answer(
                await client.ask(**{"method": b"GET", "path": STORE, "body": b"", **request_of})
            )
            assert refused.reset == ErrorCodes.PROTOCOL_ERROR or refused.status == 501
        await is_served(listener, client, poll)
    assert [each.getMessage() for each in caplog.records] == ["malformed requests over HTTP/2 are refused"]
    assert all(each.exc_info is None for each in caplog.records)


@pytest.mark.parametrize(
    "header",
    [
        (b"X-Upper", b"1"),
        (b"connection", b"close"),
        (b"te", b"gzip"),
        (b"x-space", b" 1"),
        (b"x-line", b"1\r\nx: 2"),
        (b":path", b"/again"),
        (b"host", b"another"),
        (b"a b", b"1"),
        (b"", b"1"),
    ],
)
async def test_a_request_with_a_forbidden_header_is_refused_and_ends_no_other_stream(header):
    async with running() as listener, http2(listener) as client:
        poll = await parked(listener, client)
        refused = await client.answer(await client.ask(b"GET", STORE, b"", header))
        assert refused.reset == ErrorCodes.PROTOCOL_ERROR
        await is_served(listener, client, poll)


async def test_data_for_an_answered_stream_ends_no_other_stream(mock_clock):
    async with running(max_body_bytes=10) as listener, http2(listener) as client:
        poll = await parked(listener, client)
        refused = await client.ask(b"POST", STORE, None, (b"content-length", b"100000"))
        await client.until(lambda: client.streams[refused].status == 413)
        mock_clock.autojump_threshold = 0.01  # the server waits for the rest of the body
        answer = await client.answer(refused)
        mock_clock.autojump_threshold = float("inf")
        assert answer.ended
        # Data that was in flight: the client has not yet received the reset.
        await client.stream.send_all(frame(0, b"x" * 1000, stream_id=refused) * 20)
        await is_served(listener, client, poll)


async def test_two_lengths_are_refused_as_malformed():
    async with running() as listener, http2(listener) as client:
        twice = [(b"content-length", b"5")] * 2
        answer = await client.answer(await client.ask(b"POST", STORE, b"hello", *twice))
        assert (answer.status, json.loads(answer.body)["code"]) == (400, "malformed_body")


@pytest.mark.parametrize("lengths", [[b"4"], [b"6"], [b"5", b"6"], [b"x"]], ids=["less", "more", "two", "none"])
async def test_a_body_that_contradicts_its_length_is_refused_and_ends_no_other_stream(lengths):
    async with running() as listener, http2(listener) as client:
        poll = await parked(listener, client)
        sent = [(b"content-length", length) for length in lengths]
        answer = await client.answer(await client.ask(b"POST", STORE, b"hello", *sent))
        assert (answer.status, json.loads(answer.body)["code"]) == (400, "malformed_body")
        await is_served(listener, client, poll)


async def test_websockets_over_http_2_are_not_advertised():
    """Browsers would then open WebSockets over HTTP/2, and the daemon would refuse them."""
    async with running() as listener, http2(listener) as client:
        assert client.h2.remote_settings.get(SettingCodes.ENABLE_CONNECT_PROTOCOL, 0) == 0


async def test_an_upload_does_not_wait_for_a_window_update_every_64_kib():
    async with running() as listener, http2(listener) as client:
        stream_id = await client.ask(b"POST", STORE, None)
        await client.until(lambda: client.h2.local_flow_control_window(stream_id) >= 1 << 20)


# --- small frames ------------------------------------------------------------------------------------


@pytest.fixture
def most_frames(monkeypatch):
    """Record the most frames that h2 received at once."""
    most = [0]
    receive = H2Connection.receive_data

    def counting(self, data):
        at = frames = 0
        while not self.config.client_side and at + 9 <= len(data) and not data.startswith(b"PRI"):
            at += 9 + int.from_bytes(data[at : at + 3], "big")
            frames += 1
        most[0] = max(most[0], frames)
        return receive(self, data)

    monkeypatch.setattr(H2Connection, "receive_data", counting)
    return most


@pytest.mark.parametrize("kind", [4, 6, 200], ids=["settings", "ping", "unknown"])
async def test_frames_of_one_read_are_handled_a_few_at_a_time(most_frames, kind):
    count = floods.CONTROL_BURST // 2
    async with running() as listener, http2(listener) as client:
        await client.stream.send_all(frame(kind, bytes(8) if kind == 6 else b"") * count)
        answer = await client.answer(await client.ask(b"POST", STORE, b"hello"))
        assert answer.status == 200
    assert 1 < most_frames[0] <= FEW_PARTS


@pytest.mark.parametrize("kind", [4, 6, 200], ids=["settings", "ping", "unknown"])
async def test_a_flood_of_frames_without_content_ends_the_connection(mock_clock, kind):
    del mock_clock  # the clock is stopped, except for slices of long work
    async with running() as listener, http2(listener) as client:
        flood = frame(kind, bytes(8) if kind == 6 else b"") * (floods.CONTROL_BURST + 200)
        await client.stream.send_all(flood)
        assert await client.end() == ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_client_may_open_its_windows_for_each_answer_forever(mock_clock):
    del mock_clock  # without time, no allowance accrues
    async with running() as listener, http2(listener) as client:
        for _ in range(floods.CONTROL_BURST // 2):
            assert (await client.answer(await client.ask(b"POST", STORE, b"x"))).status == 200
            await client.stream.send_all(frame(8, (1).to_bytes(4, "big")) * 3)


def test_frames_are_cut_the_same_way_however_the_bytes_arrive(mock_clock):
    del mock_clock
    whole = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + (frame(0, b"x" * 300, stream_id=1) + frame(4)) * 50

    class Allowed:
        controls = content_bytes = 0

        def content(self, size_bytes):
            self.content_bytes += size_bytes

        def control(self, frames=1):
            self.controls += frames
            return True

    for size in (1, 7, 100, 5000, len(whole)):
        allowed = Allowed()
        cutter = FrameCutter(allowed)
        for start in range(0, len(whole), size):
            piece, at = whole[start : start + size], 0
            while at < len(piece):
                at, is_allowed = cutter.cut(piece, at)
                assert is_allowed
        assert (allowed.controls, allowed.content_bytes) == (50, 50 * 300)
