"""A transaction's bytes are the same as Tephra's; invalid bytes are refused cleanly."""

import re
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tephra_thrift import TTransaction, read_struct, struct_bytes, struct_of, transactions

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, Transaction, TransactionType, VisibilityLevel

#: Written by the genuine Java classes.
VECTORS = {
    "worked example": (
        Transaction(
            read_pointer=1480000000000000000,
            transaction_id=1480000001000000000,
            write_pointer=1480000001000000000,
            invalids=(1479999990000000000,),
            in_progress=(1480000000500000000,),
            first_short_in_progress=1480000000500000000,
        ),
        "0a0001148a0428d72eca000a0002148a04289b9400000f00030a00000001148a042647881c000f00040a00000001148a0428b96165000a"
        "0005148a0428b9616500080006000000010a0007148a0428d72eca000f00080a000000000800090000000100",
    ),
    "checkpoints": (
        Transaction(
            read_pointer=100,
            transaction_id=200,
            write_pointer=250,
            invalids=(90, 110, 190),
            in_progress=(95, 120, 150),
            first_short_in_progress=95,
            type=TransactionType.LONG,
            checkpoint_write_pointers=(220, 250),
            visibility_level=VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT,
        ),
        "0a000100000000000000c80a000200000000000000640f00030a00000003000000000000005a000000000000006e00000000000000be0f"
        "00040a00000003000000000000005f000000000000007800000000000000960a0005000000000000005f080006000000020a0007000000"
        "00000000fa0f00080a0000000200000000000000dc00000000000000fa0800090000000200",
    ),
    "all visible, latest": (
        Transaction(NO_TRANSACTION, NO_TRANSACTION, NO_TRANSACTION),
        "0a00017fffffffffffffff0a00027fffffffffffffff0f00030a000000000f00040a000000000a00057fffffffffffffff080006000000"
        "010a00077fffffffffffffff0f00080a000000000800090000000100",
    ),
    "nothing excluded": (
        Transaction(100, 200, 200),
        "0a000100000000000000c80a000200000000000000640f00030a000000000f00040a000000000a00057fffffffffffffff080006000000"
        "010a000700000000000000c80f00080a000000000800090000000100",
    ),
}
BOTH_IDS = bytes.fromhex("0a000100000000000000c80a00020000000000000064")


@pytest.mark.parametrize("name", VECTORS)
def test_a_transaction_has_the_bytes_tephra_writes(name):
    transaction, written = VECTORS[name]
    assert encode_transaction(transaction).hex() == written
    assert decode_transaction(bytes.fromhex(written)) == transaction


def test_the_documented_transaction_is_the_one_described():
    page = Path(__file__).parents[2].joinpath("docs/format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```hex transaction\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = bytes.fromhex("".join(line[7:45] for line in block.splitlines()))
    described = Transaction(100, 200, 200, in_progress=(95,), first_short_in_progress=95)
    assert shown == encode_transaction(described)
    assert decode_transaction(shown) == described


@given(transactions)
def test_bytes_equal_those_of_a_thrift_library(transaction):
    data = encode_transaction(transaction)
    assert data == struct_bytes(struct_of(transaction))
    lists = (transaction.invalids, transaction.in_progress, transaction.checkpoint_write_pointers)
    assert len(data) == 83 + 8 * sum(map(len, lists))
    assert decode_transaction(data) == transaction
    assert read_struct(TTransaction(), data) == struct_of(transaction)


def test_absent_fields_count_as_tephra_counts_them():
    assert decode_transaction(BOTH_IDS + b"\0") == Transaction(
        read_pointer=100,
        transaction_id=200,
        write_pointer=200,  # Tephra writes 0 here: before checkpoints there was only the id
        first_short_in_progress=0,
        type=TransactionType.LONG,
    )


@pytest.mark.parametrize(
    ("data", "lacks"),
    [(b"\0", "no id"), (BOTH_IDS[:11] + b"\0", "no read pointer"), (BOTH_IDS[11:] + b"\0", "no id")],
)
def test_bytes_without_id_or_read_pointer_are_not_a_transaction(data, lacks):
    with pytest.raises(MalformedTransaction, match=lacks):
        decode_transaction(data)


@pytest.mark.parametrize("value", [0, 3, -1, 2**31 - 1])
def test_an_unknown_type_is_long_and_an_unknown_visibility_is_snapshot(value):
    data = BOTH_IDS + struct.pack(">BhiBhiB", 8, 6, value, 8, 9, value + 1 if value == 3 else value, 0)
    found = decode_transaction(data)
    assert found.type is TransactionType.LONG
    assert found.visibility_level is VisibilityLevel.SNAPSHOT


values = st.recursive(
    st.sampled_from(
        [
            (2, b"\1"),
            (3, b"\x80"),
            (4, bytes(8)),
            (6, b"\0\7"),
            (8, b"\0\0\0\7"),
            (10, b"\xff" * 8),
            (11, struct.pack(">i", 3) + b"abc"),
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([14, 15]), inner, st.integers(0, 3)).map(
            lambda it: (it[0], struct.pack(">Bi", it[1][0], it[2]) + it[1][1] * it[2])
        ),
        st.tuples(inner, inner, st.integers(0, 3)).map(
            lambda it: (13, struct.pack(">BBi", it[0][0], it[1][0], it[2]) + (it[0][1] + it[1][1]) * it[2])
        ),
        st.lists(inner, max_size=3).map(
            lambda its: (12, b"".join(struct.pack(">Bh", kind, 1) + data for kind, data in its) + b"\0")
        ),
    ),
    max_leaves=8,
)


@given(transactions, values, st.sampled_from([0, -1, 10, 99, 32767]))
def test_unknown_fields_are_skipped_whatever_they_hold(transaction, value, field):
    data = struct.pack(">Bh", value[0], field) + value[1] + encode_transaction(transaction)
    assert decode_transaction(data) == transaction


@given(transactions, values, st.sampled_from(range(1, 10)))
def test_known_fields_of_another_type_are_skipped(transaction, value, field):
    right = {1: 10, 2: 10, 3: 15, 4: 15, 5: 10, 6: 8, 7: 10, 8: 15, 9: 8}
    if value[0] != right[field]:
        data = struct.pack(">Bh", value[0], field) + value[1] + encode_transaction(transaction)
        assert decode_transaction(data) == transaction


@given(transactions, st.binary(max_size=40))
def test_bytes_after_a_transaction_are_ignored(transaction, rest):
    assert decode_transaction(encode_transaction(transaction) + rest) == transaction


@given(transactions)
@settings(max_examples=20)
def test_every_truncated_transaction_is_refused(transaction):
    data = encode_transaction(transaction)
    for size in range(len(data)):
        with pytest.raises(MalformedTransaction):
            decode_transaction(data[:size])


def test_unsorted_lists_are_returned_sorted():
    data = encode_transaction(Transaction(9, 10, 10, invalids=(7, 3, 5), in_progress=(8, 2), first_short_in_progress=2))
    found = decode_transaction(data)
    assert (found.invalids, found.in_progress) == ((3, 5, 7), (2, 8))


@pytest.mark.parametrize("count", [-1, -(2**31), 2**31 - 1, 3])
@pytest.mark.parametrize("kind", [3, 8, 10, 11, 12, 13, 15, 1])
def test_counts_that_are_negative_or_larger_than_the_bytes_are_refused(count, kind):
    for field in (3, 77):
        with pytest.raises(MalformedTransaction):
            decode_transaction(BOTH_IDS + struct.pack(">BhBi", 15, field, kind, count) + b"\0")


def test_deep_nesting_is_refused():
    with pytest.raises(MalformedTransaction, match="deep"):
        decode_transaction(BOTH_IDS + struct.pack(">Bh", 12, 50) * 5000 + bytes(5000) + b"\0")
    with pytest.raises(MalformedTransaction, match="deep"):
        decode_transaction(BOTH_IDS + struct.pack(">Bh", 15, 50) + struct.pack(">Bi", 15, 1) * 5000 + b"\0")


@pytest.mark.parametrize("items", [struct.pack(">BhBi", 15, 50, 12, 10**6), struct.pack(">Bhq", 10, 1, 5) * 10**5])
def test_megabytes_of_values_are_refused_at_once(items):
    before = time.thread_time()
    with pytest.raises(MalformedTransaction, match="more values"):
        decode_transaction(BOTH_IDS + items + bytes(10**6))
    assert time.thread_time() - before < 0.2


def test_a_list_of_other_items_in_a_known_field_is_refused():
    with pytest.raises(MalformedTransaction, match="64 bits"):
        decode_transaction(BOTH_IDS + struct.pack(">BhBiiB", 15, 3, 8, 1, 5, 0))
    assert decode_transaction(BOTH_IDS + struct.pack(">BhBiB", 15, 3, 0, 0, 0)).invalids == ()


@given(st.binary(max_size=200))
def test_noise_is_decoded_or_refused_and_nothing_else(noise):
    for data in (noise, BOTH_IDS + noise):
        try:
            decode_transaction(data)
        except MalformedTransaction as error:
            assert error.hint


@given(transactions, st.data())
def test_a_changed_byte_is_decoded_or_refused_and_nothing_else(transaction, data):
    written = bytearray(encode_transaction(transaction))
    for _ in range(data.draw(st.integers(1, 3))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_transaction(bytes(written))
    except MalformedTransaction as error:
        assert error.hint


def test_ten_thousand_pointers_are_decoded_quickly():
    transaction = Transaction(10**18, 10**18 + 1, 10**18 + 1, invalids=tuple(range(10_000)))
    before = time.thread_time()
    for _ in range(10):
        assert decode_transaction(encode_transaction(transaction)).invalids == transaction.invalids
    assert time.thread_time() - before < 0.5  # it takes about 5 ms; item by item it would take ten times that
