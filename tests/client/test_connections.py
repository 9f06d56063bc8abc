"""The synchronous client's connections, to a server that sends exactly the bytes that a test gives it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Any

import httpcore2
import pytest
import trio
from trio.testing import MockClock

from plainsong._async._pool import Pool as AsyncPool
from plainsong._sync import _pool
from plainsong._sync._pool import Exchange, Pool
from plainsong.calls import Answer, Failure, Request, Send
from plainsong.errors import Closed
from plainsong.settings import Settings
from plainsong.transport.async_http import exchange
from tests.client.simulation import settings
from tests.patience import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#: A step of a handler: bytes to send, None to close, or a function of the socket.
Step = bytes | None | Callable[[socket.socket], None]


class Server:
    """Reads complete requests, and answers each with the next of ``steps``; the last step repeats."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps) or [OK]
        self.connections = 0
        self.requests: list[bytes] = []
        self._done = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                self._open.append(near)
                self._threads.append(threading.Thread(target=self._serve, args=(near,), daemon=True))
                self._threads[-1].start()

    def _serve(self, near: socket.socket) -> None:
        with suppress(OSError):
            while request := _request(near):
                self.requests.append(request)
                step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
                if step is None:
                    break
                if callable(step):
                    step(near)
                else:
                    near.sendall(step)
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in (self._listener, *self._open):
            each.close()


def _request(near: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = near.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += near.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*steps: Step) -> Server:
        servers.append(Server(*steps))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def pools() -> Iterator[Callable[..., Pool]]:
    opened: list[Pool] = []

    def open_pool(url: str, max_connections: int = 10, token: str | None = None) -> Pool:
        settings = Settings.checked(
            url,
            namespace="default",
            token=token,
            connect_timeout_s=PATIENCE_S,
            request_timeout_s=PATIENCE_S,
            deadline_s=PATIENCE_S,
            retry=True,
            max_connections=max_connections,
        )
        opened.append(Pool(settings))
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close()


def ask(
    pool: Pool, url: str, *, body: bytes = b"", timeout_s: float = PATIENCE_S, path: str = "/v1/x"
) -> Answer | Failure:
    return pool.carry(Send(url, Request("POST", path, (("X-Name", "value"),), body), PATIENCE_S, timeout_s))


def test_requests_one_after_the_other_share_a_connection(serve, pools):
    server = serve()
    pool = pools(server.url)
    answers = [ask(pool, server.url, body=b"x" * size) for size in (0, 3, 200_000)]
    assert [(each.status, each.body) for each in answers] == [(200, b"ok")] * 3
    assert server.connections == 1


def test_a_request_names_its_target_its_length_and_its_sender(serve, pools):
    server = serve()
    host = server.url.removeprefix("http://")
    ask(pools(server.url, token="secret"), server.url + "/prefix", body=b"abc", path="/v1/y?z=1")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert body == b"abc"
    assert head.split(b"\r\n") == [
        b"POST /prefix/v1/y?z=1 HTTP/1.1",
        b"Host: " + host.encode(),
        b"Content-Length: 3",
        b"X-Name: value",
        b"Authorization: Bearer secret",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nabcdef",
    ],
    ids=["chunked", "after another head"],
)
def test_an_answer_is_read_in_full_in_every_framing(serve, pools, answer):
    server = serve(answer)
    pool = pools(server.url)
    assert [ask(pool, server.url).body for _ in range(2)] == [b"abcdef"] * 2
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"?",
    ],
    ids=["said so", "HTTP/1.0", "bytes after the answer"],
)
def test_a_connection_that_cannot_be_reused_is_replaced(serve, pools, answer):
    server = serve(answer, OK)
    pool = pools(server.url)
    assert [ask(pool, server.url).body for _ in range(2)] == [b"ok"] * 2
    assert server.connections == 2


def test_a_kept_connection_that_the_server_has_closed_is_replaced_before_anything_is_sent(serve, pools):
    closed = threading.Event()

    def answer_and_close(near: socket.socket) -> None:
        near.sendall(OK)
        near.shutdown(socket.SHUT_RDWR)
        closed.set()

    server = serve(answer_and_close, OK)
    pool = pools(server.url)
    ask(pool, server.url)
    assert closed.wait(PATIENCE_S)
    (kept,) = pool._connections._idle
    assert select.select([kept.socket], [], [], PATIENCE_S)[0], "the client has received the end"
    assert ask(pool, server.url).body == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [None, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"HTTP/1.1 2", b"SSH-2.0-OpenSSH\r\n"],
    ids=["none", "cut in the body", "cut in the head", "not HTTP"],
)
def test_a_broken_answer_counts_as_lost(serve, pools, answer):
    def then_close(near: socket.socket) -> None:
        if answer:
            near.sendall(answer)
        near.shutdown(socket.SHUT_RDWR)

    server = serve(then_close, OK)
    pool = pools(server.url)
    failure = ask(pool, server.url)
    assert (type(failure), failure.kind) == (Failure, "lost")
    assert failure.detail
    assert ask(pool, server.url).body == b"ok"


def test_the_time_limit_covers_the_whole_exchange_however_the_bytes_trickle(serve, pools):
    stop = threading.Event()

    def trickle(near: socket.socket) -> None:
        near.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.02):
            near.sendall(b"x")

    server = serve(trickle, OK)
    pool = pools(server.url)
    failure = ask(pool, server.url, timeout_s=0.3)
    stop.set()
    assert (failure.kind, failure.detail) == ("timeout", "no answer within 0.3 s")
    assert ask(pool, server.url).body == b"ok"


def test_a_request_that_times_out_before_it_is_sent_did_not_happen(serve, pools):
    server = serve()
    failure = ask(pools(server.url), server.url, timeout_s=0)
    assert failure.kind == "connect"
    assert server.requests == []


PIECES = [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", *[b"ab"] * 5]


@pytest.mark.parametrize(
    ("longest_s", "comes"),
    [(inf, True), (121.0, True), (119.0, False), (None, False)],
    ids=["", "in time", "late", "whole"],
)
def test_a_streamed_answer_has_a_time_limit_for_each_piece_and_for_its_end(monkeypatch, longest_s, comes):
    now_s = 1000.0
    left = list(PIECES)

    class Socket:
        limit_s = 0.0

        def settimeout(self, seconds: float) -> None:
            self.limit_s = seconds

        def sendall(self, data: bytes) -> None:
            pass

        def recv(self, most_bytes: int) -> bytes:
            nonlocal now_s
            now_s += min(20.0, self.limit_s)
            if self.limit_s < 20:
                raise TimeoutError
            return left.pop(0)

    monkeypatch.setattr(_pool, "monotonic", lambda: now_s)
    exchange = Exchange(Send("http://one", Request("POST", "/v1/x"), 5.0, 30.0, None, longest_s), [])
    raw: Any = Socket()
    if comes:
        assert exchange.run(raw, now_s + 30).body == b"ab" * 5
        assert now_s == 1120
    else:
        with pytest.raises(TimeoutError):
            exchange.run(raw, now_s + 30)
        assert now_s == 1000 + (longest_s or 30)


@pytest.mark.parametrize(("longest_s", "comes"), [(inf, True), (121.0, True), (99.0, False), (None, False)])
def test_a_streamed_answer_has_the_same_limits_on_an_event_loop(monkeypatch, longest_s, comes):
    async def pieces() -> AsyncIterator[bytes]:
        for piece in PIECES[1:]:
            await trio.sleep(20)
            yield piece

    class Connections:
        async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
            assert request.extensions["timeout"]["read"] == 30, "httpcore limits each piece"
            await request.extensions["trace"]("http11.send_request_headers.started", {})
            return httpcore2.Response(200, content=pieces())

    async def main() -> Answer | Failure:
        pool = AsyncPool(settings("http://one"))
        monkeypatch.setattr(pool, "_pool_for", lambda url: Connections())
        answer = await pool.carry(Send("http://one", Request("POST", "/v1/x"), 5.0, 30.0, None, longest_s))
        if not comes:
            assert trio.current_time() - began_s == pytest.approx(longest_s or 30, abs=0.1)
        return answer

    clock = MockClock(autojump_threshold=0)
    began_s = clock.current_time()
    answer = trio.run(main, clock=clock)
    assert answer.body == b"ab" * 5 if comes else answer.kind == "timeout"


def test_the_error_of_an_exchange_names_the_limit_that_has_passed():
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            await trio.sleep(20)
            yield b"x"

    class Connections:
        async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
            await request.extensions["trace"]("http11.send_request_headers.started", {})
            return httpcore2.Response(200, content=pieces())

    async def main() -> Answer | Failure:
        send = Send("http://one", Request("POST", "/v1/x"), 5.0, 30.0)
        connections: Any = Connections()
        return await exchange(connections, send, 119.0)

    failure = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert (failure.kind, failure.detail) == ("timeout", "no answer within 119 s")


def test_an_answer_that_arrives_before_the_body_was_sent_is_read(serve, pools):
    """A server that refuses a large body closes the connection; its answer contains the reason."""
    answer = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            near, _ = listener.accept()
            with near:
                near.recv(100)
                near.sendall(answer)
                near.shutdown(socket.SHUT_WR)
                while near.recv(1 << 20):
                    pass

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        refused = ask(pools(url), url, body=bytes(1 << 20))
        assert (refused.status, refused.body) == (413, b"big")
        thread.join(PATIENCE_S)


def test_a_refused_connection_and_an_unknown_name_send_nothing(pools):
    with socket.socket() as taken:  # reserves a port on which no server listens
        taken.bind(("127.0.0.1", 0))
        for nowhere in (f"http://127.0.0.1:{taken.getsockname()[1]}", "http://no-such-host.invalid:1"):
            failure = ask(pools(nowhere), nowhere)
            assert (failure.kind, bool(failure.detail)) == ("connect", True)


def test_more_requests_than_connections_wait_for_one_within_their_time(serve, pools):
    under_way, release = threading.Event(), threading.Event()

    def wait(near: socket.socket) -> None:
        under_way.set()
        release.wait(PATIENCE_S)
        near.sendall(OK)

    server = serve(wait, OK)
    pool = pools(server.url, max_connections=1)
    first: list[Answer | Failure] = []
    thread = threading.Thread(target=lambda: first.append(ask(pool, server.url)))
    thread.start()
    assert under_way.wait(PATIENCE_S)
    failure = ask(pool, server.url, timeout_s=0.05)
    assert (failure.kind, "max_connections" in failure.detail) == ("connect", True)
    release.set()
    thread.join(PATIENCE_S)
    assert first[0].body == b"ok"
    assert ask(pool, server.url).body == b"ok"
    assert server.connections == 1


def test_idle_connections_of_other_servers_make_room_when_all_are_in_use(serve, pools):
    one, other = serve(), serve()
    pool = pools(one.url, max_connections=1)
    for server in (one, other, one):
        assert ask(pool, server.url).body == b"ok"
    assert (one.connections, other.connections) == (2, 1)


def test_closing_ends_requests_under_way_and_refuses_new_ones(serve, pools):
    under_way = threading.Event()

    def silent(near: socket.socket) -> None:
        under_way.set()
        near.recv(1)

    server = serve(silent)
    pool = pools(server.url)
    found: list[Answer | Failure] = []
    thread = threading.Thread(target=lambda: found.append(ask(pool, server.url)))
    thread.start()
    assert under_way.wait(PATIENCE_S)
    pool.close()
    thread.join(PATIENCE_S)
    assert (found[0].kind, found[0].detail) == ("lost", "the connection was closed here")
    with pytest.raises(Closed):
        ask(pool, server.url)


def test_a_forked_child_opens_its_own_connections_and_leaves_those_of_its_parent_alone(serve, pools):
    server = serve()
    pool = pools(server.url)
    ask(pool, server.url)
    child = os.fork()
    if child == 0:
        answer = ask(pool, server.url)
        pool.close()
        os._exit(0 if isinstance(answer, Answer) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(pool, server.url).body == b"ok"
    assert server.connections == 2


def test_the_client_for_threads_loads_no_event_loop():
    script = (
        "import sys, plainsong; plainsong.Client().close(); import plainsong._sync.stream; "
        "print(sorted({'trio', 'anyio', 'asyncio', 'httpcore2', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
