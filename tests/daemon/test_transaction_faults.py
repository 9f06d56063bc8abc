"""Transactions on a full disk, and on a machine whose clock was set: all or nothing, and every wait ends."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress
from random import Random

import pytest
import trio

from tests.daemon import test_clock
from tests.daemon.harness import Daemon
from tests.daemon.talk import Talk, create
from tests.daemon.test_disk import MIB, leave_free
from tests.daemon.transactional_readers import Habit, read_to_the_end
from tests.daemon.transactional_rest import check_all
from tests.daemon.transactional_writers import NotDone, Plot, Work, decide
from tests.patience import PATIENCE_S
from tests.storage.disks import fill, small_disk

TOPICS = ("one", "two")
RNG = Random(3)
#: Time-out for transactions that must not time out, however long a full disk delays them.
LONG_S = 600


async def insist(call, *arguments):
    """Repeat the call until it succeeds."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                return await call(*arguments)
            except NotDone:
                await trio.sleep(0.05)


async def look(talk, plot):
    """Read everything with every kind of reader."""
    for topic in TOPICS:
        for habit in (Habit(True, 7), Habit(True), Habit(False)):
            with suppress(NotDone):
                await read_to_the_end(talk, topic, habit, plot)


async def begun(talk, plot, name, timeout_s=LONG_S):
    work = Work(talk, plot, name, (*TOPICS, "none"), RNG)
    work.topics = TOPICS
    await insist(work.begin, timeout_s)
    return work


async def test_transactions_stay_whole_while_the_disk_is_full(tmp_path):
    settings = ("storage.min_free_bytes=0", "storage.write_buffer_bytes=65536", "retention.interval_s=0.2")
    with small_disk(tmp_path / "disk", 32) as disk, Daemon(disk / "data", *settings) as daemon:
        plot = Plot()
        for topic in TOPICS:
            create(daemon.address, topic)
        async with await Talk.to(daemon.address) as talk:
            works = [await begun(talk, plot, f"w{number}") for number in range(60)]
            for work in works:
                for topic in TOPICS:
                    await work.publish(topic, 3)
            await look(talk, plot)
            ballast, failures = leave_free(disk, MIB // 4), 0
            filling = fill(disk / "data")
            for number, work in enumerate(works):
                try:
                    if number % 3 == 2:
                        await work.publish("one", 200)
                    await work.end("commit" if number % 3 else "abort")
                except NotDone:
                    failures += 1
                if number % 20 == 0:
                    await look(talk, plot)
            assert failures > 10
            filling.unlink()
            ballast.unlink()
            await look(talk, plot)
            for number, work in enumerate(works):
                if work.transaction.asked_s < math.inf:
                    await insist(decide, talk, work.transaction, "commit")
                elif number % 2:
                    await insist(decide, talk, work.transaction, "abort")
            await look(talk, plot)
            states, _ = await check_all(talk, plot, TOPICS)
            assert states["committed"] >= 10


@pytest.mark.skipif(not test_clock._LIBRARIES, reason="NOT TESTED: wrong clocks, since libfaketime is not installed")
async def test_transactions_stay_whole_when_the_clock_is_an_hour_back_or_ahead_after_a_kill(tmp_path):
    plot, left = Plot(), []
    for ahead_s in (0, -test_clock.HOUR_S, test_clock.HOUR_S, 0):
        with Daemon(tmp_path / "data", environ=test_clock.clock(ahead_s)) as daemon:
            for topic in TOPICS:
                create(daemon.address, topic)
            async with await Talk.to(daemon.address) as talk:
                await look(talk, plot)
                for end in ("commit", "abort", None):
                    # Only an abandoned transaction may time out; on a busy machine that may happen before everything is
                    # published.
                    timeout_s = 2 if end is None else LONG_S
                    work = await begun(talk, plot, f"{end} at {len(plot.transactions)}", timeout_s=timeout_s)
                    # Its time-out does not depend on the wall clock, which this test sets.
                    work.transaction.expires_ms = int(time.time() + 7200) * 1000
                    with suppress(NotDone) if end is None else nullcontext():
                        for topic in TOPICS:
                            await work.publish(topic, 2)
                    if end is not None:
                        await work.end(end)
                    left.append(work)
                await look(talk, plot)
                if ahead_s == 0 and len(left) > 6:
                    await check_all(talk, plot, TOPICS)
            daemon.kill()
    ids = [each.id for each in plot.transactions]
    assert ids == sorted(set(ids)), "each id is above all earlier ones"
