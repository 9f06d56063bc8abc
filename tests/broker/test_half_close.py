"""A client that closes its sending half gets the answers to all its requests, on every route and both listeners."""

from __future__ import annotations

import json

import pytest
import trio

from tests.broker.listeners import Reader, post, running
from tests.patience import PATIENCE_S

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


@BOTH_WAYS
@pytest.mark.parametrize(
    "asked",
    [
        [post("t/publish", b"x")] * 20,
        [post("t/store", b"x" * 100_000)] * 20,
        [PING] * 20,
        [post("t/publish"), post("t/store", b"x"), PING, post("t/rollback"), PING, post("t/store", bytes(300_000))] * 3,
    ],
    ids=["started", "tasks", "cold", "mixed"],
)
async def test_every_request_is_answered_after_a_half_close(hot: bool, asked: list[bytes]) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream, trio.open_nursery() as nursery:

        async def ask_all() -> None:
            for request in asked:
                await stream.send_all(request)
            await stream.send_eof()

        nursery.start_soon(ask_all)
        reader = Reader(stream)
        assert [(await reader.reply()).status for _ in asked] == [200] * len(asked)
        assert await reader.at_end()


@pytest.mark.parametrize(
    ("hot", "behind"),
    # Hypercorn reads a pipelined request, or the end of input, only after it has answered the request before.
    [(True, b""), (True, post("t/store", b"x")), (True, PING), (False, b"")],
    ids=["hot", "hot-hot", "hot-cold", "application"],
)
async def test_a_half_close_answers_a_parked_poll_at_once(hot: bool, behind: bytes) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/poll"))
        while not listener.toys.parked:
            await trio.lowlevel.checkpoint()
        await stream.send_all(behind)
        await stream.send_eof()
        reader = Reader(stream)
        assert (await reader.reply()).body == b"over"
        if behind:
            assert (await reader.reply()).status == 200
        assert await reader.at_end()
        assert not listener.toys.parked


@BOTH_WAYS
async def test_a_request_truncated_by_a_half_close_is_refused(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"whole") + post("t/store", b"", "Content-Length: 10") + b"half")
        await stream.send_eof()
        reader = Reader(stream)
        assert json.loads((await reader.reply()).body)["body"] == b"whole".hex()
        assert (await reader.reply()).code == "malformed_body"
        assert await reader.at_end()


@BOTH_WAYS
async def test_a_client_that_has_left_holds_nothing(hot: bool) -> None:
    async with running(hot=hot) as listener:
        async with await listener.connect() as stream:
            await stream.send_all(post("t/poll", bytes(10_000)))
            while not listener.toys.parked:
                await trio.lowlevel.checkpoint()
        with trio.fail_after(PATIENCE_S):
            await listener.toys.cancelled.wait()
            while listener.budget.reserved_bytes:
                await trio.lowlevel.checkpoint()
