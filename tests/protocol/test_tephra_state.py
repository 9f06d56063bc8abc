"""Snapshots of a transaction manager: Tephra's bytes in all versions, hostile bytes, and bounds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tephra_thrift import i64
from transaction_snapshots import decode_snapshot

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.tephra.state import (
    Entry,
    EntryType,
    ManagerState,
    decode_visibility_state,
    encode_snapshot,
    first_short_in_progress,
    inactive_bound,
    prune_upper_bound,
    reader_of,
)
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, Transaction
from plainsong.protocol.transactions.view import Verdict, View

STATE = ManagerState(
    timestamp_ms=4000,
    read_pointer=999,
    last_write_pointer=1002,
    invalids=(5, 300),
    in_progress={
        1000: Entry(5000, 900, EntryType.LONG, (1002,)),
        1001: Entry(6000, 900),
        1002: Entry(5000, 900, EntryType.CHECKPOINT),
    },
    committing={1001: (b"ab",)},
    committed={1003: (b"k",)},
)
#: Written by the genuine Java classes.
WRITTEN = bytes.fromhex(
    "08c03ece0fd40f040ad8040006d00f904e880e0202d40f00d20fe05d880e0000d40f904e880e0400"
    "0002d20f02046162000002d60f02026b0000"
)
#: The offset at which the change sets start, with "committing".
CHANGE_SETS_AT = WRITTEN.index(bytes.fromhex("02d20f02046162"))

keys = st.lists(st.binary(max_size=10), max_size=4).map(tuple)
longs = st.lists(i64, max_size=5).map(tuple)
entries = st.builds(
    Entry, expiration_ms=i64, visibility_upper_bound=i64, type=st.sampled_from(EntryType), checkpoints=longs
)
states = st.builds(
    ManagerState,
    timestamp_ms=i64,
    read_pointer=i64,
    last_write_pointer=i64,
    invalids=longs,
    in_progress=st.dictionaries(i64, entries, max_size=5),
    committing=st.dictionaries(i64, keys, max_size=3),
    committed=st.dictionaries(i64, keys, max_size=3),
)


def test_a_snapshot_has_the_bytes_tephra_writes():
    assert encode_snapshot(STATE) == WRITTEN
    assert decode_snapshot(WRITTEN) == STATE


@given(states)
def test_a_snapshot_is_of_the_state_it_was_made_from(state):
    assert decode_snapshot(encode_snapshot(state)) == state


def test_visibility_is_read_without_the_change_sets():
    found = decode_visibility_state(WRITTEN[:CHANGE_SETS_AT] + b"\xff no change sets")
    assert (found.invalids, found.in_progress) == (STATE.invalids, STATE.in_progress)
    assert (found.committing, found.committed) == ({}, {})


@pytest.mark.parametrize("version", [b"\x04", b"\x06"])
def test_versions_two_and_three_have_types_and_no_checkpoints(version):
    data = version + bytes.fromhex("c03ece0fd40f 00 04 d00f904e880e02 d20fe05d880e00 00 00 00")
    found = decode_visibility_state(data)
    assert found.in_progress == {1000: Entry(5000, 900, EntryType.LONG), 1001: Entry(6000, 900)}


def test_version_one_marks_long_transactions_by_having_no_timeout():
    data = bytes.fromhex("02c03ece0fd40f 00 04 d00f01880e d20fe05d880e 00 00 00")
    found = decode_visibility_state(data)
    assert found.in_progress == {1000: Entry(-1, 900, EntryType.LONG), 1001: Entry(6000, 900)}


def test_lists_may_be_split_into_several_blocks():
    assert decode_visibility_state(bytes.fromhex("08000000 020a 02d804 00 00")).invalids == (5, 300)


@given(states)
@settings(max_examples=20)
def test_every_truncated_snapshot_is_refused(state):
    data = encode_snapshot(replace(state, committing={}, committed={}))[: -len(b"\0\0")]
    for size in range(len(data)):
        with pytest.raises(MalformedTransaction):
            decode_visibility_state(data[:size])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("00", "version is 0"),
        ("0a" + "00" * 9, "version is 5"),
        ("01" + "00" * 9, "version is -1"),
        ("08000000 01", "list of -1 items"),
        ("08000000 feffffff0f", "items with 0 bytes left"),
        ("08000000 ffffffffffffffffffff7f", "longer than ten bytes"),
        ("08000000 00 02 02020206", "type 3"),
    ],
)
def test_an_invalid_snapshot_is_refused_with_a_reason(data, says):
    with pytest.raises(MalformedTransaction, match=says):
        decode_visibility_state(bytes.fromhex(data))


@given(st.binary(max_size=100))
def test_noise_is_a_snapshot_or_refused_and_nothing_else(noise):
    for data in (noise, b"\x08" + noise):
        try:
            decode_visibility_state(data)
        except MalformedTransaction as error:
            assert error.hint


def test_a_reader_of_a_state_sees_what_was_committed_then():
    reader = reader_of(STATE)
    assert (reader.invalids, reader.in_progress) == ((5, 300), (1000, 1001, 1002))
    assert reader.first_short_in_progress == 1001
    view = View.of(reader)
    verdicts = {pointer: view.verdict(pointer) for pointer in (5, 299, 999, 1000, 1002, 1003)}
    assert verdicts == {
        5: Verdict.SKIP,
        299: Verdict.DELIVER,
        999: Verdict.DELIVER,
        1000: Verdict.HOLD,
        1002: Verdict.HOLD,
        1003: Verdict.HOLD,
    }


@pytest.mark.parametrize(
    ("invalids", "in_progress", "bound"),
    [((), (), 99), ((5, 300), (), 300), ((5, 300), (200,), 199), ((), (200,), 199), ((5,), (200,), 5)],
)
def test_the_invalid_list_may_be_pruned_up_to_the_last_invalid_before_anything_in_progress(
    invalids, in_progress, bound
):
    assert prune_upper_bound(Transaction(100, 400, 400, invalids, in_progress)) == bound


def test_a_checkpoint_of_a_long_transaction_counts_as_short():
    assert first_short_in_progress({7: EntryType.LONG, 9: EntryType.CHECKPOINT, 11: EntryType.SHORT}) == 9
    assert first_short_in_progress({7: EntryType.LONG}) == NO_TRANSACTION


def test_a_pointer_is_inactive_when_it_is_older_than_a_lifetime():
    assert inactive_bound(100_000, 90_000) == 10_000 * 1_000_000 - 1
