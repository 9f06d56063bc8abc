"""HTTP/1.1 with applications and requests that break its rules: bare applications answer here."""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any

import pytest
import trio
import trio.testing

from plainsong.protocol.errors import ReplicationUnavailable
from tests.broker.broker_in_process import in_process
from tests.broker.listeners import Listener, Reader, ask, post, running
from tests.patience import PATIENCE_S

CHUNKED = "Transfer-Encoding: chunked"


def get(target: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: localhost", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def all_of(stream: trio.abc.ReceiveStream) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    received = b""
    with trio.fail_after(PATIENCE_S):
        async for data in stream:
            received += data
    return received


async def answer(send: Any, body: bytes = b"", status: int = 200, headers: Any = None) -> None:
    if headers is None:
        headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def test_nothing_after_a_malformed_body_is_a_request_though_its_answer_left_first() -> None:
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await answer(send, b"early")
        await receive()

    async with running(app=app) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("/zz", b"", CHUNKED) + b"zz\r\n")
        assert (await reader.reply()).body == b"early"
        await stream.send_all(b"0\r\n\r\n" + get("/smuggled"))
        assert await reader.at_end()
    assert paths == ["/zz"]


@pytest.mark.parametrize(
    ("target", "path", "raw_path", "query"),
    [
        ("http://127.0.0.1:80/v1/a%3Fb?c=1", "/v1/a?b", b"/v1/a%3Fb", b"c=1"),
        ("HTTPS://127.0.0.1:80?c=/d", "/", b"/", b"c=/d"),
        ("http://127.0.0.1:80", "/", b"/", b""),
    ],
)
async def test_the_scheme_and_host_of_a_target_are_not_part_of_its_path(
    target: str, path: str, raw_path: bytes, query: bytes
) -> None:
    scopes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await answer(send)

    async with running(app=app) as listener:
        assert (await ask(listener, get(target))).status == 200
    (scope,) = scopes
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == (path, raw_path, query)
    assert [value for name, value in scope["headers"] if name == b"host"] == [b"127.0.0.1:80"]


async def test_a_request_through_a_proxy_has_the_answer_of_the_same_request_without_one() -> None:
    async with running() as listener:
        assert (await ask(listener, get("http://localhost/ping"))).body == b"OK"
        through_proxy = post("t/store", b"a").replace(b" /", b" http://localhost/", 1)
        assert (await ask(listener, through_proxy)).body == (await ask(listener, post("t/store", b"a"))).body


@pytest.mark.parametrize(
    "target",
    [
        "?a=1",
        "a",
        "*",
        "http://[bad",
        "http://",
        "http:///a",
        "x://[",
        "ftp://localhost/",
        "http://me@localhost/",
        "a:80",
    ],
)
async def test_a_target_that_is_not_a_path_is_refused_and_nothing_is_logged(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(get(target))
        reader = Reader(stream)
        reply = await reader.reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (400, "invalid_parameter", "close")
        assert await reader.at_end()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_star_asks_for_the_options_of_the_whole_server() -> None:
    async with running() as listener:
        assert (await ask(listener, get("*", method="OPTIONS"))).status == 404


async def test_the_host_of_a_target_wins_over_its_header() -> None:
    async with running() as listener:
        assert (await ask(listener, get("http://rebound.example/ping"))).status == 403


async def test_a_client_that_resets_its_connection_after_its_request_is_not_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = trio.Event()
    clients = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clients.append(scope["client"])
        asked.set()
        await answer(send)

    async with running(app=app) as listener:
        stream = await listener.connect()
        await stream.send_all(get("/"))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()  # before the server's task has run
        with trio.fail_after(PATIENCE_S):
            await asked.wait()
    assert clients == [None]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def _fails(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("sent", ["abc.1", "no id"])
async def test_the_log_says_under_the_id_of_its_answer_why_a_request_failed(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(app=_fails) as listener:
        reply = await ask(listener, get("/", f"X-Request-Id: {sent}"))
    (record,) = [record for record in caplog.records if record.getMessage() == "a request failed"]
    assert (reply.status, reply.headers["x-request-id"]) == (500, record.__dict__["request_id"])
    assert (reply.headers["x-request-id"] == sent) == (sent == "abc.1")


async def test_a_head_request_that_fails_is_answered_with_a_head_alone() -> None:
    async with running(app=_fails) as listener, await listener.connect() as stream:
        await stream.send_all(get("/", method="HEAD"))
        assert (await all_of(stream)).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("announced", [b"4", b"6"])
@pytest.mark.parametrize("pieces", [1, 5])
async def test_an_answer_that_contradicts_its_announced_length_ends_its_connection(
    announced: bytes, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", announced)]})
        for piece in ([b"hello"], [b"h", b"e", b"l", b"l", b"o"])[pieces == 5]:
            await send({"type": "http.response.body", "body": piece, "more_body": piece != b"hello"[-len(piece) :]})

    async with running(app=app) as listener, await listener.connect() as stream:
        await stream.send_all(get("/") + get("/"))
        with pytest.raises(trio.BrokenResourceError):
            await all_of(stream)
    (record,) = [record for record in caplog.records if record.getMessage() == "a streamed answer was cut off"]
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


async def test_an_answer_that_breaks_off_for_a_known_reason_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        raise ExceptionGroup("", [ReplicationUnavailable("the lease is over")])

    async with running(app=app) as listener, await listener.connect() as stream:
        await stream.send_all(get("/"))
        with pytest.raises(trio.BrokenResourceError):
            await all_of(stream)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (record.getMessage(), record.levelname, record.exc_info) == (
        "a streamed answer was cut off",
        "WARNING",
        None,
    )
    assert record.__dict__["why"] == "the lease is over"


@pytest.mark.parametrize("status", [200, 304])
async def test_an_answer_without_a_body_may_announce_the_length_of_the_body_it_would_have(status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"", status, [(b"content-length", b"5")])

    async with running(app=app) as listener, await listener.connect() as stream:
        method = "HEAD" if status == 200 else "GET"
        await stream.send_all(get("/", method=method) + get("/", "Connection: close", method=method))
        received = await all_of(stream)
    assert received.count(b"HTTP/1.1 %d" % status) == 2


@pytest.mark.parametrize("length", [5, 7])
async def test_a_stream_that_contradicts_its_length_ends_its_connection(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(post(f"length-{length}/rollback"))
        with pytest.raises(trio.BrokenResourceError):
            await all_of(stream)
    assert [record for record in caplog.records if record.getMessage() == "a streamed answer was cut off"]


UPGRADE = ("Upgrade: websocket", "Connection: keep-alive", "Connection: Upgrade, x", "Sec-WebSocket-Version: 13")
STREAM = "/v1/namespaces/ns/topics/t/stream"


@pytest.mark.parametrize(
    ("request_of", "status"),
    [
        ({}, 101),
        ({"body": "Content-Length: 0"}, 101),
        ({"body": "Content-Length: 5"}, 400),
        ({"body": CHUNKED}, 400),
        ({"version": "1.0"}, 400),
    ],
    ids=["plain", "empty", "length", "chunked", "1.0"],
)
async def test_a_websocket_is_opened_by_a_request_of_http_1_1_without_a_body(
    request_of: dict[str, str], status: int
) -> None:
    async with in_process(listener="hot") as daemon:
        await daemon.create()
        url = daemon.http.base_url
        async with await trio.open_tcp_stream(url.host, url.port) as stream:
            headers = [*UPGRADE, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", request_of.get("body", "X: y")]
            await stream.send_all(get(STREAM, *headers, version=request_of.get("version", "1.1")))
            assert (await Reader(stream)._until(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d " % status)


async def test_an_answer_without_content_has_no_length() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"", 204)

    async with running(app=app) as listener, await listener.connect() as stream:
        await stream.send_all(get("/") + get("/", "Connection: close"))
        received = await all_of(stream)
    assert received.count(b"HTTP/1.1 204") == 2
    assert b"content-length" not in received.lower()


@pytest.mark.parametrize("head", [(599, []), (200, [(b"content-length", b"a")])], ids=["status", "length"])
async def test_an_answer_whose_head_cannot_be_sent_is_an_internal_error(head: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"", *head)

    async with running(app=app) as listener:
        reply = await ask(listener, get("/"))
        assert (reply.status, reply.code, reply.headers["connection"]) == (500, "internal", "close")


@pytest.mark.parametrize("request_of", [post("t/store", b"a"), get("/ping")], ids=["hot", "application"])
async def test_an_empty_line_after_an_answer_leaves_its_connection_idle(request_of: bytes) -> None:
    async with running(keep_alive_s=0.3, header_timeout_s=1000) as listener:
        for at_once in (False, True):
            async with await listener.connect() as stream:
                reader = Reader(stream)
                await stream.send_all(request_of + b"\r\n" * at_once)
                assert (await reader.reply()).status == 200
                await stream.send_all(b"\r\n" * (not at_once))
                assert await reader.at_end()


@pytest.mark.parametrize("request_of", [post("t/store", b"a"), get("/ping")], ids=["hot", "application"])
async def test_requests_may_be_separated_by_empty_lines_that_arrive_alone(request_of: bytes) -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for _ in range(3):
            await stream.send_all(request_of)
            assert (await reader.reply()).status == 200
            await stream.send_all(b"\r\n")
            await trio.testing.wait_all_tasks_blocked()


async def test_a_second_empty_line_is_not_a_head() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("t/store", b"a") + b"\r\n")
        assert (await reader.reply()).status == 200
        await stream.send_all(b"\r\n")
        assert (await reader.reply()).status == 400


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [("Content-Length: 65536", True), ("Content-Length: 65537", False), (CHUNKED, False)],
    ids=["short", "long", "chunked"],
)
async def test_a_client_is_not_asked_for_a_long_body_that_its_answer_did_not_need(body: str, is_kept: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"early")

    async with running(app=app) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("/", b"", body, "Expect: 100-continue"))
        if is_kept:
            assert (await reader.reply()).status == 100
        reply = await reader.reply()
        assert (reply.status, "connection" in reply.headers) == (200, not is_kept)
        if is_kept:
            await stream.send_all(bytes(65536) + get("/"))
            assert (await reader.reply()).status == 200
        else:
            assert await reader.at_end()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/nowhere", 404),
        ("PATCH", "/v1/namespaces/ns/topics/t", 405),
        ("PUT", "/v1/namespaces/ns/topics/t", 413),
    ],
)
async def test_a_client_that_waits_to_send_its_body_is_refused_without_it(method: str, path: str, status: int) -> None:
    async with in_process(listener="application") as daemon, trio.SocketStream(trio.socket.socket()) as stream:
        await stream.socket.connect((daemon.http.base_url.host, daemon.http.base_url.port))
        await stream.send_all(get(path, "Content-Length: 100000", "Expect: 100-continue", method=method))
        assert (await Reader(stream).reply()).status == status


async def slow_reader(listener: Listener, request_of: bytes) -> trio.SocketStream:
    """Connect a client whose answer sits unread in the kernel, mostly in the server's buffer."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(("127.0.0.1", listener.port))
    stream = trio.SocketStream(sock)
    await stream.send_all(request_of)
    with trio.fail_after(PATIENCE_S):
        await trio.lowlevel.wait_readable(sock)
    return stream


@pytest.mark.parametrize("ends", ["rested too long", "server stops"])
async def test_an_answer_that_was_sent_arrives_though_its_connection_has_ended(ends: str) -> None:
    keep_alive_s = 0.1 if ends == "rested too long" else 1000
    async with (
        running(keep_alive_s=keep_alive_s, max_connections=1) as listener,
        await slow_reader(listener, post("t/store", bytes(20_000))) as stream,
    ):
        if ends == "server stops":
            listener.stop.set()
            with trio.fail_after(PATIENCE_S):
                await listener.ended.wait()
        else:
            with trio.fail_after(PATIENCE_S):
                while (await ask(listener, get("/ping", "Connection: close"))).status == 503:
                    await trio.testing.wait_all_tasks_blocked()
        reader = Reader(stream)
        assert len((await reader.reply()).body) > 40_000
        assert await reader.at_end()


async def test_the_rest_of_a_body_is_read_over_http2_after_an_application_gave_up_waiting_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pieces = [{"type": "http.request", "body": b"piece", "more_body": more} for more in (True, True, False)]

    async def receive() -> Any:
        await trio.lowlevel.checkpoint()
        return pieces.pop(0)

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with trio.CancelScope() as impatient:
            impatient.cancel()
            await receive()
        await answer(send, b"early")

    async with in_process() as daemon:
        daemon.asgi._app = app
        scope = {"type": "http", "http_version": "2", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        await daemon.asgi({**scope, "scheme": "http", "client": ("127.0.0.1", 1), "extensions": {}}, receive, send)
    assert not pieces
