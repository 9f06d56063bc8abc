"""Explaining a stopped store: rows are decoded and counted by topic and generation, unparseable ones included."""

from __future__ import annotations

import json

import pytest
from disks import snapshot
from hypothesis import given
from hypothesis import strategies as st
from rows_of_all_kinds import (
    GONE,
    INVALID,
    NOW_MS,
    ORDERS,
    make_store,
    rows_about_producers,
    rows_about_staging,
    rows_of_all_kinds,
    rows_that_do_not_parse,
)

from broker.command.store import summary_json, summary_text
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import pack_position
from storage.inspect.describe import DescribedRow, describe
from storage.inspect.explain import MAX_EXAMPLES, RowFilter, explain, walk
from storage.inspect.readonly import open_stopped
from storage.leveldb import LevelDBStore


def described(operations) -> list[DescribedRow]:
    return [describe(op.table, op.prefix + op.suffixes[0], op.values[0]) for op in operations]


def test_every_row_of_the_daemon_is_decoded():
    rows = described(rows_of_all_kinds())
    assert [row.problem for row in rows] == [""] * len(rows)
    messages = ["message"] * 5 + ["reference", "message", "message", "payload"]
    service = ["transactions", "last-pass", "authority", "change-set", *["transaction"] * 3]
    assert [row.kind for row in rows] == ["metadata"] * 2 + ["high-water", "reader", *messages, "pointer", *service]
    for row in rows:
        json.dumps(row.shown())


def test_a_row_that_does_not_parse_says_why_and_shows_its_bytes():
    for row in described(rows_that_do_not_parse()):
        assert row.kind == "unparseable"
        assert row.shown()["problem"]
        assert bytes.fromhex(row.shown()["value"]) == row.value
        assert bytes.fromhex(row.shown()["key"]) == row.key


@given(st.sampled_from(list(Table)), st.binary(max_size=60), st.binary(max_size=60))
def test_describing_a_row_of_arbitrary_bytes_never_fails(table, key, value):
    json.dumps(describe(table, key, value).shown())


@given(st.sampled_from(rows_of_all_kinds() + rows_about_producers() + rows_about_staging()), st.data())
def test_describing_a_row_with_a_changed_byte_never_fails(operation, data):
    key, value = bytearray(operation.prefix + operation.suffixes[0]), bytearray(operation.values[0])
    for garbled in (key, value):
        at = data.draw(st.integers(0, len(garbled) - 1))
        garbled[at] = data.draw(st.integers(0, 255))
        json.dumps(describe(operation.table, bytes(key), bytes(value)).shown())


async def test_a_summary_counts_by_topic_and_generation_and_what_would_be_cleaned(tmp_path):
    with open_stopped(await make_store(tmp_path / "data")) as (database, _):
        summary = explain(database, now_ms=NOW_MS)
    assert summary.whole
    assert set(summary.topics) == {ORDERS, GONE}
    orders = summary.topics[ORDERS]
    assert {number: rows.messages for number, rows in orders.generations.items()} == {1: 1, 2: 7}
    second = orders.generations[2]
    assert (second.payload_rows, second.readers, second.references, second.expired) == (1, 1, 1, 2)
    assert (second.rolled_back, second.invalid, second.stored) == (2, 1, 3)
    assert (second.pointers, second.oldest_pointer) == (1, INVALID)
    assert (second.first_ms, second.last_ms) == (NOW_MS - 3_600_001, NOW_MS)
    assert orders.cleaned(1) == 1
    assert orders.cleaned(2) == 2
    assert summary.topics[GONE].cleaned(1) == 1
    assert [summary.tables[table].rows for table in Table] == [12, 8, 1]
    pruning = summary.pruning
    assert (pruning.authority, pruning.transactions) == ("embedded", 1)
    assert pruning.invalid == {INVALID, INVALID + 3}
    assert (pruning.safe_bound, pruning.last_pass_ms) == (INVALID - 7, NOW_MS - 5)


def test_rows_about_transactions_are_described_in_words():
    said = {row.kind: row.shown() for row in described(rows_of_all_kinds())}
    pointer = said["pointer"]
    assert (pointer["write_pointer"], pointer["rolled_back"], pointer["messages"]) == (INVALID, False, 1)
    assert pointer["segments"] == {"part 1": {"index": 0, "messages": 3, "bytes": 30}}
    assert pointer["runs"] == [{"first": pointer["runs"][0]["last"], "last": pointer["runs"][0]["last"], "before": 5}]
    reference = said["reference"]
    assert (reference["write_pointer"], reference["rolled_back"], reference["messages"]) == (77, True, 2)
    assert (reference["first_payload"], reference["segments"]) == ("00" * 10, [4])
    assert (said["payload"]["write_pointer"], said["payload"]["segment"], said["payload"]["ttl_s"]) == (77, 4, 9)
    assert (said["transactions"]["last_pointer"], said["transactions"]["read_pointer"]) == (INVALID + 9, INVALID)
    assert said["transactions"]["reserved_up_to"] == INVALID + 12
    assert (said["transaction"]["state"], said["transaction"]["client"]) == ("committed", "ana")
    assert (said["change-set"]["commit_pointer"], said["change-set"]["changes"]) == (9, 1)
    assert said["last-pass"]["safe_bound"] == INVALID - 7
    assert said["authority"]["service"] == "embedded"


def test_rows_about_producers_are_described_in_words():
    first, second, reference, payload, producer, producers, namespace, pointer = (
        row.shown() for row in described(rows_about_producers())
    )
    assert (first["kind"], first["producer"], first["epoch"], first["batch_messages"]) == ("message", "p", 3, 2)
    assert (first["first_producer_id"], first["last_producer_id"], first["first_producer_ids"]) == (5, 9, [5, 9])
    assert (second["index_in_request"], second["attributes"]) == (1, {"routingKey": "k"})
    assert (reference["kind"], reference["message_bytes"], reference["producer"]) == ("reference", 12, "p")
    assert "batch_messages" not in reference
    assert (payload["segment"], payload["attributes"]) == (4, {"traceparent": "t"})
    assert (producer["kind"], producer["producer"], producer["last_producer_id"]) == ("producer", "p", 9)
    assert [each.get("write_pointer") for each in producer["last_requests"]] == [None, 77]
    assert (producer["active_ms"], producer["remembered_for_ms"]) == (NOW_MS, 60_000)
    assert (producers["kind"], producers["remembered"], producers["highest_epoch"]) == ("producers", True, 3)
    assert producers["since"] == producers["forgotten_up_to"] == first["id"][:20]
    assert namespace["kind"] == "namespace"
    assert (namespace["namespace"], namespace["deduplication"], namespace["times_switched_off"]) == (
        "shop",
        "enabled",
        1,
    )
    assert pointer["stored_by"] == [{"producer": "p", "segment": "part 1", "epoch": 3, "last_producer_id": 7}]


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        (RowFilter(), {"producer", "producers", "namespace"}),
        (RowFilter(namespace="shop"), {"producer", "producers", "namespace"}),
        (RowFilter(namespace="other"), set()),
        (RowFilter(topic="orders", generation=2), {"producer", "producers"}),
        (RowFilter(generation=0), set()),
    ],
)
def test_a_filter_selects_producers_by_topic_and_namespace_properties_by_namespace(choice, kinds):
    rows = [row for row in described(rows_about_producers()) if row.table is Table.METADATA and row.kind != "pointer"]
    assert {row.kind for row in rows if choice.takes(row)} == kinds


async def test_unparseable_rows_are_counted_by_table_and_change_nothing(tmp_path):
    directory = await make_store(tmp_path / "data", damaged=True)
    before = snapshot(directory)
    with open_stopped(directory) as (database, _):
        summary = explain(database, now_ms=NOW_MS)
    assert not summary.whole
    assert [summary.tables[table].unparseable for table in Table] == [6, 4, 2]
    assert all(len(counted.examples) <= MAX_EXAMPLES for counted in summary.tables.values())
    assert snapshot(directory) == before


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        (RowFilter(), 8),
        (RowFilter(namespace="shop"), 8),
        (RowFilter(namespace="other"), 0),
        (RowFilter(topic="gone"), 1),
        (RowFilter(topic="orders", generation=2), 6),
        (RowFilter(generation=1), 2),
        (RowFilter(first=pack_position(NOW_MS, 0)), 4),
        (RowFilter(first=pack_position(NOW_MS, 0), stop=pack_position(NOW_MS, 1)), 2),
        (RowFilter(stop=pack_position(NOW_MS - 3_600_000, 0)), 1),
    ],
)
async def test_rows_are_chosen_by_name_generation_and_position(tmp_path, choice, count):
    rows = []
    with open_stopped(await make_store(tmp_path / "data")) as (database, _):
        assert walk(database, Table.MESSAGE, lambda row: rows.append(row) or True) == ""
    assert sum(map(choice.takes, rows)) == count


@pytest.mark.parametrize(
    ("choice", "count"), [(RowFilter(), 12), (RowFilter(topic="orders"), 4), (RowFilter(generation=2), 4)]
)
async def test_rows_of_the_transaction_service_belong_to_no_topic(tmp_path, choice, count):
    rows = []
    with open_stopped(await make_store(tmp_path / "data")) as (database, _):
        assert walk(database, Table.METADATA, lambda row: rows.append(row) or True) == ""
    assert sum(map(choice.takes, rows)) == count


def test_staged_and_published_batches_are_described_in_words():
    staged, kept, reference, winner = described(rows_about_staging())
    assert (staged.kind, kept.kind, reference.kind, winner.kind) == ("staged", "payload", "reference", "payload")
    said = staged.shown()
    assert (said["producer"], said["stored"], said["stored_bytes"]) == ("p", 2, 11)
    assert said["segments"] == {"a": {"index": 0, "messages": 2, "bytes": 11}}
    assert said["staged_pointer"] == kept.shown()["staged_pointer"] < 0
    said = reference.shown()
    assert (said["messages"], said["segments"], said["producer"], said["first_producer_id"]) == (2, [0], "p", 11)
    assert said["staged_pointer"] == winner.shown()["staged_pointer"] < 0
    for row in (staged, kept, reference, winner):
        assert "write_pointer" not in row.shown()


async def test_a_summary_counts_staged_messages_separately_from_transactions(tmp_path):
    directory = await make_store(tmp_path / "data")
    async with await LevelDBStore.open(directory) as store:
        await store.write(rows_about_staging(), claim=await store.claim(ORDERS))
    with open_stopped(directory) as (database, _):
        summary = explain(database, now_ms=NOW_MS)
    second = summary.topics[ORDERS].generations[2]
    assert (second.staged, second.stored, second.pointers, second.oldest_pointer) == (2, 3, 1, INVALID)
    assert (second.messages, second.references) == (9, 2)
    assert summary_json(summary)["topics"][1]["generations"][1]["staged_unpublished"] == 2
    assert "2 staged and not published" in summary_text(summary)
