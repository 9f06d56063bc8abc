"""Calls that are alone, over a connection of their own: answered in turn, and never with another's answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from broker.front import descriptors
from broker.front.alone import Alone, AloneWire
from broker.front.answering_alone import AnsweringAlone
from broker.peering.answers import LinkBroken, Reply
from broker.peering.serving import Call, Dispatch
from protocol.errors import TopicNotFound
from protocol.peering.frames import Frame

SERVICE = cast("Any", SimpleNamespace(access=SimpleNamespace(enabled=True)))


async def echo(call: Call) -> Reply:
    if call.kind == "fail":
        raise TopicNotFound(call.value)
    return Reply(call.value)


@asynccontextmanager
async def asking(dispatch: Dispatch) -> AsyncIterator[Alone]:
    ours, theirs = descriptors.pair_of_bytes()
    alone = Alone(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AnsweringAlone(ours, SERVICE, dispatch, "peer").run)
        assert not alone.is_free()
        await alone.open()
        yield alone
        alone.close()


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - a socket sets no event
            await trio.sleep(0.001)


async def test_each_gets_its_answer_or_the_error_that_was_raised():
    async with asking(echo) as alone:
        for number in range(100):
            assert await alone.ask("echo", [number, b"x" * 600 * number]) == [number, b"x" * 600 * number]
        with pytest.raises(TopicNotFound, match="no such"):
            await alone.ask("fail", "no such")
        with pytest.raises(TypeError):
            await alone.ask("echo", object())
        assert await alone.ask("echo", 1) == 1


async def test_the_answer_for_one_who_has_left_is_nobody_elses():
    release = trio.Event()

    async def slow(call: Call) -> Reply:
        if call.value == "slow":
            await release.wait()
        return Reply(call.value)

    async with asking(slow) as alone:
        with trio.move_on_after(0.01) as left:
            await alone.ask("echo", "slow")
        assert left.cancelled_caught
        assert not alone.is_free()
        release.set()
        await until(alone.is_free)
        assert await alone.ask("echo", "next") == "next"


async def test_who_waits_when_the_other_side_ends_learns_that_nobody_knows():
    ours, theirs = descriptors.pair_of_bytes()
    alone, other = Alone(theirs), AloneWire(ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.meet)
        await alone.open()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(LinkBroken) as broken:
                await alone.ask("echo", 1)
            assert broken.value.sent

        nursery.start_soon(ask)
        await other.receive()
        other.close()
    assert not alone.is_free()


async def test_what_cannot_leave_any_more_was_not_sent():
    ours, theirs = descriptors.pair_of_bytes()
    alone, other = Alone(theirs), AloneWire(ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.meet)
        await alone.open()
    other.close()
    with pytest.raises(LinkBroken) as broken:
        await alone.ask("echo", 1)
    assert not broken.value.sent


@pytest.mark.parametrize("frames", [[(Frame.CALL, 1, "echo", 1, b"", None)] * 2, [(Frame.PING, 1)]])
async def test_more_than_one_call_at_a_time_ends_it(frames, caplog):
    ours, theirs = descriptors.pair_of_bytes()
    wire = AloneWire(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AnsweringAlone(ours, SERVICE, echo, "peer").run)
        await wire.meet()
        wire.send(b"".join(wire.encode(*frame) for frame in frames))
        with pytest.raises(OSError, match="ended"):
            await wire.receive()
        wire.close()
    assert "a link is ended for what it sent" in caplog.messages


async def test_what_does_not_begin_as_a_link_is_nobody_to_ask():
    ours, theirs = descriptors.pair_of_bytes()
    ours.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(LinkBroken):
        await Alone(theirs).open()
    ours.close()
