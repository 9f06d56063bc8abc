"""When a request, a connection or an open topic ends, its objects are freed without the garbage collector.

Reference cycles use memory outside any cache, and the collector stops every request while it runs: a cycle in each
commit made publishes over 16 connections a tenth slower.
"""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from plainsong.protocol.names import TopicName
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.broker.broker_in_process import in_process
from tests.broker.listeners import Reader, post

OURS = ("actors.", "broker.", "plainsong.", "storage.")
JSON = "Content-Type: application/json"


def request(verb, **body):
    return post(f"t/{verb}", json.dumps(body).encode(), JSON)


def produced(number):
    return request("publish", messages=[{"payload": "eA==", "sequenceId": number}], producer="p")


KINDS = {
    "a publish": lambda number: request("publish", messages=["eA=="]),
    "a publish of many": lambda number: request("publish", messages=["eA=="] * 2000),
    "a publish of a producer": produced,
    "a poll": lambda number: request("poll", limit=10),
    "a poll of what is committed": lambda number: request("poll", limit=10, isolation="committed"),
    "a refusal": lambda number: request("publish", messages=[]),
}


@pytest.fixture(params=[0.0, 10.0], ids=["the thread writes", "the event loop writes"])
async def store(request, tmp_path):
    async with await LevelDBStore.open(
        tmp_path / "data", LevelDBOptions(StorageConfig(inline_commit_s=request.param))
    ) as opened:
        yield opened


def kinds_of_garbage():
    """Return the types of our objects in ``gc.garbage``: those that only the collector could have freed."""
    gc.collect()
    found = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
    return sorted(name for name in found if name.startswith(OURS))


@contextmanager
def nothing_waits_for_the_collector():
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        assert kinds_of_garbage() == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


class Client:
    """Opens connections to a daemon's HTTP listener."""

    def __init__(self, daemon):
        self._url = daemon.http.base_url

    async def connect(self):
        return await trio.open_tcp_stream(self._url.host, self._url.port)

    async def send(self, *requests):
        """Send requests on a new connection, and return the statuses."""
        async with await self.connect() as stream:
            statuses = set()
            reader = Reader(stream)
            for each in requests:
                await stream.send_all(each)
                statuses.add((await reader.reply()).status)
        return statuses


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_are_freed_without_the_garbage_collector(store, kind):
    async with in_process(store=store, listener="hot") as daemon:
        await daemon.create("t")
        async with await Client(daemon).connect() as stream:
            reader = Reader(stream)
            statuses = set()

            async def ask(numbers):
                for number in numbers:
                    await stream.send_all(KINDS[kind](number))
                    statuses.add((await reader.reply()).status)

            await ask(range(10))  # creates everything that is created only once
            with nothing_waits_for_the_collector():
                await ask(range(10, 40))
            assert statuses == ({400} if kind == "a refusal" else {200})


async def test_connections_are_freed_without_the_garbage_collector(store):
    async with in_process(store=store, listener="hot") as daemon:
        await daemon.create("t")
        client = Client(daemon)
        assert await client.send(*(make(1) for make in KINDS.values())) == {200, 400}
        await wait_all_tasks_blocked()
        with nothing_waits_for_the_collector():
            for number in range(5):
                await client.send(*(make(2 + number) for make in KINDS.values()))
                await client.send()
            await wait_all_tasks_blocked()


@pytest.mark.parametrize("given_away", [False, True], ids=["closed", "given away"])
async def test_open_topics_are_freed_without_the_garbage_collector(store, given_away):
    async with in_process(store=store, listener="hot") as daemon:
        await daemon.create("t")
        client, directory = Client(daemon), daemon.service.directory

        async def open_and_close(number):
            statuses = await client.send(*(make(number) for make in KINDS.values()))
            entry = directory.entry(TopicName("ns", "t"))
            ended = entry.done
            entry.close(given_away=given_away)
            await ended.wait()
            await wait_all_tasks_blocked()
            return statuses

        assert await open_and_close(1) == {200, 400}
        assert len(directory) == 0
        with nothing_waits_for_the_collector():
            for number in range(2, 5):
                await open_and_close(number)
