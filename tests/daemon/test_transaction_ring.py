"""The ring of transactions: a daemon killed repeatedly never shows part of a transaction or rolled-back messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from tests.daemon.harness import Daemon
from tests.daemon.ring import Place
from tests.daemon.talk import Talk, create
from tests.daemon.test_crash_ring import SIZES
from tests.daemon.transactional_readers import HABITS, many_reader, reader, snapshot_reader
from tests.daemon.transactional_rest import SINGLY, check_all
from tests.daemon.transactional_writers import Plot, writer

TOPICS = ("one", "two", "three")
#: With these, cleaning and the rollback of invalid transactions run constantly.
SETTINGS = ("retention.interval_s=0.1", "retention.step_rows=20", "storage.min_free_bytes=0")
#: How the daemon ends, in this order.
ENDS = ("storm", "pause", "start", "storm", "leave", "storm")
SEED = int(os.environ.get("PLAINSONG_RING_SEED", "50"))


@pytest.mark.parametrize("sizes", SIZES)
async def test_transactions_are_all_or_nothing_for_every_reader_through_kills(tmp_path, sizes):
    await ring(tmp_path, SEED, cycles=6, writers=6, pause_s=0.02, sizes=sizes)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(SEED + 1, SEED + 11))
async def test_transactions_are_all_or_nothing_for_every_reader_through_many_kills(tmp_path, seed):
    await ring(tmp_path, seed, cycles=40, writers=12, pause_s=0.02, singly=None)


async def ring(
    tmp_path: Path,
    seed: int,
    *,
    cycles: int,
    writers: int,
    pause_s: float,
    singly: int | None = SINGLY,
    readers_pause_s: float | None = None,
    most_a_life: int = 60,
    sizes: str = "default sizes",
    make: Callable[..., Daemon] = Daemon,
    restored: bool = False,
) -> None:
    """Run and kill ``cycles`` times, then read everything and check the history.

    Args:
      readers_pause_s: pause between two polls of each reader; None for the default of each kind.
      make: makes the daemon; the daemon's ``start`` restarts it.
      restored: see ``check_all``.
      most_a_life: the number of transactions that may end before the daemon is killed.
    """
    print(f"PLAINSONG_RING_SEED={seed}")
    rng, place, plot = Random(seed), Place(), Plot()
    pause: dict[str, float] = {} if readers_pause_s is None else {"pause_s": readers_pause_s}
    with make(tmp_path / "data", *SETTINGS, *SIZES[sizes]) as daemon:
        for topic in TOPICS:
            create(daemon.address, topic)
        async with trio.open_nursery() as readers:
            for topic in TOPICS:
                for habit in HABITS:
                    readers.start_soon(partial(reader, place, topic, habit, plot, **pause))
            for limit in (3, None):
                readers.start_soon(partial(many_reader, place, TOPICS, plot, limit, **pause))
                readers.start_soon(partial(snapshot_reader, place, TOPICS, plot, Random(rng.random()), **pause))
            async with trio.open_nursery() as nursery:
                for number in range(writers):
                    nursery.start_soon(writer, place, plot, f"w{number}", TOPICS, Random(rng.random()), pause_s)
                for cycle in range(cycles):
                    await live(daemon, place, rng, most_a_life)
                    await die(daemon, place, ENDS[cycle % len(ENDS)], rng)
                    await trio.to_thread.run_sync(daemon.start)
                await live(daemon, place, rng, most_a_life)
                place.over = True
            readers.cancel_scope.cancel()
        async with await Talk.to(daemon.address) as talk:
            states, held = await check_all(talk, plot, TOPICS, singly=singly, restored=restored, repeated=True)
    assert {"committed", "aborted", "invalid"} <= states.keys()
    assert held


async def live(daemon: Daemon, place: Place, rng: Random, most: int) -> None:
    """Let the daemon serve for a while."""
    place.opened(daemon.address)
    await place.more(acknowledged=rng.randrange(10, most), polled=rng.randrange(5, 30))


async def die(daemon: Daemon, place: Place, how: str, rng: Random) -> None:
    """End the daemon: under load, after a freeze, after it has stopped, or again while it starts."""
    if how == "pause":
        daemon.signal(signal.SIGSTOP)
        await trio.sleep(rng.random() * 1.2)  # transactions time out in the meantime
        daemon.signal(signal.SIGCONT)
        await place.more(acknowledged=2, polled=1)
    if how == "leave":
        assert await trio.to_thread.run_sync(daemon.stop) == 0
    daemon.kill()
    place.closed()
    if how == "start":
        daemon.spawn()
        # A forked daemon imports nothing, so most of its start is recovery.
        await trio.sleep(daemon.start_s * (0.3 + 0.8 * rng.random()))
        daemon.kill()
