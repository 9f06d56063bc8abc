"""All kinds of requests at once, on a store that keeps failing: by the clients' records, all promises hold."""

from __future__ import annotations

from random import Random

import pytest
import trio
from actors_in_process import NAME, actors

from actors.reading import read_page
from actors.settings import RetentionConfig
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Look


class Notes:
    """The answers to publishers, and each reader's messages."""

    def __init__(self):
        self.acknowledged = {}
        self.refused = set()
        self.unknown = set()
        self.read = []


async def publish_on(harness, notes, who, count, random):
    for number in range(count):
        payload = b"%d.%d" % (who, number)
        try:
            receipt = await harness.publish(payload, payload + b"+")
            notes.acknowledged[payload] = receipt
        except PlainsongError as error:
            (notes.refused if error.outcome == "not-applied" else notes.unknown).add(payload)
        harness.clock.ms += random.choice([0, 0, 1, 2, -50])
        await trio.sleep(random.random())


async def read_along(harness, notes, done, random):
    """Follow the topic with long polls, some of them cancelled early, until there are no more messages."""
    got, since = [], FIRST_BOUND
    notes.read.append(got)
    while True:
        ended = done.is_set()
        try:
            with trio.move_on_after(random.choice([0.01, 5, 5])):
                span = await harness.ask(Look(since, None, trio.current_time() + 3))
                page = await read_page(
                    harness.store, harness.directory.cache(NAME), span, limit=random.randint(1, 9), max_bytes=100
                )
                got += page.messages()
                since = after(page.last_id) if page.last_id is not None else since
                if ended and not page.count:
                    return
        except PlainsongError:
            await trio.sleep(0.1)


async def fail_on(harness, random):
    while True:
        op = random.choice(["write", "write", "scan", "get", "claim", "discard"])
        harness.store.fail_next(op, applied=random.choice([False, True, 1]) if op == "write" else False)
        if random.random() < 0.1:
            harness.store.crash(keep_rows=random.randint(0, 3))
        await trio.sleep(random.random() * 2)


async def clean_on(harness, done):
    while not done.is_set():
        await trio.sleep(2)
        try:
            await harness.janitor.clean_all()
        except PlainsongError:
            continue


async def use_others(harness, done, random):
    """Make the directory evict topics and reopen them."""
    while not done.is_set():
        try:
            await harness.look(name=TopicName("ns", f"absent{random.randint(0, 3)}"))
        except PlainsongError:
            await trio.sleep(random.random())


@pytest.mark.parametrize("seed", range(5))
async def test_promises_hold_under_all_faults_at_once(seed, autojump_clock):
    random, notes, done = Random(seed), Notes(), trio.Event()
    async with actors(
        max_open=2, cache_bytes=3_000, mailbox_requests=8, idle_s=4, sweeping=True, janitor=RetentionConfig(step_rows=2)
    ) as harness:
        await harness.create()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read_along, harness, notes, done, random)
            nursery.start_soon(clean_on, harness, done)
            nursery.start_soon(use_others, harness, done, random)
            async with trio.open_nursery() as faults:
                faults.start_soon(fail_on, harness, random)
                async with trio.open_nursery() as publishers:
                    for who in range(6):
                        publishers.start_soon(publish_on, harness, notes, who, 30, random)
                faults.cancel_scope.cancel()
            harness.store._faults.clear()
            await trio.sleep(20)
            done.set()
        everything = list((await harness.page(cached=False)).messages())
        assert list((await harness.page()).messages()) == everything
    assert [each for each, _ in everything] == sorted({each for each, _ in everything})
    assert all(got == everything for got in notes.read), "every reader, each message once, in the one order"
    payloads = dict(everything)
    at = {payload: each for each, payload in everything}
    assert len(payloads) == len(at)
    for payload, receipt in notes.acknowledged.items():
        assert (at[payload], at[payload + b"+"]) == (receipt.first_id, receipt.last_id)
    assert not notes.refused & set(at), "what was refused did not happen"
    assert set(at) <= {each + tail for each in notes.unknown | set(notes.acknowledged) for tail in (b"", b"+")}
    assert len(notes.acknowledged) > 50
    assert notes.unknown
