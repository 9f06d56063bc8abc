"""Bounds and time-outs of both listeners: every limit has a defined answer, and stuck connections are closed."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from broker.http import budgets
from broker.http.budgets import FREE_BYTES
from broker.http.descriptors import Descriptors
from broker.http.server import _Application
from broker.security.guard import Guard
from tests.broker.listeners import Listener, Reader, ask, post, running
from tests.patience import PATIENCE_S

JSON = "Content-Type: application/json"
BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])


def stored(body: bytes) -> bytes:
    return bytes.fromhex(json.loads(body)["body"])


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_a_body_of_a_hundred_megabytes_is_refused_before_it_is_read(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", "Content-Length: 104857600"))
        reader = Reader(stream)
        reply = await reader.reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (413, "body_too_large", "close")
        await stream.send_eof()
        assert await reader.at_end()


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_a_client_that_sends_a_refused_body_anyway_can_read_the_error(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", "Content-Length: 4194304") + bytes(4 << 20))
        assert (await Reader(stream).reply()).code == "body_too_large"


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_a_chunked_body_is_refused_as_soon_as_it_passes_the_bound(hot: bool) -> None:
    async with running(hot=hot, max_body_bytes=1000) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", "Transfer-Encoding: chunked") + b"7d0\r\n" + bytes(2000))
        assert (await Reader(stream).reply()).code == "body_too_large"


@BOTH_WAYS
async def test_gzip_bodies_are_read_also_in_several_members(hot: bool) -> None:
    async with running(hot=hot) as listener:
        packed = gzip.compress(b"hello ") + gzip.compress(b"world")
        for coding in ("gzip", "x-gzip", "GZIP"):
            assert (
                stored((await ask(listener, post("t/store", packed, f"Content-Encoding: {coding}", JSON))).body)
                == b"hello world"
            )


@BOTH_WAYS
async def test_a_gzip_bomb_is_refused_and_the_connection_kept(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("t/store", gzip.compress(bytes(50 << 20)), "Content-Encoding: gzip", JSON))
        assert (await reader.reply()).code == "body_too_large"
        await stream.send_all(post("t/store", b"x"))
        assert stored((await reader.reply()).body) == b"x"
        with trio.fail_after(PATIENCE_S):
            while listener.budget.reserved_bytes:
                await trio.lowlevel.checkpoint()


@BOTH_WAYS
@pytest.mark.parametrize(
    ("body", "coding", "status", "code"),
    [
        (gzip.compress(b"hello")[:-3], "gzip", 400, "malformed_body"),
        (b"hello", "gzip", 400, "malformed_body"),
        (zlib.compress(b"hello"), "deflate", 415, "unsupported_media_type"),
    ],
)
async def test_bodies_that_do_not_decompress_are_refused(
    hot: bool, body: bytes, coding: str, status: int, code: str
) -> None:
    async with running(hot=hot) as listener:
        reply = await ask(listener, post("t/store", body, f"Content-Encoding: {coding}", JSON))
        assert (reply.status, reply.code) == (status, code)


@BOTH_WAYS
async def test_a_request_that_only_waits_is_dropped_for_one_that_needs_its_room(
    hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "YIELD_S", 0.0)
    async with running(hot=hot, max_body_bytes=10_000, max_inflight_bytes=20_000) as listener:
        async with await listener.connect() as first, await listener.connect() as second:
            for stream in (first, second):
                await stream.send_all(post("t/poll", bytes(10_000)))
            await until_parked(listener, 2)
            assert (await ask(listener, post("t/store", bytes(10_000)))).status == 200
            listener.toys.release.set()
            replies = [await Reader(stream).reply() for stream in (first, second)]
        assert sorted(reply.status for reply in replies) == [200, 503]


@BOTH_WAYS
async def test_bodies_over_the_common_budget_are_refused_with_a_time_to_retry(
    hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "YIELD_S", 60.0)
    async with running(hot=hot, max_body_bytes=10_000, max_inflight_bytes=20_000) as listener:
        async with await listener.connect() as first, await listener.connect() as second:
            for stream in (first, second):
                await stream.send_all(post("t/poll", bytes(10_000)))
            while listener.toys.parked < 2:
                await trio.lowlevel.checkpoint()
            reply = await ask(listener, post("t/store", bytes(FREE_BYTES + 1)))
            assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "overloaded", "1")
            assert (await ask(listener, post("t/store", bytes(FREE_BYTES)))).status == 200
            listener.toys.release.set()
            assert (await Reader(first).reply()).status == 200
        while listener.budget.reserved_bytes:
            await trio.lowlevel.checkpoint()
        assert (await ask(listener, post("t/store", b"x"))).status == 200


@BOTH_WAYS
async def test_a_body_that_trickles_is_refused_and_never_handled(hot: bool) -> None:
    async with running(hot=hot, body_timeout_s=0.1) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", "Content-Length: 1000") + b"x")
        reply = await Reader(stream).reply()
        assert (reply.status, reply.code) == (400, "malformed_body")


@BOTH_WAYS
async def test_a_connection_whose_head_trickles_is_closed(hot: bool) -> None:
    async with running(hot=hot, header_timeout_s=0.1) as listener, await listener.connect() as stream:
        await stream.send_all(b"POST /v1/namespaces/ns")
        assert await Reader(stream).at_end()


@BOTH_WAYS
@pytest.mark.parametrize("begin", [b"", b"P"])
async def test_a_connection_without_any_request_is_cut_where_names_are_required(hot: bool, begin: bytes) -> None:
    guard = Guard(required=True)
    quick = {"header_timeout_s": 0.1, "keep_alive_s": 10 * PATIENCE_S}
    async with running(hot=hot, guard=guard, **quick) as listener, await listener.connect() as stream:
        if begin:
            await stream.send_all(begin)
        with trio.fail_after(PATIENCE_S):
            assert await Reader(stream).at_end()


@BOTH_WAYS
async def test_a_connection_that_has_sent_a_request_idles_as_usual_where_names_are_required(
    hot: bool, mock_clock: MockClock
) -> None:
    guard = Guard(required=True)
    quick = {"header_timeout_s": 2, "keep_alive_s": 3}
    async with running(hot=hot, guard=guard, **quick) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        asked = post("t/publish") if hot else b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
        begun_s = trio.current_time()  # the idle time starts later
        await stream.send_all(asked)
        assert (await reader.reply()).status == (401 if hot else 200)
        mock_clock.autojump_threshold = 0  # from now on every task is idle, and time passes
        assert await reader.at_end()
        assert trio.current_time() - begun_s > 2.9  # not the time-out for the first head


@BOTH_WAYS
async def test_an_idle_connection_is_closed_after_its_time(hot: bool, mock_clock: MockClock) -> None:
    async with running(hot=hot, keep_alive_s=0.1) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("t/publish"))
        assert (await reader.reply()).status == 200
        mock_clock.autojump_threshold = 0  # time passes only from now on, however slow the machine
        assert await reader.at_end()


@BOTH_WAYS
async def test_a_reader_that_stops_reading_is_disconnected(hot: bool) -> None:
    async with running(hot=hot, send_timeout_s=0.1) as listener, await listener.connect() as stream:
        await stream.send_all(post("endless/rollback"))
        with trio.fail_after(PATIENCE_S):
            await listener.toys.closed.wait()


@BOTH_WAYS
async def test_a_reader_that_trickles_is_disconnected(hot: bool) -> None:
    settings = {"send_timeout_s": 0.3, "body_min_bytes_per_s": 1 << 30}
    async with running(hot=hot, **settings) as listener, await listener.connect() as stream:
        await stream.send_all(post("endless/rollback"))
        with trio.fail_after(PATIENCE_S):
            while not listener.toys.closed.is_set():
                await trio.sleep(0.02)
                with suppress(trio.BrokenResourceError):
                    await stream.receive_some(128 << 10)


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_a_head_that_does_not_end_is_refused(hot: bool) -> None:
    async with running(hot=hot) as listener:
        reply = await ask(listener, post("t/publish", b"", "X-Long: " + "a" * 200_000)[:-4])
        assert reply.status == 431
        assert reply.headers["content-type"] == "application/problem+json"


@BOTH_WAYS
@pytest.mark.parametrize(
    ("begins", "status"),
    [
        (post("t/publish", b"", "X-Long: " + "a" * 50_000)[:-4], 431),
        (post("t/store", b"", "Transfer-Encoding: chunked") + b"3\r\nabc\n" + b"x" * 50_000, 400),
    ],
    ids=["head", "body"],
)
async def test_a_client_refused_in_the_middle_of_a_request_may_continue_sending_and_is_not_reset(
    hot: bool, begins: bytes, status: int, mock_clock: MockClock
) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(begins)
        reader = Reader(stream)
        assert (await reader.reply()).status == status
        for _ in range(3):
            mock_clock.jump(0.5)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await stream.send_all(b"a" * 50_000)
        await stream.send_eof()
        assert await stream.receive_some() == b""  # a reset would raise


@BOTH_WAYS
@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Content-Length: +5",),
    ],
)
async def test_a_request_with_ambiguous_framing_is_refused(hot: bool, headers: tuple[str, ...]) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"0\r\n\r\n", *headers) + post("t/publish"))
        reader = Reader(stream)
        reply = await reader.reply()
        assert reply.status in (400, 501)
        assert reply.headers["content-type"] == "application/problem+json"
        assert await reader.at_end()


async def test_a_malformed_chunked_body_is_refused_and_nothing_after_it_is_served() -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", "Transfer-Encoding: chunked") + b"xyz\r\n" + post("t/publish"))
        reader = Reader(stream)
        assert (await reader.reply()).code == "malformed_body"
        await stream.send_eof()
        assert await reader.at_end()


async def test_connections_over_the_bound_are_refused_with_a_time_to_retry() -> None:
    async with running(max_connections=1) as listener, await listener.connect() as first:
        await first.send_all(post("t/publish"))
        assert (await Reader(first).reply()).status == 200
        reply = await ask(listener, post("t/publish"))
        assert (reply.status, reply.code, reply.headers["connection"]) == (503, "overloaded", "close")
        assert reply.headers["retry-after"] == "1"


async def test_running_out_of_descriptors_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socket.socket.accept
    failures = [24, 23]

    def failing(self: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "too many open files")
        return accept(self)

    async with running() as listener:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert (await ask(listener, post("t/publish"))).status == 200
        assert not failures


HEAD = "Host: localhost\r\n"


@BOTH_WAYS
@pytest.mark.parametrize("path", ["/ping", "/v1/namespaces/ns/topics/t/store"])
@pytest.mark.parametrize(
    ("line", "more", "status"),
    [
        ("GET {} HTTP/1.1", "X: " + "x" * (16 << 10), 431),
        ("GET {}?" + "x" * (16 << 10) + " HTTP/1.1", "", 431),
        ("get {} HTTP/1.1", "", 501),
        ("Post {} HTTP/1.1", "Content-Length: 0", 501),
        ("GET {} HTTP/9.9", "", 505),
        ("GET {} HTTP/2.0", "", 505),
    ],
    ids=["headers", "target", "lower-case", "mixed-case", "version", "version-2"],
)
async def test_heads_beyond_the_standard_or_the_bound_are_refused(
    hot: bool, path: str, line: str, more: str, status: int
) -> None:
    async with running(hot=hot) as listener:
        head = f"{line.format(path)}\r\n{HEAD}{more}{chr(13) + chr(10) if more else ''}\r\n".encode()
        reply = await ask(listener, head)  # in one piece
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert (await ask(listener, post("t/store", b"x"))).status == 200


@BOTH_WAYS
async def test_one_empty_line_before_a_request_is_ignored(hot: bool) -> None:
    cold = f"GET /ping HTTP/1.1\r\n{HEAD}\r\n".encode()
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        # Old clients end a body with an extra line break; also with the next request in the same read.
        await stream.send_all(b"\r\n" + cold + b"\r\n" + post("t/store", b"x") + b"\r\n" + cold)
        assert [(await reader.reply()).status for _ in range(3)] == [200] * 3
        await stream.send_all(post("t/store", b"x"))
        assert (await reader.reply()).status == 200
        await stream.send_all(b"\r\n\r\n" + cold)
        assert (await reader.reply()).status == 400


async def test_a_head_that_is_dripped_has_one_deadline_at_either_listener(mock_clock: MockClock) -> None:
    async with running(header_timeout_s=10) as listener:
        async with await listener.connect() as stream:
            await stream.send_all(f"GET /ping HTTP/1.1\r\n{HEAD}\r\n".encode())
            assert (await Reader(stream).reply()).status == 200  # hypercorn is loaded now
        async with await listener.connect() as stream:
            await stream.send_all(b"G")  # might be for the lane
            await trio.testing.wait_all_tasks_blocked(0.01)
            mock_clock.jump(6)
            await stream.send_all(b"ET /ping")  # is for hypercorn
            await trio.testing.wait_all_tasks_blocked(0.01)
            mock_clock.jump(5)
            with trio.fail_after(PATIENCE_S), suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass


async def test_connections_leave_descriptors_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Descriptors, "allowed", 601)
    monkeypatch.setattr(Descriptors, "has_room_for", lambda self, descriptor: True)
    async with running() as listener:
        kept = [await listener.connect() for _ in range(601 // 4)]
        for stream in kept:
            await stream.send_all(post("t/publish"))
            assert (await Reader(stream).reply()).status == 200
        reply = await ask(listener, post("t/publish"))
        assert (reply.status, reply.code) == (503, "overloaded")
        assert b"LimitNOFILE" in reply.body
        for stream in kept:
            await stream.aclose()


@pytest.mark.parametrize(("allowed", "last"), [(1024, 895), (64, 47), (256, 191), (100_000, 99_871)])
def test_the_last_descriptors_are_for_files(monkeypatch: pytest.MonkeyPatch, allowed: int, last: int) -> None:
    monkeypatch.setattr(Descriptors, "allowed", allowed)
    assert Descriptors().has_room_for(last)
    assert not Descriptors().has_room_for(last + 1)


async def test_a_connection_with_one_of_the_last_descriptors_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Descriptors, "has_room_for", lambda self, descriptor: False)
    async with running() as listener:
        for _ in range(3):
            reply = await ask(listener, post("t/publish"))
            assert (reply.status, reply.code) == (503, "overloaded")
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
        "cannot accept connections at the moment"
    ]


async def test_a_server_whose_framework_cannot_be_loaded_says_so_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _Application._made
    failures = [OSError(24, "too many open files")]

    def failing(self: _Application) -> Any:
        if failures:
            raise failures.pop()
        return made(self)

    monkeypatch.setattr(_Application, "_made", failing)
    cold = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running() as listener:
        reply = await ask(listener, cold)
        assert (reply.status, reply.code) == (503, "overloaded")
        assert (await ask(listener, post("t/publish"))).status == 200
        assert (await ask(listener, cold)).status == 200


@BOTH_WAYS
async def test_a_stop_answers_requests_in_progress_and_closes_idle_connections(hot: bool) -> None:
    async with (
        running(hot=hot, grace_s=PATIENCE_S) as listener,
        await listener.connect() as resting,
        await listener.connect() as parked,
    ):
        await resting.send_all(post("t/publish"))
        reader = Reader(resting)
        assert (await reader.reply()).status == 200
        await parked.send_all(post("t/poll"))
        await until_parked(listener, 1)
        listener.stop.set()
        assert await reader.at_end()
        listener.toys.release.set()
        reader = Reader(parked)
        assert (await reader.reply()).headers["connection"] == "close"
        assert await reader.at_end()


@BOTH_WAYS
async def test_a_stop_cuts_parked_requests_after_the_grace_period(hot: bool) -> None:
    async with running(hot=hot, grace_s=0.1) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/poll"))
        await until_parked(listener, 1)
        listener.stop.set()
        with trio.fail_after(PATIENCE_S):
            await listener.ended.wait()
        assert listener.toys.cancelled.is_set()


@BOTH_WAYS
async def test_a_stop_cuts_a_reader_that_has_stopped_reading(hot: bool) -> None:
    async with running(hot=hot, grace_s=0.1) as listener, await listener.connect() as stream:
        await stream.send_all(post("endless/rollback"))
        await stream.receive_some(1)
        listener.stop.set()
        with trio.fail_after(PATIENCE_S):
            await listener.ended.wait()
        assert listener.toys.closed.is_set()


async def until_parked(listener: Listener, count: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while listener.toys.parked < count:
            await trio.lowlevel.checkpoint()
