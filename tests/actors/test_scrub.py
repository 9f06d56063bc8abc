"""The scrub on a real LevelDB: what is damaged on the disk is found, with its place, and nothing else is."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import trio
from actors_in_process import SetClock

from actors.ownership import Alone
from actors.scrub import Scrub
from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.rows import plain_head
from storage.base import StoreError
from storage.faulty import FaultyStore
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from tests.storage import far_store

SMALL = LevelDBOptions(write_buffer_bytes=1 << 16, block_cache_bytes=0)
#: So few tables that LevelDB merges none of them, which would leave replaced ones in the folder.
TWO_TABLES = LevelDBOptions(write_buffer_bytes=1 << 19, block_cache_bytes=0)
ORDERS, BILLS = TopicName("shop", "orders"), TopicName("shop", "bills")
ROWS = 2_000
FIRST_MS = 1_700_000_000_000


async def fill(store):
    """Messages whose payloads do not compress, so that each block of a table has a few."""
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
    """The tables of a filled store that has two."""
    async with await LevelDBStore.open(directory, TWO_TABLES) as store:
        await fill(store)
    async with await LevelDBStore.open(directory, TWO_TABLES):
        pass  # what was in the log is in a table now
    tables = sorted(directory.glob("volumes/*/*.ldb"))
    assert len(tables) == 2
    return tables


@pytest.mark.parametrize("which", [0, -1])
async def test_a_flipped_bit_on_the_disk_is_found_with_its_topic_ids_and_file_and_the_rest_is_read(tmp_path, which):
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
        # Nothing was moved: the next round says the same.
        before = scrub.report.shown()["findings"]
        await scrub.round()
        assert scrub.report.shown()["findings"] == before


@pytest.mark.parametrize("which", [0, -1])
async def test_a_table_file_that_is_missing_is_a_finding_and_the_round_goes_on_to_its_end(tmp_path, which):
    table = (await two_tables(tmp_path / "data"))[which]
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        aside = table.rename(tmp_path / table.name)
        scrub = scrub_of(store)
        await scrub.round()
        assert scrub.report.last_complete_ms is not None
        findings = [each.shown() for each in scrub.report.findings]
        assert {each["topic"] for each in findings} == {"orders", "bills"}
        # LevelDB names the file; where others are whose rows cannot be told apart, the folder is named.
        assert all(table.name in each["why"] for each in findings)
        assert {each["file"] for each in findings} == {str(table.parent.relative_to(tmp_path / "data"))}
        # Put back, its rows are there again.
        aside.rename(table)
        await scrub.round()
        assert scrub.report.findings == []
        assert scrub.report.rows == 2 * ROWS + 2


async def test_rows_that_do_not_parse_are_one_finding_where_they_are_neighbours(tmp_path):
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


async def test_a_round_that_is_asked_for_begins_at_once_and_one_at_a_time(tmp_path, nursery):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        await fill(store)
        scrub = scrub_of(store)
        assert scrub.start_now()
        scrub.report.state = "running"
        assert not scrub.start_now()


async def test_the_last_report_is_there_after_a_restart(tmp_path):
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


async def test_what_a_round_has_found_outlives_it_and_what_the_round_before_found_stays_until_it_is_read_again(
    tmp_path, monkeypatch
):
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


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"findings": [{}]}', b'{"findings": 5}', b"\xff\xfe"])
async def test_a_report_that_cannot_be_read_is_none(tmp_path, content):
    kept = tmp_path / "scrub.json"
    kept.write_bytes(content)
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        assert scrub_of(store, kept).report.last_complete_ms is None


async def test_a_report_that_cannot_be_written_stops_no_round(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        scrub = scrub_of(store, tmp_path / "none" / "scrub.json")
        await scrub.round()
        assert scrub.report.last_complete_ms is not None


async def test_a_store_that_is_away_has_no_damage(tmp_path):
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


async def test_a_damaged_block_of_topics_is_a_finding_and_the_messages_of_its_topics_and_of_all_others_are_read(
    tmp_path,
):
    names = [TopicName("shop", f"topic-{number:04d}") for number in range(500)]
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES) as store:
        metadata, key = Metadata(1, TopicProperties(), 1, 1).encode(), [pack_position(FIRST_MS, 0)]
        topics = [put_one(Table.METADATA, metadata_key(name), metadata) for name in names]
        damaged = [Put(Table.MESSAGE, generation_prefix(name, 1), key, [b"\xff?"]) for name in names]
        await store.write([*topics, *damaged], claim=await store.claim(names[0]))
    async with await LevelDBStore.open(tmp_path / "data", TWO_TABLES):
        pass  # what was in the log is in a table now
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
    # The row of each topic that does not parse was found once, also where the topic's name could not be read.
    assert sorted(each["topic"] for each in findings if each["table"] == "message") == [each.topic for each in names]
    assert scrub.report.last_complete_ms is not None


async def test_a_round_over_a_store_that_is_far_takes_no_more_than_twice_its_answers(autojump_clock):
    store = far_store.FarStore()
    await far_store.fill(store, 50)
    scrub, begun_s = scrub_of(store), trio.current_time()
    await scrub.round()
    assert scrub.report.rows == 100
    assert trio.current_time() - begun_s < 2 * store.waited_s
