"""The crash ring: the real daemon is killed dozens of times under load, and loses and tears nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import pytest
import trio

from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon
from tests.daemon.history import check
from tests.daemon.ring import MANNERS, History, Place, publisher, read_whole, reader
from tests.daemon.talk import ConnectionLost, NotConnected, Talk, create, poll_call, publish_call, topic_path

#: Topics and their TTL: a busy one, a quiet one, and one whose messages are constantly cleaned up.
TOPICS: dict[str, int | None] = {"busy": None, "quiet": None, "fleeting": 1}
PUBLISHERS = {"busy": 3, "quiet": 1, "fleeting": 2}
SETTINGS = ("retention.interval_s=0.05", "retention.step_rows=20", "storage.min_free_bytes=0")
#: Sizes of the store: the defaults, and the documented minimum, with which volumes are constantly sealed, dropped and
#: rewritten.
SIZES = {"default sizes": (), "smallest sizes": ("storage.write_buffer_bytes=65536", "storage.volume_bytes=65536")}
#: How the daemon ends, in this order.
ENDS = ("storm", "pause", "start", "drain", "leave", "storm")
SEED = int(os.environ.get("PLAINSONG_RING_SEED", "20"))


@pytest.mark.parametrize("sizes", SIZES)
async def test_acknowledged_messages_survive_kills_at_every_kind_of_moment(tmp_path, sizes):
    await ring(tmp_path, SEED, cycles=len(ENDS), sizes=sizes)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(SEED + 1, SEED + 21))
@pytest.mark.parametrize("sizes", SIZES)
async def test_acknowledged_messages_survive_hundreds_of_kills(tmp_path, seed, sizes):
    await ring(tmp_path, seed, cycles=60, sizes=sizes)


async def ring(
    tmp_path: Path, seed: int, *, cycles: int, sizes: str = "default sizes", make: Callable[..., Daemon] = Daemon
) -> None:
    """Run and kill ``cycles`` times, then read everything and check the history of every topic."""
    print(f"PLAINSONG_RING_SEED={seed}")
    rng = Random(seed)
    place = Place()
    histories = {topic: History() for topic in TOPICS}
    with make(tmp_path / "data", *SETTINGS, *SIZES[sizes]) as daemon:
        for topic, ttl_s in TOPICS.items():
            create(daemon.address, topic, **({} if ttl_s is None else {"ttl": ttl_s}))
        async with trio.open_nursery() as readers:
            for topic, history in histories.items():
                for manner in MANNERS:
                    readers.start_soon(reader, place, topic, manner, history, Random(rng.random()))
            async with trio.open_nursery() as publishers:
                for topic, ttl_s in TOPICS.items():
                    for number in range(PUBLISHERS[topic]):
                        lot = Random(rng.random())
                        publishers.start_soon(publisher, place, topic, f"p{number}", histories[topic], lot, ttl_s)
                for cycle in range(cycles):
                    await live(daemon, place, rng)
                    await die(daemon, place, ENDS[cycle % len(ENDS)], rng)
                    await trio.to_thread.run_sync(daemon.start)
                await live(daemon, place, rng)
                place.over = True
            readers.cancel_scope.cancel()
        for topic, history in histories.items():
            await check_all(daemon, topic, history)


async def live(daemon: Daemon, place: Place, rng: Random) -> None:
    """Let the daemon serve for a while."""
    place.opened(daemon.address)
    await place.more(acknowledged=rng.randrange(10, 150), polled=rng.randrange(5, 30))


async def die(daemon: Daemon, place: Place, how: str, rng: Random) -> None:
    """End the daemon: under load, after a freeze, while it stops, after it has stopped, or again while it starts."""
    if how == "pause":
        daemon.signal(signal.SIGSTOP)
        await trio.sleep(rng.random() * 0.2)
        daemon.signal(signal.SIGCONT)
        await place.more(acknowledged=5, polled=1)
    if how in ("drain", "leave"):
        daemon.signal(signal.SIGTERM)
        await trio.sleep(rng.random() * 0.05)
    if how == "leave":
        assert await trio.to_thread.run_sync(daemon.wait) == 0
    daemon.kill()
    place.closed()
    if how == "start":
        for part in (0.4, 1.0):  # a forked daemon imports nothing, so most of its start is recovery
            daemon.spawn()
            await trio.sleep(daemon.start_s * (part + 0.2 * rng.random()))
            daemon.kill()


async def check_all(daemon: Daemon, topic: str, history: History) -> None:
    """Check that the history has no anomaly, and that pages of any size have the same messages."""
    async with await Talk.to(daemon.address) as talk:
        last, _ = await read_whole(talk, topic, "last", None, "avro")
        for limit, encoding in ((1_000, "json"), (97, "frames"), (10_000, "avro2")):
            again, pages = await read_whole(talk, topic, f"by {limit}", limit, encoding)
            history.seen += pages
            if TOPICS[topic] is None:
                own_ttl = {payload for sent in history.sent if sent.ttl_ms for payload in sent.payloads}
                assert [m for m in again.messages if m[1] not in own_ttl] == [
                    m for m in last.messages if m[1] not in own_ttl
                ]
        last, _ = await read_whole(talk, topic, "last", None, "avro")
    outcomes = Counter(sent.outcome for sent in history.sent)
    print(f"{topic}: {outcomes}, {len(history.seen)} pages, {len(last.messages)} messages at the end")
    anomalies = check(history.sent, history.seen, last)
    assert not anomalies, "\n".join([f"{len(anomalies)} anomalies", *map(str, anomalies[:20])])
    assert outcomes["acknowledged"] > 0


async def test_a_topic_recreated_between_kills_never_shows_its_past(tmp_path):
    await reborn(tmp_path, SEED, cycles=6)


@pytest.mark.torture
async def test_a_topic_recreated_between_many_kills_never_shows_its_past(tmp_path):
    await reborn(tmp_path, SEED, cycles=200)


async def reborn(tmp_path: Path, seed: int, cycles: int) -> None:
    """Create, publish, read and delete repeatedly, with kills and cleaning."""
    print(f"PLAINSONG_RING_SEED={seed}")
    rng, place, lives = Random(seed), Place(), Lives()
    settings = ("retention.delete_grace_s=0", "retention.interval_s=0.02", "retention.step_rows=5")
    with Daemon(tmp_path / "data", *settings, "storage.min_free_bytes=0") as daemon:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live_and_die, place, lives)
            nursery.start_soon(look_on, place, lives)
            for _ in range(cycles):
                place.opened(daemon.address)
                await place.more(acknowledged=rng.randrange(20, 60), polled=5)
                daemon.kill()
                place.closed()
                await trio.to_thread.run_sync(daemon.start)
            place.opened(daemon.address)
            await place.more(acknowledged=30, polled=5)
            place.over = True
    print(f"{lives.generation} generations, {lives.looks} looks")
    assert lives.generation > cycles


@dataclass(slots=True)
class Lives:
    """The records of a topic that is created again and again."""

    generation: int = 0
    looks: int = 0
    acknowledged: dict[bytes, bytes] = field(default_factory=dict)
    """Message → id, of the current generation."""
    highest_id: bytes = FIRST_BOUND
    """The highest id of all generations."""
    names: Iterator[int] = field(default_factory=count)


async def live_and_die(place: Place, lives: Lives) -> None:
    """Create and delete the topic repeatedly, in one task, so that its content is certain."""
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    await one_life(place, talk, lives)
        except (ConnectionLost, NotConnected):
            await trio.lowlevel.checkpoint()


async def one_life(place: Place, talk: Talk, lives: Lives) -> None:
    assert (await talk.ask("PUT", topic_path("reborn") + "?ifNotExists=true")).status == 200
    generation = int((await talk.ask("GET", topic_path("reborn"))).json()["properties"]["generation"])
    if generation != lives.generation:
        assert generation > lives.generation
        lives.generation, lives.acknowledged = generation, {}
    for _ in range(5):
        name = b"%d:%d" % (generation, next(lives.names))
        receipt = (await talk.ask(*publish_call("reborn", [name]))).receipt()
        assert receipt.generation == generation
        assert receipt.first_id is not None
        assert receipt.first_id > lives.highest_id
        lives.highest_id = lives.acknowledged[name] = receipt.first_id
        place.count(acknowledged=1)
    there = dict((await talk.ask(*poll_call("reborn", PollRequest()))).messages())
    for name, message_id in lives.acknowledged.items():
        assert there[message_id] == name
    assert all(payload.startswith(b"%d:" % generation) for payload in there.values())
    assert (await talk.ask("DELETE", topic_path("reborn"))).status == 200
    assert (await talk.ask(*poll_call("reborn", PollRequest()))).code == "topic_not_found"


async def look_on(place: Place, lives: Lives) -> None:
    """Check that a reader from the start sees one generation at a time, and never an earlier one afterwards."""
    latest = 0
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    answer = await talk.ask(*poll_call("reborn", PollRequest()))
                    place.count(polled=1)
                    if answer.code == "topic_not_found":
                        continue
                    generations = {int(payload.partition(b":")[0]) for _, payload in answer.messages()}
                    assert len(generations) <= 1
                    assert min(generations, default=latest) >= latest
                    latest = max(generations, default=latest)
                    lives.looks += 1
        except (ConnectionLost, NotConnected):
            await trio.lowlevel.checkpoint()
