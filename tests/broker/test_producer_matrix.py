"""The failure matrix of producers: whichever write fails, each message is present once, in complete batches."""

from __future__ import annotations

from contextlib import suppress

import pytest
from producer_course import SETTINGS, InDoubt, Stage
from whole_course import Killed, life

#: Far more writes than the course has.
ENOUGH = 40
#: Minimum number of writes per run, without and with sessions; a session is durable before it is acknowledged.
WRITES = {False: 8, True: 10}


def course(stage):
    """Yield the steps of two producers, each with the client that must find out the outcome if the step fails."""
    a, b = stage.clients
    yield a, lambda: stage.open(a)
    yield a, lambda: stage.send(a, [0])
    yield b, lambda: stage.open(b)
    yield b, lambda: stage.send(b, [0, 1, 2], atomic=True)
    yield a, lambda: stage.send(a, [1, 2, 3])
    yield a, lambda: stage.send(a, [1, 2, 3])  # a duplicate
    yield b, lambda: stage.send(b, [10, 11])  # after a gap
    yield a, lambda: stage.send(a, [4, 5, 6], atomic=True)
    yield b, lambda: stage.send(b, [11, 12, 13])  # overlaps the stored messages
    yield a, lambda: stage.send(a, [7])
    yield b, lambda: stage.send(b, [14])


async def run_until_it_fails(stage, *, killed):
    """Run the course; return True if the write failed and the daemon is to be killed."""
    for client, step in course(stage):
        with suppress(InDoubt):
            await step()
        if stage.has_failed and killed:
            return True
        await stage.find_out(client)
        await stage.look()
    return False


async def afterwards(stage):
    """Have every client find out its outcome, reopen its session and continue."""
    await stage.look()
    for client in stage.clients:
        await stage.find_out(client)
        await stage.open(client)
        await stage.send(client, [20])
        await stage.look()
    await stage.check()


async def one_case(session, number, applied, *, killed):
    """Run the course and fail write ``number``. True if there was such a write."""
    stage = Stage(session=session)
    async with life(stage.store, **SETTINGS) as stage.daemon:
        await stage.daemon.create()
        stage.fail_write(number, applied)
        if not await run_until_it_fails(stage, killed=killed):
            hit = stage.has_failed
            stage.store.fail_no_more()
            await afterwards(stage)
            return hit
        raise Killed
    async with life(stage.store, **SETTINGS) as stage.daemon:
        await afterwards(stage)
        raise Killed
    # A restarted daemon reads the same messages from the store.
    async with life(stage.store, **SETTINGS) as stage.daemon:
        await stage.check()
    return True


@pytest.mark.parametrize(
    "applied",
    [
        pytest.param(False, id="nothing written"),
        pytest.param(1, id="one row written"),
        pytest.param(2, id="two rows written", marks=pytest.mark.torture),
        pytest.param(3, id="three rows written", marks=pytest.mark.torture),
        pytest.param(4, id="four rows written", marks=pytest.mark.torture),
        pytest.param(True, id="all written"),
    ],
)
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(None, id="every other one is killed"),
        pytest.param(False, id="falls", marks=pytest.mark.torture),
        pytest.param(True, id="killed", marks=pytest.mark.torture),
    ],
)
@pytest.mark.parametrize("session", [False, True], ids=["by name", "with sessions"])
async def test_each_message_is_stored_once_whichever_write_of_its_producers_fails(
    autojump_clock, session, killed, applied
):
    for number in range(ENOUGH):
        kills = (number + (applied is True)) % 2 == 1 if killed is None else killed
        if not await one_case(session, number, applied, killed=kills):
            break
    assert WRITES[session] <= number < ENOUGH
