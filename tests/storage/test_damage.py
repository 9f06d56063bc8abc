"""Damaged files are reported and never repaired; nothing is removed, and no read returns a wrong row."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import plyvel
import pytest
import trio
from disks import copied_at_once, partly_stored, snapshot, write_commits, written

from plainsong.protocol.effects import RollBack, Table
from storage.base import Row, StoreDamaged, StoreError, StoreUnusable
from storage.config import StorageConfig
from storage.inspect.readonly import open_stopped
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine.database import Database
from storage.leveldb.engine.manifest import newest_log
from storage.leveldb.engine.torn_end import SECTOR_BYTES
from tests.patience import PATIENCE_S
from tests.storage.contract import LAST, everything
from tests.storage.contract import NAME as CONTRACT_NAME
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import PREFIX, TINY, fill, key, message, settled

SMALL = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16))
VOLUME = Path("volumes") / "00000001"


@pytest.fixture
async def stopped(tmp_path):
    """A stopped store with tables, a log with rows, and a manifest with several edits; and the store's rows."""
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await write_commits(store, 40, rows=50, value=Random(1).randbytes(200))
        rows = await everything(store)
        # LevelDB removes a log once its table is written.
        with trio.fail_after(PATIENCE_S):
            while len(list((tmp_path / "data" / VOLUME).glob("*.log"))) > 1:  # noqa: ASYNC110 - LevelDB does not say
                await trio.sleep(0.01)
    files = {path.suffix for path in (tmp_path / "data" / VOLUME).iterdir()}
    assert {".ldb", ".log"} <= files
    return tmp_path / "data", rows


def only(directory: Path, pattern: str) -> Path:
    return max((directory / VOLUME).glob(pattern), key=lambda path: path.stat().st_size)


def kept(directory: Path) -> dict[str, bytes]:
    """Return the files, except LevelDB's text log (LOG) and the locks."""
    return {
        name: data
        for name, data in snapshot(directory).items()
        if not name.endswith((".lock", "LOG", "LOG.old", "/LOCK"))
    }


def killed(directory: Path) -> None:
    """Leave a store as a killed daemon would: without an index of its newest volume."""
    (directory / f"{VOLUME}.index").unlink()


async def refused(directory: Path) -> StoreUnusable:
    before = kept(directory)
    with pytest.raises(StoreDamaged) as caught:
        await LevelDBStore.open(directory)
    assert kept(directory) == before
    assert "plainsong store explain" in caught.value.hint
    return caught.value


async def test_without_current_nothing_is_created_over_the_tables(stopped):
    directory, _ = stopped
    (directory / VOLUME / "CURRENT").unlink()
    assert "CURRENT is missing" in (await refused(directory)).detail


@pytest.mark.parametrize("said", ["", "MANIFEST-000002", "../../etc/passwd\n", "MANIFEST-999999\n"])
async def test_a_current_file_that_names_no_manifest_is_damage(stopped, said):
    directory, _ = stopped
    (directory / VOLUME / "CURRENT").write_text(said)
    await refused(directory)


async def test_a_missing_manifest_is_damage(stopped):
    directory, _ = stopped
    only(directory, "MANIFEST-*").unlink()
    assert "MANIFEST" in (await refused(directory)).detail


async def test_a_missing_table_is_damage(stopped):
    directory, _ = stopped
    only(directory, "*.ldb").unlink()
    await refused(directory)


async def test_a_missing_log_is_damage(stopped):
    directory, _ = stopped
    only(directory, "*.log").unlink()
    await refused(directory)


async def test_a_missing_volume_is_damage(stopped):
    directory, _ = stopped
    shutil.rmtree(directory / VOLUME)
    await refused(directory)


async def test_a_manifest_cut_anywhere_is_damage_or_loses_no_row(stopped, tmp_path):
    directory, rows = stopped
    manifest = only(directory, "MANIFEST-*")
    size = manifest.stat().st_size
    outcomes = set()
    for length in sorted({*range(0, size, max(1, size // 40)), size - 1}):
        copy = tmp_path / f"cut{length}"
        shutil.copytree(directory, copy)
        with (copy / VOLUME / manifest.name).open("r+b") as file:
            file.truncate(length)
        before = kept(copy)
        try:
            async with await LevelDBStore.open(copy, SMALL) as store:
                assert await everything(store) == rows
                outcomes.add("whole")
        except StoreDamaged:
            assert kept(copy) == before
            outcomes.add("damaged")
        shutil.rmtree(copy)
    assert "damaged" in outcomes


def scanned(directory: Path) -> tuple[list[Row], str]:
    """Return the readable messages of a stopped store, and the reported error."""
    fed: list[Row] = []

    def feed(chunk: list[Row]) -> bool:
        fed.extend(chunk)
        return True

    with open_stopped(directory) as (database, complaint):
        try:
            database.scan(
                Table.MESSAGE, b"", LAST, feed, reverse=False, first_chunk=64, values=True, between=lambda: None
            )
        except StoreError as error:
            return fed, error.detail + error.hint
    return fed, complaint


async def test_flipped_bytes_of_a_table_are_an_error_and_never_a_wrong_row(stopped):
    directory, rows = stopped
    table = only(directory, "*.ldb")
    whole = table.read_bytes()
    answers = set()
    for at in range(0, len(whole), max(1, len(whole) // 25)):
        table.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        fed, said = scanned(directory)
        assert fed == rows[: len(fed)]
        assert said or fed == rows
        answers.add(said)
    assert any("store explain" in said for said in answers)


async def test_a_flipped_byte_in_the_log_is_damage_and_the_log_is_kept(stopped):
    directory, _ = stopped
    killed(directory)
    log = only(directory, "*.log")
    whole = bytearray(log.read_bytes())
    whole[40] ^= 0x55
    log.write_bytes(whole)
    assert "orruption" in (await refused(directory)).detail


async def test_a_log_that_lost_commits_while_the_daemon_was_stopped_is_damage(stopped):
    directory, _ = stopped
    log = only(directory, "*.log")
    with log.open("r+b") as file:
        file.truncate(written(log) // 2)
    assert "commits are missing" in (await refused(directory)).detail


@pytest.mark.parametrize("size", [20, 700, 70_000])
async def test_after_a_clean_stop_a_lost_sector_of_the_log_is_damage_wherever_it_is(tmp_path, size):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        # If a record in a block reads as zeros, LevelDB skips the rest of the block without an error.
        await write_commits(store, 30, rows=1, value=Random(size).randbytes(size))
    log = only(directory, "*.log")
    whole, last = log.read_bytes(), (written(log) - 1) // SECTOR_BYTES
    for sector in {0, 1, last // 2, *range(max(0, last - 5), last + 1)}:
        start, end = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
        log.write_bytes(whole[:start] + bytes(SECTOR_BYTES) + whole[end:])
        assert "has changed since it was closed" in (await refused(directory)).detail, sector
    log.write_bytes(whole)
    async with await LevelDBStore.open(directory) as store:
        assert len(await everything(store)) == 30


async def test_after_a_clean_stop_a_lost_sector_of_the_metadatas_log_is_damage_wherever_it_is(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 30, rows=1, value=bytes(range(1, 200)))
        rows = await everything(store)
    (log,) = (directory / "metadata").glob("*.log")
    whole = log.read_bytes()
    for sector in range(-(-len(whole) // SECTOR_BYTES)):
        start, end = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
        log.write_bytes(whole[:start] + bytes(len(whole[start:end])) + whole[end:])
        assert "has changed since it was closed" in (await refused(directory)).detail, sector
    log.write_bytes(whole)
    async with await LevelDBStore.open(directory) as store:
        assert await everything(store) == rows
    killed(directory)
    async with await LevelDBStore.open(directory) as store:
        assert await everything(store) == rows


@pytest.mark.parametrize("place", [0, 40, -1])
async def test_after_a_clean_stop_a_flipped_byte_of_the_log_is_damage(stopped, place):
    directory, _ = stopped
    log = only(directory, "*.log")
    data = bytearray(log.read_bytes())
    data[place] ^= 1
    log.write_bytes(data)
    assert f"{log.name} has changed since it was closed" in (await refused(directory)).detail


async def test_a_lost_sector_of_a_rollback_in_a_sealed_volume_is_damage_and_not_a_rollback_undone(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory, TINY) as store:
        claim = await store.claim(CONTRACT_NAME)
        for number in range(30):
            await store.write([message(number, under(77, b"x" * 90))], claim=claim)
            await settled(store)
        await store.write([RollBack(PREFIX, key(1), 77)], claim=claim)
        killed = copied_at_once(directory, tmp_path / "killed")
    for each in (directory, killed):
        log = only(each, "*.log")
        data = bytearray(log.read_bytes())
        assert 0 < len(data) < SECTOR_BYTES
        log.write_bytes(bytes(len(data)))
        assert "has changed since it was closed" in (await refused(each)).detail
        log.write_bytes(data)
        async with await LevelDBStore.open(each, TINY) as store:
            assert await store.get(Table.MESSAGE, key(0)) == under(-77, b"x" * 90)


async def test_a_log_that_ends_in_a_torn_record_opens_without_it(stopped):
    directory, rows = stopped
    killed(directory)
    log = only(directory, "*.log")
    with log.open("r+b") as file:
        file.truncate(written(log) - 5)
    async with await LevelDBStore.open(directory) as store:
        assert await everything(store) == rows[:-50]


def with_hole(log: Path, last: int, page: int) -> bytes:
    """Return a log as if one page of its last commit, which begins at ``last``, had never reached the disk."""
    data = bytearray(log.read_bytes())
    start, end = max(page * 4096, last), min((page + 1) * 4096, len(data))
    data[start:end] = bytes(end - start)
    return bytes(data)


async def test_a_last_commit_that_lacks_a_page_in_its_middle_is_left_out_like_an_unsynced_one(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 3, rows=50, value=Random(1).randbytes(200))
        rows = await everything(store)
        last = written(only(directory, "*.log"))
        await write_commits(store, 1, rows=400, value=Random(2).randbytes(200), first=3)
    killed(directory)
    log = only(directory, "*.log")
    before, end = snapshot(directory), written(log)
    assert end - last > 2 * 32768  # the commit spans several blocks
    for page in range(last // 4096, end // 4096 + 1):
        write_back(directory, before)
        log.write_bytes(with_hole(log, last, page))
        async with await LevelDBStore.open(directory) as store:
            assert await everything(store) == rows, page


async def test_a_last_commit_may_lack_any_sectors_and_every_earlier_one_is_read(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 3, rows=50, value=Random(1).randbytes(200))
        rows = await everything(store)
        before = only(directory, "*.log").read_bytes()
        await write_commits(store, 1, rows=300, value=Random(2).randbytes(200), first=3)
        all_rows = await everything(store)
    killed(directory)
    log = only(directory, "*.log")
    files, after = snapshot(directory), log.read_bytes()
    first, last = len(before.rstrip(b"\0")) // 512, written(log) // 512
    random, outcomes = Random(1), set()
    few = [{first}, {last}, {64}, {128}, {first, 64}, set(range(first, 64)), set(range(64, last + 1)), set()]
    shares = [random.choice([0.02, 0.5, 0.98]) for _ in range(25)]
    for lost in [*few, *({each for each in range(first, last + 1) if random.random() < share} for share in shares)]:
        write_back(directory, files)
        log.write_bytes(partly_stored(before, after, lost.__contains__))
        async with await LevelDBStore.open(directory) as store:
            found = await everything(store)
        assert found in (rows, all_rows)
        outcomes.add(len(found))
    assert outcomes == {len(rows), len(all_rows)}


async def test_a_commit_that_lacks_a_page_and_has_others_after_it_is_damage(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 1, rows=300, value=Random(1).randbytes(200))
        await write_commits(store, 1, rows=300, value=Random(2).randbytes(200), first=1)
    killed(directory)
    log = only(directory, "*.log")
    log.write_bytes(with_hole(log, 0, 3))
    assert "orruption" in (await refused(directory)).detail


async def test_a_last_commit_that_is_damaged_and_lacks_no_page_is_damage(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 1, rows=10, value=Random(1).randbytes(200))
        last = written(only(directory, "*.log"))
        await write_commits(store, 1, rows=400, value=Random(2).randbytes(200), first=1)
    killed(directory)
    log = only(directory, "*.log")
    data = bytearray(log.read_bytes())
    assert written(log) - last > 2 * 32768
    data[last + 1000] ^= 0x55
    log.write_bytes(data)
    assert "orruption" in (await refused(directory)).detail


async def test_a_log_that_is_damaged_elsewhere_too_is_left_unchanged(tmp_path):
    directory = tmp_path / "data"
    async with await LevelDBStore.open(directory) as store:
        await write_commits(store, 1, rows=10, value=Random(1).randbytes(200))
        last = written(only(directory, "*.log"))
        await write_commits(store, 1, rows=300, value=Random(2).randbytes(200), first=1)
    killed(directory)
    log = only(directory, "*.log")
    data = bytearray(with_hole(log, last, last // 4096 + 1))
    data[40] ^= 0x55
    log.write_bytes(data)
    assert "orruption" in (await refused(directory)).detail


@pytest.mark.parametrize("left", [b"", bytes(41)], ids=["empty", "zeros"])
async def test_a_power_cut_while_a_store_is_first_created_leaves_one_that_is_created_again(tmp_path, left):
    metadata = tmp_path / "data" / "metadata"
    metadata.mkdir(parents=True)
    (metadata / "MANIFEST-000001").write_bytes(left)
    (metadata / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await write_commits(store, 1)
        rows = await everything(store)
    async with await LevelDBStore.open(tmp_path / "data") as store:
        assert await everything(store) == rows


def write_back(directory: Path, files: dict[str, bytes]) -> None:
    """Restore a directory to its ``snapshot``."""
    shutil.rmtree(directory)
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


async def test_a_flipped_table_read_through_the_store_is_a_store_error(stopped):
    directory, _ = stopped
    table = only(directory, "*.ldb")
    whole = bytearray(table.read_bytes())
    whole[100] ^= 0x55
    table.write_bytes(whole)
    async with await LevelDBStore.open(directory, SMALL) as store:
        with pytest.raises(StoreError, match="scanning"):
            await everything(store)


@pytest.mark.parametrize("data", [b"", b"\x00" * 100, b"\xff" * 100, bytes(range(256)) * 200])
def test_bytes_that_are_not_a_manifest_name_no_log(data):
    assert newest_log(data) == 0


# --- inspecting a stopped store ---


async def test_inspecting_a_stopped_store_leaves_every_byte_unchanged(stopped):
    directory, rows = stopped
    before = snapshot(directory)
    with open_stopped(directory) as (database, complaint):
        assert database.get(Table.MESSAGE, rows[0][0]) == rows[0][1]
        assert complaint == ""
    assert snapshot(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


async def test_inspecting_a_damaged_store_shows_its_readable_rows_and_reports_the_rest(stopped):
    directory, rows = stopped
    log = only(directory, "*.log")
    whole = bytearray(log.read_bytes())
    whole[40] ^= 0x55
    log.write_bytes(whole)
    before = snapshot(directory)
    with open_stopped(directory) as (database, complaint):
        assert "has changed since it was closed" in complaint
        assert str(directory) in complaint
        assert database.get(Table.MESSAGE, rows[0][0]) == rows[0][1]
    assert snapshot(directory) == before


async def test_inspecting_no_store_or_a_directory_in_use_is_refused(tmp_path):
    with pytest.raises(StoreUnusable, match="is not a store"), open_stopped(tmp_path):
        pass
    async with await LevelDBStore.open(tmp_path / "data"):
        with pytest.raises(StoreUnusable, match="is in use by process"), open_stopped(tmp_path / "data"):
            pass


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_that_begins_in_a_damaged_block_is_an_error_and_not_an_empty_one(tmp_path, reverse):
    path = tmp_path / "one"
    database = Database(path, LevelDBOptions().volume_shape(), create=True)
    with database.batch(sync=True) as batch:
        for number in range(5):
            batch.put(bytes([Table.MESSAGE]) + b"k%d" % number, b"stays")
    database.flush_memory()
    database.close()
    (file,) = [each for each in path.glob("*.ldb") if b"stays" in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(b"stays")] ^= 1
    file.write_bytes(data)
    database = Database(path, LevelDBOptions().volume_shape(), create=False)
    try:
        with pytest.raises(plyvel.CorruptionError), database.rows(Table.MESSAGE, b"k", b"l", reverse=reverse) as rows:
            list(rows)
        with pytest.raises(StoreError):
            database.own_rows(b"\x00", b"\xff")
        with pytest.raises(StoreError):
            database.outermost_own_key(b"\x00", b"\xff")
        with pytest.raises(StoreError):
            database.outermost_own_key(b"\x00", b"\xff", last=True)
    finally:
        database.close()


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_that_reaches_a_damaged_last_block_is_an_error_and_not_an_end(tmp_path, reverse):
    path, random = tmp_path / "one", Random(1)
    values = [random.randbytes(200) for _ in range(500)]
    database = Database(path, LevelDBOptions().volume_shape(), create=True)
    with database.batch(sync=True) as batch:
        for number, value in enumerate(values):
            batch.put(bytes([Table.MESSAGE]) + b"k%03d" % number, value)
    database.flush_memory()
    database.close()
    last = values[0 if reverse else -1]
    (file,) = [each for each in path.glob("*.ldb") if last in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(last) + 7] ^= 1
    file.write_bytes(data)
    database = Database(path, LevelDBOptions().volume_shape(), create=False)
    try:
        with pytest.raises(plyvel.CorruptionError), database.rows(Table.MESSAGE, b"k", b"l", reverse=reverse) as rows:
            list(rows)
        with pytest.raises(StoreError):
            database.own_rows(b"\x00", b"\xff")
        # Rows that are not next to the damaged block are read completely.
        with database.rows(Table.MESSAGE, b"k200", b"k300", reverse=reverse) as rows:
            assert len(list(rows)) == 100
    finally:
        database.close()


async def test_without_the_list_of_volumes_no_volume_is_removed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        rows = await everything(store)
    place = tmp_path / "data" / "volumes" / "LIST"
    content = place.read_bytes()
    place.unlink()
    error = await refused(tmp_path / "data")
    assert "the list of volumes" in error.detail
    place.write_bytes(content)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await everything(store) == rows
