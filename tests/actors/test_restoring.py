"""Restoring to a time when consecutive milliseconds were full: no request is cut in two."""

from __future__ import annotations

import pytest

from actors.restoring import RestoredStore, RestoreRequest, given_ms
from broker.command import backup as command
from plainsong.cli.command import CommandFailed
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, metadata_key, stop_after, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.rows import plain_head
from plainsong.protocol.topic.producer_state import DeduplicationRecord
from plainsong.protocol.transactions.ledger import ManagerNow, TransactionSettings
from plainsong.protocol.transactions.ledger_rows import HEAD, SERVICE_RANGE, TRANSACTION, Head, Record, service_key
from plainsong.protocol.transactions.manager import LedgerLoader
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS, TransactionType
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder
from storage.backup.objects import encode_row, name_of

NAME = TopicName("shop", "orders")
PREFIX = generation_prefix(NAME, 1)
LAST = 65_535
#: The burst begins at the end of millisecond 11 and ends in millisecond 13.
POSITIONS = [(10, 0), (11, LAST - 1), (11, LAST), (12, 0), (12, LAST), (13, 0), (13, 1), (14, 0)]


def kept(folder, rows, table):
    data = b"".join(map(encode_row, rows))
    times = [int.from_bytes(key[-10:-2], "big") for key, _ in rows] if table == "messages" else [None]
    entry = {"sha256": name_of(data), "kept": folder.put(name_of(data), data), "table": table}
    return {**entry, "rows": len(rows), "bytes": len(data), "fromMs": times[0], "toMs": times[-1]}


@pytest.fixture
def folder(tmp_path):
    return BackupFolder.make(LocalFiles(tmp_path / "backups"))


@pytest.fixture
def manifest(folder):
    metadata = Metadata(1, TopicProperties(), 1, 1).encode()
    messages = [(PREFIX + pack_position(*each), plain_head(1) + b"m") for each in POSITIONS]
    objects = [kept(folder, [(metadata_key(NAME), metadata)], "metadata")]
    objects += [kept(folder, messages[:4], "messages"), kept(folder, messages[4:], "messages")]
    topic = {"namespace": "shop", "topic": "orders", "generation": 1, "objects": objects}
    fields = {"id": "20261122T055514Z-000000", "cutMs": 20, "exact": True, "service": [], "metadata": []}
    return {**fields, "topics": [topic]}


@pytest.mark.parametrize(("at_ms", "left"), [(9, 0), (10, 1), (11, 1), (12, 1), (13, 7), (14, 8), (99, 8)], ids=str)
async def test_consecutive_full_milliseconds_are_all_before_or_all_after_the_cut(folder, manifest, at_ms, left):
    store = await RestoredStore.open(folder, manifest, RestoreRequest(at_ms), 50)
    found = []
    await store.scan(Table.MESSAGE, PREFIX, stop_after(PREFIX), lambda rows: found.extend(rows) or True)
    assert [key[-10:] for key, _ in found] == [pack_position(*each) for each in POSITIONS[:left]]


async def test_a_restored_topic_continues_after_the_time_of_its_restore_and_fences_earlier_producers(folder, manifest):
    store = await RestoredStore.open(folder, manifest, RestoreRequest(), 50)
    start, stop = metadata_key(NAME), stop_after(metadata_key(NAME))
    rows = []
    for kind in (b"", b"\x00h", b"\x00e"):
        await store.scan(Table.METADATA, kind + start, kind + stop, lambda found: rows.extend(found) or True)
    assert len(rows) == 3
    mark = HighWater.decode(rows[1][1])
    assert (mark.time_ms, mark.last_ts_ms, mark.last_sequence_id) == (50, 50, LAST)
    assert DeduplicationRecord.decode(rows[2][1]).epochs == 1_000_000


async def test_pointers_that_tephras_clients_may_have_got_before_the_cut_are_invalid(folder, manifest):
    last = 19 * POINTERS_PER_MS
    begun = Record(last + 2, TransactionType.SHORT, "c", 19, 49, last, last)
    rows = [
        (service_key(HEAD), Head(last, last, last, tephra=3).encode()),
        (service_key(TRANSACTION, begun.transaction_id), begun.encode()),
    ]
    manifest["service"] = [kept(folder, rows, "metadata")]
    store = await RestoredStore.open(folder, manifest, RestoreRequest(), 50)
    loader = LedgerLoader()
    await store.scan(Table.METADATA, *SERVICE_RANGE, lambda found: loader.feed(found) or True)
    core = loader.core(TransactionSettings(), ManagerNow(50, 0.0), defers_begins=True)
    assert core.visible.invalids() == (last + 1, last + 2, last + 3)


def a_cut(cut_ms, **lines):
    """Make a manifest of topics with their last positions, in milliseconds; None for an empty topic."""
    topics = [
        {"namespace": "shop", "topic": name, "line": None if at is None else pack_position(at, 3).hex()}
        for name, at in lines.items()
    ]
    return {"cutMs": cut_ms, "topics": topics}


@pytest.mark.parametrize(
    ("cuts", "by_ms"),
    [
        ([a_cut(20, orders=18)], 48),  # ids may have advanced with the clock since
        ([a_cut(20, orders=500)], 530),  # ahead of the clock then, and possibly as far ahead now
        ([a_cut(20, orders=18), a_cut(30, orders=500)], 520),  # ahead only in the later backup
        ([a_cut(20, orders=18), a_cut(51, orders=500)], 48),  # a backup from the future is ignored
        ([a_cut(20, orders=None)], None),
        ([a_cut(20, bills=500)], None),
    ],
    ids=str,
)
def test_backups_bound_the_ids_that_may_have_been_issued_until_now(cuts, by_ms):
    assert given_ms(cuts, 50).get(NAME) == by_ms


async def test_a_topic_ahead_of_the_clock_continues_after_every_id_it_may_have_issued_since(folder, manifest):
    manifest["topics"][0]["line"] = pack_position(500, 0).hex()
    store = await RestoredStore.open(folder, manifest, RestoreRequest(), 50)
    rows = []
    key = system_key(b"h", NAME, 1)
    await store.scan(Table.METADATA, key, key + b"\x00", lambda found: rows.extend(found) or True)
    mark = HighWater.decode(rows[0][1])
    assert (mark.last_ts_ms, mark.last_sequence_id) == (530, LAST)


@pytest.mark.parametrize(
    ("behind_ms", "present_ms"), [(-5_000, 1_005_000), (0, 1_000_000), (1, 1_060_000), (60_000, 1_060_000)]
)
def test_a_slow_clock_is_corrected_within_its_tolerance_and_refused_beyond_it(
    folder, monkeypatch, behind_ms, present_ms
):
    fields = {"format": 1, "cutMs": 1_000_000, "topics": [], "service": [], "metadata": []}
    folder.put_manifest({**fields, "id": "20261122T055514Z-000001"})
    folder.put_manifest({**fields, "id": "20261122T055514Z-000002", "cutMs": 5})
    monkeypatch.setattr(command, "now_ms", lambda: 1_000_000 - behind_ms)
    assert command._present_ms(folder, None) == present_ms
    assert command._present_ms(folder, 2_000_000) == 2_000_000
    monkeypatch.setattr(command, "now_ms", lambda: 1_000_000 - 60_001)
    with pytest.raises(CommandFailed, match="000001"):
        command._present_ms(folder, None)
