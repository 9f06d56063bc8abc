"""Compression of volumes: a sample estimates LevelDB's savings, and decides for each new volume."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disks import copied_at_once

from plainsong.protocol.ids import pack_position
from storage.leveldb import LevelDBOptions, LevelDBStore, tidying
from storage.leveldb.engine.compression import Stretch, is_worth_it
from storage.leveldb.engine.database import Database
from storage.leveldb.volume_list import read_list
from tests.storage.contract import MESSAGE, NAME, everything
from tests.storage.tiny_volumes import PREFIX, TINY, key, message, settled

RANDOM = random.Random(7)
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
]


def of_words() -> bytes:
    return " ".join(RANDOM.choices(WORDS, k=20)).encode()


def a_record() -> bytes:
    fields = {"id": RANDOM.getrandbits(40), "user": f"u{RANDOM.randrange(9999)}", "event": RANDOM.choice(WORDS)}
    return json.dumps(fields).encode()


#: Kinds of payloads.
KINDS: dict[str, Callable[[], bytes]] = {
    "one letter": lambda: b"x" * 100,
    "random bytes": lambda: RANDOM.randbytes(100),
    "few random bytes": lambda: RANDOM.randbytes(10),
    "random hexadecimal": lambda: RANDOM.randbytes(50).hex().encode(),
    "random base64": lambda: b64encode(RANDOM.randbytes(75)),
    "random digits": lambda: str(RANDOM.getrandbits(330)).encode(),
    "words": of_words,
    "records": a_record,
    "a little text around base64": lambda: b'{"type":"order","body":"' + b64encode(RANDOM.randbytes(150)) + b'"}',
    "half text, half base64": lambda: (
        b'{"type":"order","source":"shop-eu-1","body":"' + b64encode(RANDOM.randbytes(50))
    ),
    "now compressible, now not": lambda: RANDOM.choice([b"x" * 400, RANDOM.randbytes(400)]),
    "large and random": lambda: RANDOM.randbytes(100_000),
    "large, of words": lambda: b" ".join(of_words() for _ in range(500)),
}


def filled(path: Path, payload: Callable[[], bytes], *, compressed: bool) -> Database:
    """Make a volume's database with a MiB of messages, all in tables."""
    RANDOM.seed(7)
    database = Database(path, LevelDBOptions().volume_shape(compressed=compressed), create=True)
    with database.batch(sync=False) as batch:
        size = number = 0
        while size < 1 << 20:
            value = payload()
            batch.put(bytes([MESSAGE]) + key(number), value)
            size += len(value)
            number += 1
    database.flush_memory()
    return database


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_says_whether_leveldb_saves_a_tenth(kind, tmp_path):
    plain = filled(tmp_path / "plain", KINDS[kind], compressed=False)
    small = filled(tmp_path / "small", KINDS[kind], compressed=True)
    stretch = Stretch(MESSAGE, key(0), key(1 << 20), 1 << 20)
    with plain.rows(MESSAGE, key(0), key(1 << 20), values=False) as rows:
        last = list(rows)[-1][0]
    saves = small.bytes_on_disk() < 0.9 * plain.bytes_on_disk()
    assert is_worth_it(plain, [stretch._replace(last=last)]) is saves
    small.close()
    plain.close()


def test_rows_that_are_not_there_say_nothing(tmp_path):
    database = Database(tmp_path / "data", LevelDBOptions().volume_shape(), create=True)
    assert is_worth_it(database, []) is None
    assert is_worth_it(database, [Stretch(MESSAGE, key(0), key(9), 1000)]) is None
    database.close()


def compressed(path: Path) -> list[bool]:
    """Return for each volume, oldest first, whether it is compressed."""
    return [listed.compressed for listed in read_list(path / "volumes")]


async def fill(store: LevelDBStore, payload: Callable[[], bytes], first: int) -> None:
    """Write enough for three or four volumes."""
    claim = await store.claim(NAME)
    for number in range(first, first + 30):
        await store.write([message(number, payload())], claim=claim)
        await settled(store)


async def test_a_volume_after_one_that_does_not_compress_is_not_compressed_and_the_other_way_round(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert compressed(tmp_path / "data") == [True]
        await fill(store, KINDS["random bytes"], 0)
        before = compressed(tmp_path / "data")
        assert before[0]
        assert not any(before[1:])
        await fill(store, KINDS["one letter"], 100)
        assert compressed(tmp_path / "data")[-2:] == [True, True]
        written = await everything(store)
        assert len(written) == 60
    # Each keeps its state, and all are readable after any end.
    listed = compressed(tmp_path / "data")
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await everything(store) == written
        found = [volume.shape.compressed for volume in store._db.sets.current.all]
        assert found == listed[: len(found)]


async def test_kill_9_does_not_change_whether_a_volume_is_compressed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, KINDS["random bytes"], 0)
        copied_at_once(tmp_path / "data", tmp_path / "copy")
        written = await everything(store)
    async with await LevelDBStore.open(tmp_path / "copy", TINY) as store:
        assert not store._db.sets.current.newest.shape.compressed
        assert await everything(store) == written


@pytest.mark.parametrize(("setting", "kind"), [("snappy", "random bytes"), ("none", "one letter")])
async def test_what_is_set_holds_for_every_new_volume(setting, kind, tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", replace(TINY, compression=setting)) as store:
        await fill(store, KINDS[kind], 0)
        assert set(compressed(tmp_path / "data")) == {setting == "snappy"}


@pytest.mark.parametrize(("setting", "expected"), [("auto", False), ("snappy", True), ("none", False)])
async def test_a_volume_that_is_rewritten_is_compressed_as_its_sources_unless_something_is_set(
    setting, expected, tmp_path
):
    async with await LevelDBStore.open(tmp_path / "data", replace(TINY, compression="none")) as store:
        await fill(store, KINDS["random bytes"], 0)
    async with await LevelDBStore.open(tmp_path / "data", replace(TINY, compression=setting)) as store:
        sources = store._db.sets.current.all[:1]
        await store._ask(
            lambda tables, done: tables.keeper.thread.start(lambda: tidying.rewrite(tables.keeper, sources), done)
        )
        assert store._db.sets.current.all[0].shape.compressed is expected
        assert compressed(tmp_path / "data")[0] is expected
        assert (await everything(store))[0][0] == PREFIX + pack_position(0, 0)
