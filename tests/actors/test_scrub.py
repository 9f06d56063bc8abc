"""The scrub on a real LevelDB finds damage on disk with its location, and nothing else."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import trio
from actors_in_process import SetClock

from actors.ownership import Alone
from actors.scrub import Scrub
from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.rows import plain_head
from storage.base import StoreError
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from tests.storage import far_store
from tests.storage.faulty import FaultyStore

SMALL = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, block_cache_bytes=0))
#: So few tables that LevelDB merges none of them, which would leave replaced ones in the folder.
TWO_TABLES = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 19, block_cache_bytes=0))
ORDERS, BILLS = TopicName("shop", "orders"), TopicName("shop", "bills")
ROWS = 2_000
FIRST_MS = 1_700_000_000_000


async def fill(store):
    """Write messages with incompressible payloads, so that each block of a table has a few."""
    random = Random(1)
    for name in (ORDERS, BILLS):
        claim = await store.claim(name)
        metadata = Metadata(1, TopicProperties(), 1, 1)
        await store.write([put_one(Table.METADATA, metadata_key(name), metadata.encode())], claim=claim)
        for at in range(0, ROWS, 100):
            suffixes = [pack_position(FIRST_MS + n, 0) for n in range(at, at + 100)]
            values = [plain_head(200) + random.randbytes(200) for _ in suffixes]
            await store.write([Put(Table.MESSAGE, generation_prefix(name, 1), suffixes, values)], claim=claim)


def scrub_of(store, file=None):
    directory = SimpleNamespace(environment=SimpleNamespace(ownership=Alone()))
    return Scrub(store, directory, SetClock(), 3600, 1 << 40, file)


def id_at(number):
    return f"{FIRST_MS + number:016x}" + "0" * 24


async def test_a_whole_store_has_no_findings_and_every_row_is_read(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        scrub = scrub_of(store)
        await scrub.round()
    report = scrub.report
    assert report.findings == []
    assert report.rows == 2 * ROWS + 2
    assert report.last_complete_ms is not None
    assert report.shown()["state"] == "waiting"


async def two_tables(directory):
    """Fill a store that has two tables; return them."""
    async with await LevelDBStore.open(directory, TWO_TABLES) as store:
        await fill(store)
    async with await LevelDBStore.open(directory, TWO_TABLES):
        pass  # this moves the log into a table
    tables = sorted(directory.glob("volumes/*/*.ldb"))
    assert len(tables) == 2
    return tables


@pytest.mark.parametrize("which", [0, -1])
async def test_a_flipped_bit_on_disk_is_found_with_topic_ids_and_file_and_the_rest_is_read(tmp_path, which):
    table = (await two_tables(tmp_path / "data"))[which]
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        scrub = scrub_of(store)
        await scrub.round()
        (finding,) = [each.shown() for each in scrub.report.findings]
        assert finding["namespace"] == "shop"
        assert finding["topic"] in ("orders", "bills")
        assert (finding["generation"], finding["table"]) == (1, "message")
        assert id_at(0) <= finding["from"] < finding["to"] <= id_at(ROWS)
        assert "corrupt" in finding["why"].lower() or "checksum" in finding["why"].lower()
        # A block has fewer than a hundred of these rows, and all others were read.
        assert 2 * ROWS + 2 - 100 <= scrub.report.rows < 2 * ROWS + 2
        # Nothing was moved: the next round reports the same.
        before = scrub.report.shown()["findings"]
        await scrub.round()
        assert scrub.report.shown()["findings"] == before


@pytest.mark.parametrize("which", [0, -1])
async def test_a_missing_table_file_is_a_finding_and_the_round_runs_to_its_end(tmp_path, which):
    table = (await two_tables(tmp_path / "data"))[which]
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        aside = table.rename(tmp_path / table.name)
        scrub = scrub_of(store)
        await scrub.round()
        assert scrub.report.last_complete_ms is not None
        findings = [each.shown() for each in scrub.report.findings]
        assert {each["topic"] for each in findings} == {"orders", "bills"}
        # LevelDB names the file; where the files of rows cannot be determined, the folder is named.
        assert all(table.name in each["why"] for each in findings)
        assert {each["file"] for each in findings} == {str(table.parent.relative_to(tmp_path / "data"))}
        # Once it is put back, its rows are there again.
        aside.rename(table)
        await scrub.round()
        assert scrub.report.findings == []
        assert scrub.report.rows == 2 * ROWS + 2


async def test_adjacent_unparseable_rows_are_one_finding(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        claim = await store.claim(ORDERS)
        keys = [pack_position(FIRST_MS + n, 7) for n in (10, 11, 500)]
        await store.write([Put(Table.MESSAGE, generation_prefix(ORDERS, 1), keys, [b"\xff?"] * 3)], claim=claim)
        await store.write([put_one(Table.METADATA, b"\x00hshop:orders:\x00\x00\x00\x01", b"?")], claim=claim)
        scrub = scrub_of(store)
        await scrub.round()
    shown = [each.shown() for each in scrub.report.findings]
    assert [(each["table"], each["rows"]) for each in shown] == [
        ("metadata", 1),
        ("message", 1),
        ("message", 1),
        ("message", 1),
    ]
    assert {each["topic"] for each in shown} == {"orders"}
    assert shown[1]["from"] == shown[1]["to"] == f"{FIRST_MS + 10:016x}0007" + "0" * 20


async def test_a_requested_round_begins_at_once_and_rounds_never_overlap(tmp_path, nursery):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        scrub = scrub_of(store)
        assert scrub.start_now()
        scrub.report.state = "running"
        assert not scrub.start_now()


async def test_the_last_report_survives_a_restart(tmp_path):
    kept = tmp_path / "data" / "scrub.json"
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        claim = await store.claim(ORDERS)
        keys = [pack_position(FIRST_MS + 10, 7)]
        await store.write([Put(Table.MESSAGE, generation_prefix(ORDERS, 1), keys, [b"\xff?"])], claim=claim)
        scrub = scrub_of(store, kept)
        await scrub.round()
        before = scrub.report.shown()
        assert before["findings"][0]["file"].startswith("volumes/")
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        again = scrub_of(store, kept)
        assert again.report.shown() == before
        name, table = ORDERS, Table.MESSAGE
        await again.forget(name, [(table, generation_prefix(name, 1), generation_prefix(name, 2))])
        assert scrub_of(store, kept).report.findings == []


async def test_findings_outlive_their_round_and_stay_until_their_rows_are_read_again(tmp_path, monkeypatch):
    kept = tmp_path / "data" / "scrub.json"

    async def damage(store, name):
        key = [pack_position(FIRST_MS + 10, 7)]
        await store.write(
            [Put(Table.MESSAGE, generation_prefix(name, 1), key, [b"\xff?"])], claim=await store.claim(name)
        )

    def topics(scrub):
        return [each.name for each in scrub.report.findings]

    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        await damage(store, ORDERS)
        scrub = scrub_of(store, kept)
        await scrub.round()
        await damage(store, BILLS)
        read = scrub._range

        async def killed_before_orders(table, start, stop, name):
            if name == ORDERS:
                raise KeyboardInterrupt
            await read(table, start, stop, name)

        with monkeypatch.context() as patch:
            patch.setattr(scrub, "_range", killed_before_orders)
            with pytest.raises(KeyboardInterrupt):
                await scrub.round()
        assert topics(scrub) == [BILLS, ORDERS]
        again = scrub_of(store, kept)
        assert topics(again) == [BILLS, ORDERS]
        assert again.report.shown()["state"] == "waiting"
        await again.round()
        assert sorted(topics(again)) == [BILLS, ORDERS]


NOWHERE = (
    b'{"findings": [], "startedMs": 1, "lastCompleteMs": 1, "rows": 0, "bytes": 0, "moreFindings": 0, "reached": 5}'
)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"findings": [{}]}', b'{"findings": 5}', b"\xff\xfe", NOWHERE])
async def test_an_unreadable_report_is_ignored(tmp_path, content):
    kept = tmp_path / "scrub.json"
    kept.write_bytes(content)
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        assert scrub_of(store, kept).report.last_complete_ms is None


async def test_a_report_that_cannot_be_written_does_not_stop_a_round(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        scrub = scrub_of(store, tmp_path / "none" / "scrub.json")
        await scrub.round()
        assert scrub.report.last_complete_ms is not None


async def test_an_unavailable_store_is_not_damage(tmp_path):
    store = FaultyStore(MemoryStore())
    claim = await store.claim(ORDERS)
    await store.write(
        [put_one(Table.METADATA, metadata_key(ORDERS), Metadata(1, TopicProperties(), 1, 1).encode())], claim=claim
    )
    scrub = scrub_of(store)
    store.fail_next("scan")
    with pytest.raises(StoreError):
        await scrub.round()
    assert scrub.report.findings == []
    await scrub.round()
    assert scrub.report.findings == []


async def test_a_damaged_block_of_topics_is_a_finding_and_all_messages_are_still_read(
    tmp_path,
):
    names = [TopicName("shop", f"topic-{number:04d}") for number in range(200)]
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        metadata, key = Metadata(1, TopicProperties(), 1, 1).encode(), [pack_position(FIRST_MS, 0)]
        topics = [put_one(Table.METADATA, metadata_key(name), metadata) for name in names]
        damaged = [Put(Table.MESSAGE, generation_prefix(name, 1), key, [b"\xff?"]) for name in names]
        await store.write([*topics, *damaged], claim=await store.claim(names[0]))
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES):
        pass  # this moves the log into a table
    table = max((tmp_path / "data").glob("metadata/*.ldb"), key=lambda each: each.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        scrub = scrub_of(store)
        await scrub.round()
    findings = [each.shown() for each in scrub.report.findings]
    (block,) = [each for each in findings if each["table"] == "metadata"]
    first, last = bytes.fromhex(block["from"]), bytes.fromhex(block["to"])
    lost = [name for name in names if first <= metadata_key(name) <= last]
    assert 1 < len(lost) < len(names) // 2
    # Each topic's unparsable row was found once, even if the topic's name was unreadable.
    assert sorted(each["topic"] for each in findings if each["table"] == "message") == [each.topic for each in names]
    assert scrub.report.last_complete_ms is not None


async def test_a_round_over_a_remote_store_takes_at_most_twice_its_response_times(autojump_clock):
    store = far_store.FarStore()
    await far_store.fill(store, 50)
    scrub, begun_s = scrub_of(store), trio.current_time()
    await scrub.round()
    assert scrub.report.rows == 100
    assert trio.current_time() - begun_s < 2 * store.waited_s


# --- topics that the store does not give, and restarts ---------------------------------------------


NAMES = [TopicName("ns", f"t{number}") for number in range(10)]
WEEK_S = 7 * 86_400


class Regions(MemoryStore):
    """A store that can withhold some topics' messages, and that delays each topic's payloads."""

    def __init__(self):
        super().__init__()
        self.away = set()
        self.read = []
        self.took_s = 0.0

    async def scan(self, table, start, stop, feed, **more):
        name = next((name for name in NAMES if start == metadata_key(name)), None)
        if table is Table.PAYLOAD and name is not None:
            await trio.sleep(self.took_s)
        if table is Table.MESSAGE and name is not None:
            if name in self.away:
                raise StoreError("no answer in 30 s")
            self.read.append(name)
        await super().scan(table, start, stop, feed, **more)


@pytest.fixture
def writes_at_once(monkeypatch):
    """Write files without a thread: the jumping clock would skip the thread's work as if all tasks were idle."""

    async def run_sync(function, *args, **_):
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


async def regions():
    """A store in which each of ``NAMES`` has one message."""
    store = Regions()
    for name in NAMES:
        await damage(store, name, whole=True)
    return store


async def damage(store, name, *, whole=False):
    """Make the topic's message unparsable, or with ``whole`` valid."""
    row = plain_head(1) + b"m" if whole else b"\xff?"
    metadata = put_one(Table.METADATA, metadata_key(name), Metadata(1, TopicProperties(), 1, 1).encode())
    message = Put(Table.MESSAGE, generation_prefix(name, 1), [pack_position(FIRST_MS, 0)], [row])
    await store.write([metadata, message], claim=await store.claim(name))


def weekly(store, file=None):
    """A scrub with the event loop's clock."""
    directory = SimpleNamespace(environment=SimpleNamespace(ownership=Alone()))
    clock = SimpleNamespace(now_ms=lambda: int(trio.current_time() * 1000))
    return Scrub(store, directory, clock, WEEK_S, 1 << 40, file)


async def run_for(scrub, seconds):
    """Run like a daemon that is killed after this time."""
    with trio.move_on_after(seconds):
        await scrub.run()


def found_in(scrub):
    return [each.name for each in scrub.report.findings]


async def test_a_topic_that_the_store_cannot_read_hides_no_other_and_the_round_is_incomplete(autojump_clock, caplog):
    store = await regions()
    store.away.add(NAMES[3])
    scrub = weekly(store)
    assert not await scrub.round()
    assert store.read == [name for name in NAMES if name != NAMES[3]]
    shown = scrub.report.shown()
    assert (shown["state"], shown["lastCompleteMs"], shown["findings"]) == ("stopped", None, [])
    assert shown["unread"] == [{"namespace": "ns", "topic": "t3", "why": "no answer in 30 s"}]
    (said,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert (said.topics, said.first) == (1, "ns:t3")


async def test_unread_topics_are_retried_alone_every_hour_until_the_round_is_complete(autojump_clock):
    store = await regions()
    store.away.add(NAMES[3])
    scrub = weekly(store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scrub.run)
        await trio.sleep(10.5 * 3600)
        assert (scrub.report.last_complete_ms, len(store.read)) == (None, len(NAMES) - 1)
        store.away.clear()
        await trio.sleep(3600)
        assert scrub.report.last_complete_ms == pytest.approx(11 * 3_600_000)
        assert scrub.report.unread == {}
        assert sorted(store.read) == NAMES
        nursery.cancel_scope.cancel()


async def test_a_topic_that_can_never_be_read_does_not_delay_the_weekly_read_of_the_others(autojump_clock):
    store = await regions()
    store.away.add(NAMES[3])
    scrub = weekly(store)
    await run_for(scrub, 4 * WEEK_S)
    assert scrub.report.last_complete_ms is None
    assert {store.read.count(name) for name in NAMES if name != NAMES[3]} == {4}


async def test_an_unread_topic_that_was_deleted_does_not_keep_a_round_incomplete(autojump_clock):
    store = await regions()
    store.away.add(NAMES[3])
    scrub = weekly(store)
    assert not await scrub.round()
    await store.write([Delete(Table.METADATA, [metadata_key(NAMES[3])])], claim=await store.claim(NAMES[3]))
    assert await scrub.round(go_on=True)
    assert store.read == [name for name in NAMES if name != NAMES[3]]


async def test_findings_of_a_topic_that_cannot_be_read_now_stay_in_the_report(autojump_clock):
    store = await regions()
    await damage(store, NAMES[3])
    scrub = weekly(store)
    assert await scrub.round()
    store.away.add(NAMES[3])
    await damage(store, NAMES[5])
    assert not await scrub.round()
    assert found_in(scrub) == [NAMES[5], NAMES[3]]
    store.away.clear()
    await damage(store, NAMES[3], whole=True)
    assert await scrub.round(go_on=True)
    assert found_in(scrub) == [NAMES[5]]


async def test_a_daemon_that_restarts_more_often_than_a_round_lasts_still_reads_every_topic(
    autojump_clock, writes_at_once, tmp_path
):
    store, kept = await regions(), tmp_path / "scrub.json"
    store.took_s = 3600.0
    await damage(store, NAMES[1])
    await damage(store, NAMES[8])
    store.away.add(NAMES[4])
    for _ in range(6):
        await run_for(weekly(store, kept), 3.5 * 3600)  # the first hour is reserved for the start
    again = weekly(store, kept)
    assert again.report.last_complete_ms is None
    assert set(again.report.unread) == {NAMES[4]}
    assert sorted(found_in(again)) == [NAMES[1], NAMES[8]]
    assert sorted(set(store.read)) == [name for name in NAMES if name != NAMES[4]]
    store.away.clear()
    await run_for(again, 3 * 3600)
    assert again.report.last_complete_ms is not None
    assert sorted(found_in(again)) == [NAMES[1], NAMES[8]]


async def test_findings_in_the_part_of_a_topic_read_before_a_restart_are_reported_once(
    autojump_clock, writes_at_once, tmp_path, monkeypatch
):
    store, kept = await regions(), tmp_path / "scrub.json"
    await damage(store, NAMES[5])
    first = weekly(store, kept)
    read = first._range

    async def killed_in_its_payloads(table, start, stop, name):
        if (table, name) == (Table.PAYLOAD, NAMES[5]):
            await first._keep()
            raise KeyboardInterrupt
        await read(table, start, stop, name)

    monkeypatch.setattr(first, "_range", killed_in_its_payloads)
    with pytest.raises(KeyboardInterrupt):
        await first.round()
    again = weekly(store, kept)
    assert found_in(again) == [NAMES[5]]
    assert await again.round(go_on=True)
    assert found_in(again) == [NAMES[5]]
    assert store.read == [*NAMES[:6], *NAMES[5:]]


async def test_a_requested_round_begins_with_the_first_topic(autojump_clock, writes_at_once, tmp_path):
    store, kept = await regions(), tmp_path / "scrub.json"
    store.took_s = 3600.0
    await run_for(weekly(store, kept), 3.5 * 3600)
    assert store.read == NAMES[:3]
    again = weekly(store, kept)
    again.start_now()
    await run_for(again, 11 * 3600)
    assert store.read == [*NAMES[:3], *NAMES]
    assert again.report.last_complete_ms is not None


class Partly(Regions):
    """Withholds some topics' payloads, but not their messages."""

    def __init__(self):
        super().__init__()
        self.payloads_away = set()

    async def scan(self, table, start, stop, feed, **more):
        if table is Table.PAYLOAD and any(start == metadata_key(name) for name in self.payloads_away):
            raise StoreError("no answer in 30 s")
        await super().scan(table, start, stop, feed, **more)


async def test_a_place_found_at_every_try_is_reported_once(autojump_clock, writes_at_once, tmp_path):
    store = Partly()
    for name in NAMES:
        await damage(store, name, whole=True)
    await damage(store, NAMES[3])
    store.payloads_away.add(NAMES[3])
    scrub = weekly(store, tmp_path / "scrub.json")
    for number in range(5):
        assert not await scrub.round(go_on=number > 0)
        assert found_in(scrub) == [NAMES[3]]
    store.away.add(NAMES[3])
    assert not await scrub.round(go_on=True)
    assert found_in(scrub) == [NAMES[3]]
    assert found_in(weekly(store, tmp_path / "scrub.json")) == [NAMES[3]]


async def test_unreadable_rows_of_no_topic_do_not_delay_the_weekly_read_of_a_topic(autojump_clock, monkeypatch):
    store = await regions()
    scrub = weekly(store)
    topics, rows_of = scrub._topics, scrub._rows_of

    async def with_lost_names():
        names, _ = await topics()
        return names, [(b"zz", b"zzz")]

    async def not_among(start, stop, name):
        if name is None:
            raise StoreError("no answer in 30 s")
        await rows_of(start, stop, name)

    monkeypatch.setattr(scrub, "_topics", with_lost_names)
    monkeypatch.setattr(scrub, "_rows_of", not_among)
    await run_for(scrub, 4 * WEEK_S)
    assert scrub.report.last_complete_ms is None
    assert {store.read.count(name) for name in NAMES} == {4}


async def test_a_round_interrupted_long_ago_starts_over(autojump_clock, writes_at_once, tmp_path):
    store, kept = await regions(), tmp_path / "scrub.json"
    store.took_s = 3600.0
    await run_for(weekly(store, kept), 5.5 * 3600)
    before = len(store.read)
    await trio.sleep(50 * WEEK_S)
    await run_for(weekly(store, kept), 12 * 3600)
    assert sorted(store.read[before:]) == NAMES
