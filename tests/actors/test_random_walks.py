"""Readers that walk, jump and wait, with chunks and caches of all sizes: every page equals the store's."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
import trio
from actors_in_process import NAME, actors
from trio.testing import wait_all_tasks_blocked

from actors import pages as actors_pages
from actors.pages import LEAST_PAUSE_S, Pages
from actors.reading import read_page
from plainsong.protocol.errors import TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.topic.asks import Remove
from plainsong.protocol.transactions.view import View


def shown(page):
    return list(page.messages()), page.count, page.payload_bytes, page.last_id, page.end


class Walks:
    """Four readers of a topic that is concurrently written, deleted, and evicted from the scan cache."""

    def __init__(self, harness, pages, random):
        self.harness, self.pages, self.random = harness, pages, random
        self.readers = [
            [FIRST_BOUND, random.choice([1, 3, 7, 40]), random.choice([200, 1000, 1 << 20])] for _ in range(4)
        ]
        self.ends = [FIRST_BOUND]

    async def step(self):
        random, harness = self.random, self.harness
        kind = random.random()
        if kind < 0.12:
            harness.clock.ms += random.choice([1, 10, 300])
            sizes = [random.choice([0, 5, 60, 60]) for _ in range(random.choice([1, 5, 40]))]
            await harness.publish(*["m" * size for size in sizes])
        elif kind < 0.14:
            harness.clock.ms += random.choice([500, 2_500])
        elif kind < 0.25:
            harness.directory.cache(NAME).start_over()
        elif kind < 0.255:
            await harness.ask(Remove())
            await harness.create()
        else:
            await self.read(random.choice(self.readers))

    async def read(self, reader):
        random = self.random
        if random.random() < 0.05:
            reader[0] = random.choice(self.ends)
        since, limit, max_bytes = reader
        try:
            span = await self.harness.look(since)
        except TopicNotFound:
            return
        if random.random() < 0.1:
            span = replace(span, until=max(span.since, min(span.until, random.choice(self.ends))))
        bounds = {
            "limit": limit,
            "max_bytes": max_bytes,
            "view": random.choice([None, View.without_service(frozenset())]),
        }
        stored = await read_page(self.harness.store, None, span, **bounds)
        page = None
        if random.random() < 0.5:
            page = self.pages.read_now(NAME, span, at_once_bytes=random.choice([300, 64 << 10]), **bounds)
        page = page or await self.pages.read(NAME, span, **bounds)
        if random.random() < 0.7:
            await wait_all_tasks_blocked()
        assert shown(page) == shown(stored)
        if stored.last_id is not None:
            reader[0] = after(stored.last_id)
            self.ends.append(reader[0])
        if stored.end == "end" and random.random() < 0.5:
            reader[0] = FIRST_BOUND


@pytest.mark.parametrize("seed", range(40))
async def test_every_page_equals_the_page_of_the_store(seed, monkeypatch):
    random = Random(seed)
    monkeypatch.setattr(actors_pages, "AHEAD", (random.choice([7, 50, 5_000]), random.choice([500, 2_000, 20_000])))
    async with actors_of(random) as harness, trio.open_nursery() as nursery:
        monkeypatch.setattr(actors_pages, "LARGE_BYTES", random.choice([300, 64 << 10]))
        pause_s = random.choice([0.0, LEAST_PAUSE_S])
        pages = Pages(harness.store, harness.directory, clock=count(step=pause_s).__next__)
        nursery.start_soon(pages.run)
        await wait_all_tasks_blocked()
        await harness.create(**random.choice([{}, {"ttl_s": 2}, {"ttl_s": 10}]))
        walks = Walks(harness, pages, random)
        for _ in range(250):
            await walks.step()
        budget = harness.directory.cache(NAME).budget
        kept = budget.kept
        assert kept.bytes == sum(each.cost for each in kept._chunks.values()) <= kept.max_bytes
        assert budget.bytes == kept.bytes + sum(chunk.cost for _, chunk in budget._chunks.values())
        await wait_all_tasks_blocked()
        assert not pages._under_way
        nursery.cancel_scope.cancel()


def actors_of(random):
    return actors(cache_bytes=random.choice([1 << 14, 1 << 17, 1 << 23]))
