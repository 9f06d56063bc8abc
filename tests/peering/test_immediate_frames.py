"""Frames written at once on a real socket: in order, counted, and left to the writing task when it is full."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from broker.http.sockets import stream_of
from broker.link.client import Link
from broker.link.flow import Reply
from broker.link.server import Call, in_task, serve_link
from broker.link.wire import INLINE_BYTES, WITHIN_DAEMON, Wire
from plainsong.protocol.link import PREFACE, FrameKind, FrameReader


class Silent:
    """A side that must receive no frame."""

    def on_frame(self, frame: list[object]) -> None:
        raise AssertionError(frame)

    def flush(self) -> None:
        pass


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def received(theirs: socket.socket) -> bytes:
    try:
        return theirs.recv(1 << 20)
    except BlockingIOError:
        return b""


async def met(ends, nursery) -> Wire:
    """Return a wire whose peer has sent its preface."""
    ours, theirs = ends
    wire = Wire(stream_of(ours.dup()), WITHIN_DAEMON, "")
    theirs.send(PREFACE)
    nursery.start_soon(wire.run, Silent())
    await trio.testing.wait_all_tasks_blocked()
    assert wire.is_peer
    assert received(theirs) == PREFACE
    return wire


async def test_an_immediate_frame_leaves_with_all_before_it(ends):
    async with trio.open_nursery() as nursery:
        wire = await met(ends, nursery)
        places = [wire.put(FrameKind.PING, 1), wire.put(FrameKind.PING, 2), wire.put_at_once(FrameKind.PING, 3)]
        frames = FrameReader().feed(received(ends[1]))
        assert [number for _, number in frames] == [1, 2, 3]
        assert places == [1, 2, 3]
        assert wire.written == 3
        await trio.testing.wait_all_tasks_blocked()
        assert received(ends[1]) == b""
        nursery.cancel_scope.cancel()


async def test_bytes_that_the_connection_does_not_accept_follow_in_order(ends):
    async with trio.open_nursery() as nursery:
        wire = await met(ends, nursery)
        reader, frames = FrameReader(), []
        for number in range(40):
            wire.put_at_once(FrameKind.PIECE, number, b"x" * INLINE_BYTES, False)
        while len(frames) < 40:
            await trio.testing.wait_all_tasks_blocked()
            frames += reader.feed(received(ends[1]))
        assert [frame[1] for frame in frames] == list(range(40))
        assert wire.written == 40
        assert not wire.is_full
        nursery.cancel_scope.cancel()


async def test_nothing_is_written_at_once_to_a_peer_that_has_not_identified_itself_as_a_link(ends):
    ours, theirs = ends
    wire = Wire(stream_of(ours.dup()), WITHIN_DAEMON, "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run, Silent())
        await trio.testing.wait_all_tasks_blocked()
        wire.put_at_once(FrameKind.PING, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert received(theirs) == PREFACE
        assert wire.written == 0
        nursery.cancel_scope.cancel()


async def test_immediate_and_batched_calls_are_answered(ends):
    async def dispatch(call: Call) -> Reply:
        return Reply(call.value)

    link = Link(stream_of(ends[0].dup()), WITHIN_DAEMON)
    answers: dict[int, object] = {}

    async def call(number: int) -> None:
        answers[number] = (await link.call("echo", number, at_once=number % 3 == 0)).value

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_link, stream_of(ends[1].dup()), in_task(dispatch), WITHIN_DAEMON)
        nursery.start_soon(link.run)
        async with trio.open_nursery() as calling:
            for number in range(300):
                calling.start_soon(call, number)
        nursery.cancel_scope.cancel()
    assert answers == {number: number for number in range(300)}
