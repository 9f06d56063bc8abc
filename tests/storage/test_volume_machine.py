"""Tiny volumes under random operations always equal the in-memory store, even after kills and power cuts.

The machine runs once with individual rows, the form of requests with few messages, and once with packs of a few rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from unittest import mock

import trio
from disks import copied_at_once, newest_log, partly_stored
from hypothesis import given, settings
from hypothesis import strategies as st

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, payload_prefix, stop_after
from plainsong.protocol.names import TopicName
from storage.base import Row, StoreView, read_rows
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine import packs
from storage.memory import MemoryStore
from tests.storage.contract import LAST, everything
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import settle

TINY = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, volume_bytes=800), max_open_volumes=2)
NAMES = [TopicName("ns", name) for name in ("a", "ab", "b")]
PREFIXES = [generation_prefix(name, 1) for name in NAMES]
MESSAGE, METADATA, PAYLOAD = Table.MESSAGE, Table.METADATA, Table.PAYLOAD

topics = st.integers(0, len(NAMES) - 1)
parts = st.floats(0, 1)
step = st.one_of(
    st.tuples(st.just("publish"), topics, st.integers(1, 6), st.sampled_from([None, 7, 8])),
    st.tuples(st.just("publish"), topics, st.integers(1, 6), st.sampled_from([None, 7, 8])),
    st.tuples(st.just("store"), topics, st.sampled_from([7, 8, -5]), st.integers(1, 4)),
    st.tuples(
        st.just("discard"), st.sampled_from([MESSAGE, PAYLOAD, METADATA]), st.integers(0, 2**16), st.integers(1, 8)
    ),
    st.tuples(st.just("delete"), st.integers(0, 2**16), st.integers(1, 3)),
    st.tuples(st.just("put back"), st.integers(0, 2**16), st.integers(1, 8)),
    st.tuples(st.just("all at once"), topics, st.integers(2, 6), st.integers(0, 2**16)),
    st.tuples(st.just("pin")),
    st.tuples(st.just("look at what was pinned")),
    st.tuples(st.just("roll back"), topics, st.sampled_from([7, 8]), parts, parts),
    st.tuples(st.just("drop"), topics, parts),
    st.tuples(st.just("drop payloads"), topics, st.sampled_from([7, 8, -5])),
    st.tuples(st.just("tidy")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("kill")),
    st.tuples(
        st.just("cut the power"), topics, st.integers(1, 9), st.integers(0, 2**16), st.sampled_from([0.1, 0.5, 0.9])
    ),
    st.tuples(st.just("read"), topics, parts, parts, st.booleans(), st.integers(1, 9)),
)


class Machine:
    """A store of tiny volumes, and an in-memory store to compare it with."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lives = 0
        self.model = MemoryStore()
        self.position = 0
        self.spent: set[tuple[Table, bytes]] = set()
        #: Messages that were removed individually and are not in a dropped range.
        self.removed: dict[bytes, bytes] = {}
        self.pinned: tuple[StoreView, list[Row]] | None = None

    @property
    def directory(self) -> Path:
        return self.home / f"life{self.lives}"

    async def open(self) -> None:
        self.store = await LevelDBStore.open(self.directory, TINY)

    async def write(self, *commit: object) -> None:
        await self.store.write(list(commit), claim=None)
        await self.model.write(list(commit), claim=None)

    # --- steps -----------------------------------------------------------------------------------

    async def publish(self, topic: int, count: int, pointer: int | None) -> None:
        await self.write(*self.publishing(topic, count, pointer, b"m" * 40))

    def publishing(self, topic: int, count: int, pointer: int | None, payload: bytes) -> list[Put]:
        positions = range(self.position, self.position + count)
        self.position += count
        value = under(pointer, payload) if pointer else b"\x00\x50" + payload
        suffixes = [pack_position(1000 + each // 3, each % 3) for each in positions]
        # Some have equal lengths, others do not.
        values = [value + b"." * (each % 3 if count % 2 else 0) for each in positions]
        put = Put(MESSAGE, PREFIXES[topic], suffixes, values)
        return [put, put_one(METADATA, b"head%d" % topic, b"%d" % self.position)]

    async def store_payloads(self, topic: int, pointer: int, count: int) -> None:
        prefix = payload_prefix(NAMES[topic], 1, pointer)
        if (PAYLOAD, prefix) in self.spent:
            return
        positions = range(self.position, self.position + count)
        self.position += count
        await self.write(Put(PAYLOAD, prefix, [pack_position(each, 0) for each in positions], [b"p" * 30] * count))

    async def discard(self, table: Table, seed: int, count: int) -> None:
        rows = self.model.tables[table].rows
        keys = Random(seed).sample(sorted(rows), min(count, len(rows)))
        if table is MESSAGE:
            self.removed |= {key: rows[key] for key in keys}
        await self.store.discard(table, keys)
        await self.model.discard(table, keys)

    async def delete(self, seed: int, count: int) -> None:
        rows = self.model.tables[MESSAGE].rows
        keys = Random(seed).sample(sorted(rows), min(count, len(rows)))
        self.removed |= {key: rows[key] for key in keys}
        await self.write(Delete(MESSAGE, keys), put_one(METADATA, b"deleted", b"%d" % seed))

    async def put_back(self, seed: int, count: int) -> None:
        """Put removed rows back, one by one."""
        keys = Random(seed).sample(sorted(self.removed), min(count, len(self.removed)))
        await self.write(*(put_one(MESSAGE, key, self.removed.pop(key)) for key in keys))

    async def all_at_once(self, topic: int, count: int, seed: int) -> None:
        """Write one commit: messages, removals of some of them and of earlier ones, and one removed message again."""
        put, head = self.publishing(topic, count, None, b"n" * 35)
        keys = [put.prefix + suffix for suffix in put.suffixes]
        chosen = Random(seed).sample(sorted([*keys, *self.model.tables[MESSAGE].rows]), count)
        back = put_one(MESSAGE, chosen[0], b"\x00\x06new")
        later = self.publishing(topic, count, 7, b"o" * 30)
        await self.write(put, head, Delete(MESSAGE, chosen), back, *later)

    async def pin(self) -> None:
        await self.unpin()
        self.pinned = (await self.store.pin(60.0), await everything(self.model))

    async def look_at_what_was_pinned(self) -> None:
        if self.pinned is not None:
            view, rows = self.pinned
            assert await read_rows(view, MESSAGE, b"", LAST, limit=10**6) == rows
            assert await read_rows(view, MESSAGE, b"", LAST, limit=10**6, reverse=True) == rows[::-1]
            for key, value in rows[::5]:
                assert await view.get(MESSAGE, key) == value

    async def unpin(self) -> None:
        if self.pinned is not None:
            await self.pinned[0].aclose()
        self.pinned = None

    async def roll_back(self, topic: int, pointer: int, first: float, last: float) -> None:
        start, stop = sorted((self.at(topic, first), self.at(topic, last)))
        await self.write(RollBack(start, stop, pointer), put_one(METADATA, b"rolled", b"%d" % pointer))

    async def drop(self, topic: int, part: float) -> None:
        # Nothing will be written to the range again.
        stop = PREFIXES[topic] + pack_position(1000 + int(part * self.position) // 3, 0)
        await self.drop_both(MESSAGE, PREFIXES[topic], stop)

    async def drop_payloads(self, topic: int, pointer: int) -> None:
        prefix = payload_prefix(NAMES[topic], 1, pointer)
        self.spent.add((PAYLOAD, prefix))
        await self.drop_both(PAYLOAD, prefix, stop_after(prefix))

    async def drop_both(self, table: Table, start: bytes, stop: bytes) -> None:
        self.removed = {
            key: value for key, value in self.removed.items() if table is PAYLOAD or not start <= key < stop
        }
        await self.store.drop(table, [(start, stop)])
        await self.model.drop(table, [(start, stop)])

    async def tidy(self) -> None:
        await self.store.tidy()

    async def reopen(self) -> None:
        await self.unpin()
        await self.store.aclose()
        await self.open()

    async def kill(self) -> None:
        """Continue with a copy of the files as they are now."""
        old = self.directory
        self.lives += 1
        await self.unpin()
        settle(self.store._db)
        copied_at_once(old, self.directory)
        await self.store.aclose()
        await self.open()

    async def cut_the_power(self, topic: int, count: int, seed: int, share: float) -> None:
        """Cut the power during a commit: any of the log sectors that it wrote keep their previous content."""
        old = self.directory
        self.lives += 1
        await self.unpin()
        settle(self.store._db)
        copied_at_once(old, self.directory)
        before = newest_log(self.store._db.sets.current.newest.path)
        commit = self.publishing(topic, count, None, Random(seed).randbytes(400))
        await self.store.write(list(commit), claim=None)
        # If the commit filled its volume, LevelDB may have removed this log, and there is nothing to lose.
        with suppress(FileNotFoundError):
            after, random = before.read_bytes(), Random(seed)
            log = self.directory / before.relative_to(old)
            log.write_bytes(partly_stored(log.read_bytes(), after, lambda _: random.random() < share))
        await self.store.aclose()
        await self.open()
        # The commit is present or absent as a whole, in all tables.
        if await everything(self.store, MESSAGE) != await everything(self.model, MESSAGE):
            await self.model.write(list(commit), claim=None)
        await self.check()

    async def read(self, topic: int, first: float, last: float, reverse: bool, limit: int) -> None:
        start, stop = sorted((self.at(topic, first), self.at(topic, last)))
        options = {"limit": limit, "reverse": reverse}
        expected = await read_rows(self.model, MESSAGE, start, stop, **options)
        assert await read_rows(self.store, MESSAGE, start, stop, **options) == expected
        assert self.store.may_have(MESSAGE, start, stop) or not expected
        for key, value in expected[:2]:
            assert await self.store.get(MESSAGE, key) == value
        assert await self.store.get(MESSAGE, start + b"x") is None

    def at(self, topic: int, part: float) -> bytes:
        """Return a key among a topic's keys."""
        each = int(part * (self.position + 1))
        return PREFIXES[topic] + pack_position(1000 + each // 3, each % 3)

    async def check(self) -> None:
        for table in Table:
            expected = await everything(self.model, table)
            assert await everything(self.store, table) == expected
            assert await everything(self.store, table, reverse=True) == expected[::-1]
            assert await read_rows(self.store, table, b"", LAST, limit=10**6, values=False) == [
                (key, b"") for key, _ in expected
            ]


STEPS = {"store": "store_payloads"}


@contextmanager
def packs_of(rows: int) -> Iterator[None]:
    """Make packs of about ``rows`` rows from requests with two or more messages."""
    with mock.patch.object(packs, "MIN_ROWS", 2), mock.patch.object(packs, "PACK_BYTES", rows * 50):
        yield


@given(steps=st.lists(step, max_size=40), rows=st.sampled_from([0, 1, 3, 100]))
@settings(max_examples=30 if settings.get_current_profile_name() == "house" else 600)  # each makes dozens of syncs
def test_volumes_always_have_what_the_store_in_memory_has(steps, rows):
    async def run() -> None:
        with tempfile.TemporaryDirectory() as home:
            machine = Machine(Path(home))
            await machine.open()
            try:
                for name, *arguments in steps:
                    await getattr(machine, STEPS.get(name, name.replace(" ", "_")))(*arguments)
                await machine.check()
                await machine.kill()
                await machine.check()
            finally:
                await machine.store.aclose()

    with packs_of(rows) if rows else nullcontext():
        trio.run(run)
