"""Reading all topics on a slow store: one read serves every caller, and a caller that leaves does not cancel it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
from broker_in_process import SetClock
from trio.testing import wait_all_tasks_blocked

from broker import catalogue as module
from broker.catalogue import FRESH_S, Catalogue
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import ShuttingDown
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from storage.base import StoreError
from storage.memory import MemoryStore

FIRST, LATER = TopicName("ns", "first"), TopicName("ns", "later")
#: A read takes three scans.
SCAN_S, SCANS = 15.0, 3
READ_S = SCANS * SCAN_S
#: A client's time-out, and its pause before a retry.
PATIENCE_S, PAUSE_S = 30.0, 1.0


class SlowStore(MemoryStore):
    """Each scan takes ``SCAN_S``; one may fail after that."""

    def __init__(self):
        super().__init__()
        self.begun = self.ended = 0
        self.failing = False

    async def scan(self, *args, **more):
        self.begun += 1
        await super().scan(*args, **more)
        await trio.sleep(SCAN_S)
        if self.failing:
            raise StoreError("it is unavailable")
        self.ended += 1

    async def create(self, name):
        row = put_one(Table.METADATA, metadata_key(name), Metadata(1, TopicProperties(), 1, 1).encode())
        await self.write([row], claim=await self.claim(name))


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Run everything in the loop, because the clock jumps while all tasks wait, even if they wait for a thread."""

    async def run_here(function, *args, **_):
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(module.trio.to_thread, "run_sync", run_here)


@asynccontextmanager
async def opened(**more):
    """Yield a catalogue with one topic, its store, and a nursery for clients."""
    store = SlowStore()
    await store.create(FIRST)
    async with trio.open_nursery() as daemon:
        given = {"directory": (), "store": store, "clock": SetClock(), "ownership": None, "links": None, **more}
        catalogue = Catalogue(daemon, transactions=None, rates=None, **given)
        async with trio.open_nursery() as clients:
            yield catalogue, store, clients
            clients.cancel_scope.cancel()
        daemon.cancel_scope.cancel()


async def test_clients_that_give_up_before_a_read_ends_and_ask_again_are_each_answered_within_two_reads(autojump_clock):
    async with opened() as (catalogue, _, clients):
        answered_s = {}

        async def client(first_s):
            await trio.sleep(first_s)
            while first_s not in answered_s:
                with trio.move_on_after(PATIENCE_S):
                    assert list(await catalogue.figures()) == [FIRST]
                    answered_s[first_s] = trio.current_time() - first_s
                await trio.sleep(PAUSE_S)

        # One client times out just before a read ends.
        asking = [3.0 * number for number in range(10)] + [READ_S - PATIENCE_S - PAUSE_S / 2]
        for first_s in asking:
            clients.start_soon(client, first_s)
        await trio.sleep(max(asking) + 2 * READ_S)
        assert answered_s.keys() == set(asking)
        assert max(answered_s.values()) <= 2 * READ_S


async def test_a_read_whose_clients_have_all_left_finishes_once_and_serves_the_next_client(autojump_clock):
    async with opened() as (catalogue, store, _):
        with trio.move_on_after(1):
            await catalogue.figures()
        await trio.sleep(READ_S - 1 + FRESH_S / 2)
        assert store.begun == store.ended == SCANS
        with trio.fail_after(0):
            assert list(await catalogue.figures()) == [FIRST]
        await trio.sleep(10 * READ_S)
        assert store.begun == SCANS, "without a caller nothing is read"
        assert list(await catalogue.figures()) == [FIRST]
        assert store.begun == store.ended == 2 * SCANS


async def test_a_client_that_joins_a_read_waits_for_its_end_even_if_others_leave(
    autojump_clock,
):
    async with opened() as (catalogue, store, clients):

        async def gives_up():
            with trio.move_on_after(PATIENCE_S):
                await catalogue.figures()

        clients.start_soon(gives_up)
        await trio.sleep(READ_S - 1)
        assert await catalogue.has(FIRST)
        assert trio.current_time() == READ_S
        assert store.begun == SCANS


async def test_a_failed_read_fails_for_all_waiting_requests_and_the_next_one_starts_over(autojump_clock):
    async with opened() as (catalogue, store, clients):
        failed_s = []

        async def client(first_s):
            await trio.sleep(first_s)
            with pytest.raises(StoreError, match="it is unavailable"):
                await catalogue.figures()
            failed_s.append(trio.current_time())

        store.failing = True
        clients.start_soon(client, 0)
        clients.start_soon(client, 5)
        await trio.sleep(SCAN_S + 1)
        assert failed_s == [SCAN_S, SCAN_S]
        store.failing = False
        assert list(await catalogue.figures()) == [FIRST]
        assert store.begun == 1 + SCANS


async def test_a_failed_read_without_waiters_is_logged_and_the_daemon_continues(autojump_clock, caplog):
    async with opened() as (catalogue, store, _):
        store.failing = True
        with trio.move_on_after(1):
            await catalogue.figures()
        await trio.sleep(READ_S)
        assert [record.message for record in caplog.records] == [
            "topics not read, and no request waits for them any more"
        ]
        store.failing = False
        assert list(await catalogue.figures()) == [FIRST]


async def test_a_stopping_daemon_ends_a_read_and_its_waiters_get_an_error(autojump_clock):
    store, told = SlowStore(), []
    async with trio.open_nursery() as clients, trio.open_nursery() as daemon:
        catalogue = Catalogue(daemon, (), store, SetClock(), None, None, None, None)

        async def client():
            with pytest.raises(ShuttingDown):
                await catalogue.figures()
            told.append(trio.current_time())

        clients.start_soon(client)
        await wait_all_tasks_blocked()
        daemon.cancel_scope.cancel()
    assert (told, store.begun, store.ended) == ([0.0], 1, 0)


async def test_a_topic_that_another_instance_opened_after_its_row_was_read_is_in_the_list(autojump_clock):
    open_there = []

    class Link:
        async def call(self, kind, request):
            await trio.lowlevel.checkpoint()
            assert (kind, request) == (module.FIGURES, None)
            return SimpleNamespace(value=[[*name, *module.Figures(1, 2, False, 3, 4)] for name in open_there])

    class Links:
        async def to(self, address):
            await trio.lowlevel.checkpoint()
            return Link()

    instances = [SimpleNamespace(name=name, address=name) for name in "ab"]
    ownership = SimpleNamespace(me=instances[0], instances=instances)
    async with opened(ownership=ownership, links=Links()) as (catalogue, store, clients):
        clients.start_soon(catalogue.figures)
        await trio.sleep(SCAN_S + 1)
        await store.create(LATER)
        open_there.append(LATER)
        assert set(await catalogue.figures()) == {FIRST, LATER}
        assert store.begun == SCANS
