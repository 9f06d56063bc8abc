"""Twenty producers on a daemon that is killed repeatedly: each message is stored once, in order, and batches whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import trio

from tests.daemon.harness import Daemon
from tests.daemon.producer_ring import RingProducer, anomalies
from tests.daemon.ring import MANNERS, History, Place, read_whole, reader
from tests.daemon.talk import Talk, create
from tests.daemon.test_crash_ring import SEED, SIZES, die, live

TOPIC = "produced"
#: Frequent snapshots, so that some kills hit them.
SETTINGS = ("deduplication.snapshot_entries=50", "storage.min_free_bytes=0")
ENDS = ("storm", "drain", "storm", "pause", "storm", "leave", "storm", "start")


@pytest.mark.parametrize("sizes", SIZES)
async def test_twenty_producers_store_each_message_once_under_disconnects_and_kills(tmp_path, sizes):
    await ring(tmp_path, SEED, cycles=5, sizes=sizes)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(SEED + 1, SEED + 11))
@pytest.mark.parametrize("sizes", SIZES)
async def test_twenty_producers_store_each_message_once_under_hundreds_of_kills(tmp_path, seed, sizes):
    await ring(tmp_path, seed, cycles=40, sizes=sizes)


async def ring(
    tmp_path: Path, seed: int, *, cycles: int, sizes: str = "default sizes", make: Callable[..., Daemon] = Daemon
) -> None:
    """Run and kill the daemon ``cycles`` times, then compare the stored messages with those sent and read."""
    print(f"PLAINSONG_RING_SEED={seed}")
    rng, place, history = Random(seed), Place(), History()
    producers = [RingProducer(f"p{each}", TOPIC, each % 2 == 0, Random(rng.random())) for each in range(20)]
    with make(tmp_path / "data", *SETTINGS, *SIZES[sizes]) as daemon:
        create(daemon.address, TOPIC)
        async with trio.open_nursery() as readers:
            for manner in MANNERS:
                if not manner.by_time:
                    readers.start_soon(reader, place, TOPIC, manner, history, Random(rng.random()))
            async with trio.open_nursery() as nursery:
                for producer in producers:
                    nursery.start_soon(producer.run, place)
                for cycle in range(cycles):
                    await live(daemon, place, rng)
                    await die(daemon, place, ENDS[cycle % len(ENDS)], rng)
                    await trio.to_thread.run_sync(daemon.start)
                await live(daemon, place, rng)
                place.over = True
            readers.cancel_scope.cancel()
        async with await Talk.to(daemon.address) as talk:
            last, _ = await read_whole(talk, TOPIC, "last", None, "frames")
            again, _ = await read_whole(talk, TOPIC, "by 97", 97, "avro")
    cuts, resent = sum(each.cuts for each in producers), sum(each.resent for each in producers)
    print(f"{len(last.messages)} messages, {cuts} cuts, {resent} sent again, {len(history.seen)} pages")
    assert again.messages == last.messages
    found = list(anomalies(producers, history.seen, last))
    assert not found, "\n".join([f"{len(found)} anomalies", *found[:20]])
    assert cuts
    assert resent
