"""LevelDB compresses each block of a table that shrinks, and reads both kinds of blocks."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from random import Random

import plyvel

from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine.database import Database
from tests.storage.contract import MESSAGE, everything
from tests.storage.tiny_volumes import TINY, fill, key


def table_bytes(path: Path, value: bytes) -> int:
    """Return the total size of a volume's tables with a thousand messages of this value."""
    database = Database(path, LevelDBOptions().volume_shape(), create=True)
    with database.batch(sync=False) as batch:
        for number in range(1000):
            batch.put(bytes([MESSAGE]) + key(number), value[300 * number : 300 * (number + 1)])
    database.flush_memory()
    database.close()
    return sum(table.stat().st_size for table in path.glob("*.ldb"))


def test_a_block_is_compressed_if_that_makes_it_smaller(tmp_path):
    assert table_bytes(tmp_path / "text", b"one two three " * 30_000) < 0.3 * 300_000
    random = Random(1).randbytes(300_000)
    assert 300_000 < table_bytes(tmp_path / "random", random) < 1.15 * 300_000


def uncompressed(volumes: Path) -> None:
    """Leave a stopped store as an earlier version would, with no volume compressed."""
    path = volumes / "LIST"
    listed = [{**each, "compressed": False} for each in json.loads(path.read_bytes().partition(b"\n")[2])]
    for each in listed:
        with plyvel.DB(str(volumes / each["folder"]), compression=None) as database:
            database.compact_range()
    content = json.dumps(listed).encode()
    path.write_bytes(b"%08x\n" % zlib.crc32(content) + content)


async def test_volumes_that_an_earlier_version_did_not_compress_are_read_and_continue(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory, TINY) as store:
        await fill(store, 30)
        rows = await everything(store)
    uncompressed(directory / "volumes")
    tables = list(directory.glob("volumes/*/*.ldb"))
    assert any(b"v" * 100 in table.read_bytes() for table in tables)
    async with await LevelDBStore.open(directory, TINY) as store:
        assert await everything(store) == rows
        await fill(store, 30, 30)
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(60)]
    assert b"compressed" not in (directory / "volumes" / "LIST").read_bytes()
