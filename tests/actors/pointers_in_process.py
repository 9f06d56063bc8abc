"""Requests about write pointers to ``actors_in_process``, and an authority with fixed answers."""

from __future__ import annotations

from actors_in_process import NAME, START_MS

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import POINTER, SYSTEM
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import PublishUnder, RollBackPointer, StoreUnder
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS, NoAuthority

#: The first pointer that can be issued at the tests' start time.
FIRST = START_MS * POINTERS_PER_MS


class Said(NoAuthority):
    """An authority that returns given standings; other pointers are unknown to it."""

    def __init__(self):
        self.standings = {}

    def standing(self, pointer):
        return self.standings.get(pointer, "unknown")


def request(payloads, pointer, **more):
    return PublishRequest([each.encode() for each in payloads], pointer, **more)


async def store(harness, pointer, *payloads, name=NAME, **more):
    """Store messages under a pointer."""
    await harness.ask(StoreUnder(request(payloads, pointer, **more), sum(map(len, payloads))), name)


async def publish(harness, pointer, *payloads, name=NAME, **more):
    """Publish a pointer's stored messages, and the given ones."""
    return await harness.ask(PublishUnder(request(payloads, pointer, **more), sum(map(len, payloads))), name)


async def roll_back(harness, pointer, within=None, *, by_client=True, name=NAME):
    await harness.ask(RollBackPointer(pointer, within, by_client), name)


def pointer_rows(harness):
    """Return the keys of all rows about write pointers."""
    rows = harness.store.inner.tables[Table.METADATA].rows
    return [key for key in rows if key.startswith(SYSTEM + POINTER)]


def payload_rows(harness):
    return harness.rows(Table.PAYLOAD)
