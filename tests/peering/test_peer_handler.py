"""The ordinary port serves links too: over TCP, alongside HTTP, with and without hot routes, until the server stops."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import trio
import trio.lowlevel
from linked import Caught, echo

from broker.http.budgets import BodyBudget
from broker.http.handlers import RequestTasks
from broker.http.reactor import open_reactor
from broker.http.server import serve_http
from broker.link.client import PAUSES_S, Links
from broker.link.flow import LinkBroken, Reply
from broker.link.server import in_task, peer_handler
from broker.link.wire import LinkBounds
from plainsong.protocol.link import PREFACE
from tests.broker.listeners import SETTINGS, Toys, toy_app
from tests.patience import PATIENCE_S

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])


class Serving:
    """A server with toy handlers and a peer listener."""

    def __init__(self) -> None:
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.address = ""
        self.streams: list[trio.SocketStream] = []

    async def connect(self) -> trio.SocketStream:
        """Return a connection that is closed with the server."""
        stream = await trio.open_tcp_stream("127.0.0.1", int(self.address.rpartition(":")[2]))
        self.streams.append(stream)
        return stream


ECHO = in_task(echo)


@asynccontextmanager
async def serving(handler=ECHO, *, hot: bool = True, tls=None, secret=None, **settings):
    server = Serving()
    changed = replace(SETTINGS, **settings)
    async with trio.open_nursery() as nursery:
        toys = Toys(RequestTasks(nursery))

        async def run(*, task_status) -> None:
            async with open_reactor(changed.keep_alive_s) as reactor:
                await serve_http(
                    changed,
                    toys.endpoints if hot else (),
                    lambda: toy_app(toys, changed),
                    reactor=reactor,
                    binds=["127.0.0.1:0"],
                    budget=BodyBudget(changed.max_inflight_bytes),
                    stop=server.stop,
                    grace_s=PATIENCE_S,
                    peers=peer_handler(handler, secret=secret),
                    tls=tls,
                    task_status=task_status,
                )
            server.ended.set()

        (server.address,) = await nursery.start(run)
        yield server
        for stream in server.streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def links(bounds: LinkBounds | None = None, **more):
    async with trio.open_nursery() as nursery:
        # Slow peers must not be given up on here.
        yield Links(nursery, bounds or LinkBounds(silence_s=PATIENCE_S, dial_s=PATIENCE_S), **more)
        nursery.cancel_scope.cancel()


@BOTH_WAYS
async def test_links_and_http_share_one_port(hot):
    async with serving(hot=hot) as server, links() as to:
        link = await to.to(server.address)
        assert (await link.call("echo", 1, b"x" * 1_000_000)).body == b"x" * 1_000_000
        stream = await server.connect()
        await stream.send_all(
            b"POST /v1/namespaces/n/topics/t/publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        )
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        assert await to.to(server.address) is link


@BOTH_WAYS
async def test_a_preface_that_arrives_in_pieces_is_accepted(hot):
    async with serving(hot=hot) as server:
        stream = await server.connect()
        for byte in PREFACE:
            await stream.send_all(bytes([byte]))
        said = b""
        while len(said) < len(PREFACE):
            said += await stream.receive_some(len(PREFACE) - len(said))  # more bytes may follow
        assert said == PREFACE


async def test_a_connection_that_has_spoken_http_never_becomes_a_link():
    async with serving() as server:
        stream = await server.connect()
        request = b"POST /v1/namespaces/n/topics/t/publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        await stream.send_all(request + PREFACE)
        said = b""
        async for some in stream:
            said += some
        assert said.startswith(b"HTTP/1.1 200")
        assert PREFACE not in said


@BOTH_WAYS
async def test_a_stopping_server_answers_pending_calls_and_releases_its_peers(hot):
    begun, gate = trio.Event(), trio.Event()

    async def held(call):
        begun.set()
        await gate.wait()
        return Reply("done")

    async with serving(in_task(held), hot=hot) as server, links() as to:
        link = await to.to(server.address)
        got = []

        async def one() -> None:
            got.append((await link.call("x", None)).value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await begun.wait()
            server.stop.set()
            while link.is_open:
                await trio.lowlevel.checkpoint()
            gate.set()
        await server.ended.wait()
        assert got == ["done"]
        with pytest.raises(LinkBroken) as caught:
            await to.to(server.address)
        assert not caught.value.sent


async def test_a_link_is_dialled_again_after_it_broke():
    async with serving() as server, links() as to:
        first = await to.to(server.address)
        await first.call("echo", 1)
        first.cut()
        await first.ended.wait()
        second = await to.to(server.address)
        assert second is not first
        assert (await second.call("echo", 2)).value == 2


async def test_many_concurrent_callers_share_one_link():
    async with serving() as server, links() as to:
        found = []

        async def ask() -> None:
            found.append(await to.to(server.address))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
        assert len(set(map(id, found))) == 1


async def test_an_unreachable_peer_is_not_dialled_all_the_time(mock_clock):
    attempts = 0  # within one moment: the clock does not advance

    async def refused(address):
        nonlocal attempts
        attempts += 1
        raise ConnectionRefusedError(address)

    async with links(dial=refused) as to:
        for _ in range(50):
            with pytest.raises(LinkBroken) as caught:
                await to.to("127.0.0.1:1")
            assert not caught.value.sent
        assert attempts <= 2


async def test_attempts_are_further_apart_the_longer_they_fail(autojump_clock):
    attempts = []

    async def refused(address):
        attempts.append(trio.current_time())
        raise ConnectionRefusedError(address)

    async with links(dial=refused) as to:
        while trio.current_time() < 10:
            with pytest.raises(LinkBroken):
                await to.to("a:1")
            await trio.sleep(0.01)
    apart = [later - earlier for earlier, later in pairwise(attempts)]
    assert apart[0] == pytest.approx(PAUSES_S[0], abs=0.02)
    assert apart[-1] == pytest.approx(PAUSES_S[-1], abs=0.02)


async def test_dialling_times_out(autojump_clock):
    async def never(address):
        await trio.sleep_forever()

    async with links(LinkBounds(dial_s=2), dial=never) as to:
        with pytest.raises(LinkBroken, match="does not answer"):
            await to.to("a:1")
        assert trio.current_time() == pytest.approx(2, abs=0.1)


async def test_a_server_that_is_not_a_peer_gets_no_request_and_is_left_alone_for_a_while(mock_clock):
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    async def web_server(stream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener.setblocking(False)
    async with links() as to, trio.open_nursery() as nursery:
        serve = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        nursery.start_soon(partial(trio.serve_listeners, web_server, [serve]))
        caught = Caught()
        await caught.run((await to.to(address)).call("x", None))
        assert isinstance(caught.error, LinkBroken)
        assert not caught.error.sent
        with pytest.raises(LinkBroken, match="not a peer"):
            await to.to(address)  # still too early: the clock does not advance
        nursery.cancel_scope.cancel()
    listener.close()


async def test_closing_all_links_ends_each_and_dials_no_more():
    async with serving() as server, links() as to:
        link = await to.to(server.address)
        await link.call("echo", 1)
        await to.aclose()
        assert link.ended.is_set()
        with pytest.raises(LinkBroken, match="closed"):
            await to.to(server.address)
