"""The daemon ignores an upgrade that it does not support, and answers the request as if no upgrade had been offered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.broker.listeners import Reader, post, running

if TYPE_CHECKING:
    from tests.broker.listeners import Listener

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
#: Upgrade offers of real clients: HTTP/2 from the JDK and curl, a WebSocket, an unknown protocol, and several.
OFFERS = pytest.mark.parametrize(
    "offer",
    [
        (
            "Connection: Upgrade, HTTP2-Settings",
            "Upgrade: h2c",
            "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        ),
        (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        ),
        ("Connection: keep-alive, Upgrade", "Upgrade: TLS/1.2, gopher/3"),
        ("Upgrade: h2c",),
    ],
    ids=["h2c", "websocket", "unknown", "not-of-this-hop"],
)
BODIES = pytest.mark.parametrize("body", [b"", b"hello"], ids=["empty", "body"])


@BOTH_WAYS
@OFFERS
@BODIES
async def test_a_post_that_offers_an_upgrade_is_answered_and_its_connection_kept(
    hot: bool, offer: tuple[str, ...], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for _ in range(3):
            await stream.send_all(post("t/store", body, *offer))
            reply = await reader.reply()
            assert (reply.status, json.loads(reply.body)["body"]) == (200, body.hex())
        await stream.send_all(post("t/publish", body, *offer) * 2)
        assert [(await reader.reply()).status for _ in range(2)] == [200, 200]
    assert not caplog.records


@BOTH_WAYS
@OFFERS
async def test_a_chunked_body_after_an_offered_upgrade_is_read(hot: bool, offer: tuple[str, ...]) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        chunks = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        for _ in range(2):
            await stream.send_all(post("t/store", b"", "Transfer-Encoding: chunked", *offer) + chunks)
            assert json.loads((await reader.reply()).body)["body"] == b"abcde".hex()


@BOTH_WAYS
async def test_a_get_that_offers_h2c_is_answered_in_http_1(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        request = post("/ping").replace(b"POST", b"GET").replace(b"Content-Length: 0\r\n", b"")
        offer = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        reader = Reader(stream)
        for _ in range(2):
            await stream.send_all(request.replace(b"\r\n\r\n", offer))
            assert ((reply := await reader.reply()).status, reply.body) == (200, b"OK")


async def test_the_lane_answers_a_post_that_offers_an_upgrade_without_hypercorn() -> None:
    async def built(listener: Listener) -> int:
        async with await listener.connect() as stream:
            await stream.send_all(post("t/publish", b"", "Connection: Upgrade", "Upgrade: h2c"))
            assert (await Reader(stream).reply()).status == 200
        return listener.toys.built

    async with running() as listener:
        assert await built(listener) == 0
