"""Input that ends a link (garbage, silence, another kind of peer), and input that does not."""

from __future__ import annotations

import struct

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linked import Caught, echo, linked
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from broker.link.client import Link
from broker.link.flow import LinkBroken, Reply
from broker.link.server import in_task, serve_link
from broker.link.wire import LinkBounds
from plainsong.protocol.link import PREFACE, FrameKind, FrameWriter
from tests.patience import PATIENCE_S


def frame(*parts) -> bytes:
    return FrameWriter().encode(*parts)


async def served(data: bytes) -> bytes:
    """Return the served side's output to a peer that sends ``data`` and then listens."""
    mine, theirs = memory_stream_pair()
    said = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_link, theirs, in_task(echo))
        await mine.send_all(data)
        await mine.send_stream.aclose()
        with trio.fail_after(PATIENCE_S):
            async for some in mine:
                said += some
        nursery.cancel_scope.cancel()
    return said


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + struct.pack(">I", 1 << 30),
        PREFACE + b"\x00\x00\x00\x01\xc1",
        PREFACE + frame(FrameKind.ANSWER, 1, None, b""),
        PREFACE + frame(FrameKind.CALL, 1, 7, None, b"", None),
        PREFACE + frame(FrameKind.CALL, 1, "x", None, "text", None),
        PREFACE + frame(FrameKind.CALL, 1, "x", None, b"", "soon"),
        PREFACE + frame(FrameKind.BEGIN, 1, "x", None, -1, None),
        PREFACE + frame(FrameKind.BEGIN, 1, "x", None, 5, None) + frame(FrameKind.PIECE, 1, b"123456", True),
        PREFACE + frame(FrameKind.BEGIN, 1, "x", None, 5, None) + frame(FrameKind.PIECE, 1, b"123", False),
        PREFACE + frame(FrameKind.BEGIN, 1, "x", None, 5, None) * 2,
    ],
)
async def test_garbage_ends_the_link_and_the_log_says_why(garbage, caplog):
    await served(garbage)
    assert "a link is ended because of what the peer sent" in caplog.text


async def test_exceeding_the_credit_ends_the_link(caplog):
    async def deaf(call):
        await trio.sleep_forever()

    mine, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_link, theirs, in_task(deaf))
        flood = frame(FrameKind.PIECE, 1, bytes(100_000), False) * 20
        await mine.send_all(PREFACE + frame(FrameKind.OPEN, 1, "talk", None) + flood)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert "credit" in str([record.__dict__ for record in caplog.records])


@given(st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_bytes_end_the_serving_side_cleanly(data):
    async def main() -> None:
        await served(PREFACE + data)

    trio.run(main)


@given(st.lists(st.sampled_from([
    (FrameKind.CALL, 1, "x", None, b"", None), (FrameKind.CALL, 2, "x", (1,), b"b", 0.0), (FrameKind.BEGIN, 3, "x", None, 4, 9.0),
    (FrameKind.PIECE, 3, b"1234", False), (FrameKind.OPEN, 4, "x", None), (FrameKind.PIECE, 4, b"1", True), (FrameKind.END, 4),
    (FrameKind.CANCEL, 3), (FrameKind.CANCEL, 4), (FrameKind.CREDIT, 4, 10), (FrameKind.PING, 0), (FrameKind.PONG, 0), (FrameKind.CANCEL, 99),
    (FrameKind.LEAVING, 0), (FrameKind.ANSWER, 1, None, b""), (FrameKind.CREDIT, 4, "x"),
]), max_size=12))  # fmt: skip
def test_frames_in_any_order_end_the_serving_side_cleanly(frames):
    async def main() -> None:
        await served(PREFACE + b"".join(frame(*each) for each in frames))

    trio.run(main)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"PLAINSONG/2\r\n\r\n", b""])
async def test_a_peer_that_is_not_a_link_gets_nothing(said):
    mine, theirs = memory_stream_pair()
    link = Link(mine, peer="a web server")
    caught = Caught()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        nursery.start_soon(caught.run, link.call("publish", None, b"secret"))
        await wait_all_tasks_blocked()
        got = await theirs.receive_some()
        await theirs.send_all(said or b"x")
        await theirs.aclose()
    assert got == PREFACE
    assert isinstance(caught.error, LinkBroken)
    assert not caught.error.sent


async def test_a_side_that_is_silent_from_the_start_is_given_up(autojump_clock):
    mine, _theirs = memory_stream_pair()
    link = Link(mine, LinkBounds(dial_s=2))
    assert "did not begin" in await link.run()
    assert trio.current_time() < 100


async def test_a_frozen_or_cut_peer_is_noticed_within_the_bound(autojump_clock):
    async with linked(echo, LinkBounds(silence_s=9)) as pair:
        await pair.link.call("x", None)
        begun_s = trio.current_time()
        pair.theirs.send_stream.send_all_hook = trio.sleep_forever
        with pytest.raises(LinkBroken, match="nothing was received") as caught:
            await pair.link.call("x", None)
        assert caught.value.sent
        assert trio.current_time() - begun_s <= 15


async def test_the_serving_side_notices_a_frozen_caller_too(autojump_clock):
    cancelled = trio.Event()

    async def waits(call):
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with linked(waits, LinkBounds(silence_s=float("inf")), LinkBounds(silence_s=9)) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Caught().run, pair.link.call("x", None))
            await wait_all_tasks_blocked()
            pair.mine.send_stream.send_all_hook = trio.sleep_forever
            await cancelled.wait()
        assert trio.current_time() <= 20


async def test_an_idle_link_between_live_sides_stays_open(autojump_clock):
    gate = trio.Event()

    async def held(call):
        await gate.wait()
        return Reply("late")

    async with linked(held, LinkBounds(silence_s=9)) as pair:
        got = []

        async def one() -> None:
            got.append((await pair.link.call("x", None)).value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(1000)
            gate.set()
        assert got == ["late"]


async def test_a_caller_keeps_waiting_for_a_side_that_answers_a_ping(autojump_clock):
    gate = trio.Event()

    async def held(call):
        await gate.wait()
        return Reply("late")

    async with linked(held) as pair, trio.open_nursery() as nursery:
        got = []

        async def one() -> None:
            got.append((await pair.link.call("x", None)).value)

        nursery.start_soon(one)
        await wait_all_tasks_blocked()
        for _ in range(3):
            await pair.link.probe(3)
        await trio.sleep(100)
        gate.set()
        await wait_all_tasks_blocked()
        assert got == ["late"]


async def test_a_side_in_doubt_that_is_frozen_is_given_up_sooner_than_by_its_silence(autojump_clock):
    async with linked(echo, LinkBounds(silence_s=9)) as pair, trio.open_nursery() as nursery:
        await pair.link.call("x", None)
        pair.theirs.send_stream.send_all_hook = trio.sleep_forever
        begun_s, caught = trio.current_time(), Caught()
        nursery.start_soon(caught.run, pair.link.call("x", None))
        await pair.link.probe(3)
        await wait_all_tasks_blocked()
        assert isinstance(caught.error, LinkBroken)
        assert caught.error.sent
        assert "nothing was received" in caught.error.why
        assert trio.current_time() - begun_s == pytest.approx(3)


async def test_the_time_already_spent_asking_counts_for_a_side_in_doubt(autojump_clock):
    async with linked(echo, LinkBounds(silence_s=30)) as pair:
        await pair.link.call("x", None)
        pair.theirs.send_stream.send_all_hook = trio.sleep_forever
        await trio.sleep(28)  # the peer was pinged after 20 s at the latest
        begun_s = trio.current_time()
        await pair.link.probe(3)
        assert trio.current_time() - begun_s <= 0.5
        await pair.link.ended.wait()
