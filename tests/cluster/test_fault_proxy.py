"""The proxy injects the chosen faults, and no others."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from tests.cluster.proxy import FAULTS, Fate, Once, Storm, open_proxy
from tests.patience import PATIENCE_S

REQUEST = b"\x00\x00\x00\x06please"


class Echo:
    """A server that answers each frame with itself, and records what it received."""

    def __init__(self):
        self.got = bytearray()
        self._news = trio.Event()

    async def gets(self, data):
        """Wait until the server has received as many bytes as ``data`` has, and check that they are equal."""
        with trio.fail_after(PATIENCE_S):
            while len(self.got) < len(data):
                await self._news.wait()
        assert self.got == data

    async def serve(self, stream):
        with_rest = b""
        async with stream:
            async for data in stream:
                self.got += data
                self._news.set()
                self._news = trio.Event()
                with_rest += data
                while len(with_rest) >= 4 and len(with_rest) >= 4 + int.from_bytes(with_rest[:4], "big"):
                    size = 4 + int.from_bytes(with_rest[:4], "big")
                    await stream.send_all(with_rest[:size])
                    with_rest = with_rest[size:]


@pytest.fixture
async def echo(nursery):
    server = Echo()
    listeners = await nursery.start(trio.serve_tcp, server.serve, 0)
    server.address = "127.0.0.1", listeners[0].socket.getsockname()[1]
    return server


@pytest.fixture
async def proxy(echo):
    async with open_proxy(echo.address, framed=True) as opened:
        yield opened


@pytest.fixture
async def talk(echo):
    """Return a function that connects to a proxy."""
    async with AsyncExitStack() as streams:

        async def connected(proxy):
            return await streams.enter_async_context(await trio.open_tcp_stream(*proxy.address))

        yield connected


async def whole(stream, size=10):
    """Return the received bytes, up to ``size`` or the end."""
    got = b""
    with trio.fail_after(PATIENCE_S):
        while len(got) < size and (more := await stream.receive_some()):
            got += more
    return got


async def ask(stream, request=REQUEST):
    await stream.send_all(request)
    return await whole(stream, len(request))


async def nothing_comes(stream):
    with trio.move_on_after(0.05):
        assert await stream.receive_some() == b"nothing"


async def test_requests_without_a_chosen_fault_pass(proxy, talk):
    stream = await talk(proxy)
    large = (1 << 20).to_bytes(4, "big") + bytes(1 << 20)
    assert await ask(stream) == REQUEST
    assert await ask(stream, large) == large
    assert (proxy.requests, dict(proxy.faults)) == (2, {})


async def test_a_lost_answer_never_arrives_and_its_request_did(proxy, echo, talk):
    proxy.choose = Once(b"please", Fate("lost answer"))
    stream = await talk(proxy)
    await stream.send_all(REQUEST)
    await echo.gets(REQUEST)
    await nothing_comes(stream)
    assert await ask(stream, b"\x00\x00\x00\x04next") == b"\x00\x00\x00\x04next"
    assert proxy.faults == {"lost answer": 1}


async def test_a_lost_request_never_arrives(proxy, echo, talk):
    proxy.choose = Once(b"please", Fate("lost request"))
    stream = await talk(proxy)
    await stream.send_all(REQUEST)
    await nothing_comes(stream)
    assert echo.got == b""
    assert await ask(stream) == REQUEST


async def test_a_late_request_arrives_though_its_sender_has_gone(proxy, echo, talk):
    proxy.choose = Once(b"please", Fate("late request", 0.5))
    stream, sent_s = await talk(proxy), trio.current_time()
    await stream.send_all(REQUEST)
    await nothing_comes(stream)
    await stream.aclose()
    assert echo.got == b"" or trio.current_time() - sent_s >= 0.5
    with trio.fail_after(PATIENCE_S):
        await proxy.landed.wait()
    assert echo.got == REQUEST


async def test_a_late_answer_arrives_late(proxy, talk):
    proxy.choose = Once(b"please", Fate("late answer", 0.2))
    stream, begun_s = await talk(proxy), trio.current_time()
    assert await ask(stream) == REQUEST
    assert trio.current_time() - begun_s >= 0.2


async def test_a_cut_request_arrives_in_half_and_the_connection_ends(proxy, echo, talk):
    proxy.choose = Once(b"please", Fate("cut request"))
    stream = await talk(proxy)
    await stream.send_all(REQUEST)
    assert await ended(stream) == b""
    await echo.gets(REQUEST[: len(REQUEST) // 2])
    assert await ask(await talk(proxy)) == REQUEST


async def test_a_cut_answer_arrives_in_half_and_the_connection_ends(proxy, echo, talk):
    proxy.choose = Once(b"please", Fate("cut answer"))
    stream = await talk(proxy)
    await stream.send_all(REQUEST)
    assert await ended(stream) == REQUEST[: len(REQUEST) // 2]
    assert echo.got == REQUEST


async def ended(stream):
    """Return the bytes received until the connection ends, cleanly or not."""
    got = b""
    with trio.fail_after(PATIENCE_S):
        try:
            while more := await stream.receive_some():
                got += more
        except trio.BrokenResourceError:
            pass
    return got


async def test_a_stalled_connection_continues_where_it_was(proxy, echo, talk):
    stream = await talk(proxy)
    assert await ask(stream) == REQUEST
    proxy.stall()
    await stream.send_all(REQUEST)
    other = await talk(proxy)
    await other.send_all(REQUEST)
    await nothing_comes(stream)
    await nothing_comes(other)
    assert echo.got == REQUEST
    proxy.heal()
    assert await whole(stream) == REQUEST
    assert await whole(other) == REQUEST


async def test_one_direction_may_stall_while_the_other_continues(proxy, echo, talk):
    stream = await talk(proxy)
    assert await ask(stream) == REQUEST
    proxy.stall("back")
    await stream.send_all(REQUEST)
    await echo.gets(REQUEST * 2)
    await nothing_comes(stream)
    proxy.heal()
    assert await whole(stream) == REQUEST
    proxy.stall("there")
    await stream.send_all(REQUEST)
    await nothing_comes(stream)
    assert echo.got == REQUEST * 2
    proxy.heal()
    assert await whole(stream) == REQUEST
    assert echo.got == REQUEST * 3


async def test_a_refused_client_is_cut_until_the_fault_is_over(proxy, echo, talk):
    stream = await talk(proxy)
    assert await ask(stream) == REQUEST
    proxy.refuse()
    assert await ended(stream) == b""
    assert await ended(await talk(proxy)) == b""
    proxy.heal()
    assert await ask(await talk(proxy)) == REQUEST


async def test_a_dead_server_ends_the_connection(proxy, talk):
    proxy.target = ("127.0.0.1", 1)
    assert await ended(await talk(proxy)) == b""


async def test_a_lost_answer_hides_only_the_answer_of_its_own_request(echo, talk):
    async with open_proxy(echo.address) as proxy:
        stream = await talk(proxy)
        assert await ask(stream) == REQUEST
        proxy.choose = Once(b"please", Fate("lost answer"))
        await stream.send_all(REQUEST)
        await echo.gets(REQUEST * 2)
        await nothing_comes(stream)
        assert await ask(stream) == REQUEST


def test_a_storm_is_the_same_for_the_same_seed_and_makes_every_fault():
    fates = [
        [storm(b"") for _ in range(1000)] for storm in (Storm(1, 0.2, 1.0), Storm(1, 0.2, 1.0), Storm(2, 0.2, 1.0))
    ]
    assert fates[0] == fates[1] != fates[2]
    made = [fate.fault for fate in fates[0] if fate.fault != "none"]
    assert set(made) == set(FAULTS)
    assert 150 < len(made) < 250
