"""Packs with one request's messages: their bytes, the requests that become packs, and changes inside packs."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import plyvel
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from plainsong.protocol.ids import NO_PAYLOAD_PART, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, PlainRows, encode_row, plain_head
from plainsong.protocol.topic.asks import Span
from storage.base import Blocks, chunks, chunks_of_runs, read_rows
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore, tidying
from storage.leveldb.engine import packs
from storage.leveldb.engine.packs import MARK, PACK_BYTES, Pack, packs_of, stored
from storage.leveldb.engine.plain_parts import PlainPart, PlainParts
from tests.storage.contract import LAST, everything
from tests.storage.fed_in_lists import extent_in_lists, page_in_lists
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import paused_until, settled

KEPT = Path(__file__).parents[1] / "kept" / "0.2.dev" / "data"
NAME = TopicName("ns", "topic")
PREFIX = generation_prefix(NAME, 1)
MESSAGE = Table.MESSAGE


@pytest.fixture(autouse=True)
def of_sixteen_rows(monkeypatch):
    """Make small packs, such as earlier versions wrote."""
    monkeypatch.setattr(packs, "MIN_ROWS", 16)


def request(first: int, values: list[bytes]) -> Put:
    """Return a request at positions from ``first`` on."""
    return Put(MESSAGE, PREFIX, [pack_position(1000, first + n) for n in range(len(values))], values)


def rows_of(put: Put) -> list[tuple[bytes, bytes]]:
    return [(put.prefix + suffix, value) for suffix, value in zip(put.suffixes, put.values, strict=True)]


def stored_rows(directory: Path, volume: str = "00000001") -> list[tuple[bytes, bytes]]:
    """Return LevelDB's message rows in a volume of a stopped store."""
    with plyvel.DB(str(directory / "volumes" / volume)) as database:
        return [(key[1:], value) for key, value in database if key[0] == MESSAGE]


# --- the bytes -------------------------------------------------------------------------------------


def test_a_pack_follows_the_format():
    values = [b"\x00\x02a"] * 15 + [b"\x00\x04bc"]
    ((key, value),) = packs_of(b"ns:t:\x00\x00\x00\x01", [pack_position(5, 250 + n) for n in range(16)], values)
    assert key == b"ns:t:\x00\x00\x00\x01" + pack_position(5, 265)
    lengths = b"\x00\x00\x00\x03" * 15 + b"\x00\x00\x00\x04"
    tails = b"".join((250 + n).to_bytes(2, "big") for n in range(16))
    assert value == b"\x90\x02\x00\x10\xff\xff\xff\xff" + lengths + tails + b"".join(values)
    ((key, value),) = packs_of(b"ns:t:\x00\x00\x00\x01", [pack_position(5, n) for n in range(16)], [b"\x00\x02a"] * 16)
    assert value == b"\x90\x01\x00\x10\x00\x00\x00\x03" + bytes(range(16)) + b"\x00\x02a" * 16


@given(
    st.lists(st.binary(max_size=40).map(lambda rest: b"\x00" + rest), min_size=16, max_size=300)
    | st.integers(16, 300).map(lambda n: [b"\x90x"] * n),
    st.integers(0, 1 << 32),
    st.integers(1, 3),
    st.integers(100, 5000),
)
def test_a_pack_round_trips(values, first, step, pack_bytes):
    suffixes = [(first + n * step).to_bytes(10, "big") for n in range(len(values))]
    rows = [(b"topic" + suffix, value) for suffix, value in zip(suffixes, values, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "PACK_BYTES", pack_bytes)
        made = packs_of(b"topic", suffixes, values)
    found = [Pack(key, value) for key, value in made]
    assert [row for pack in found for row in pack.rows()] == rows
    assert [key for pack in found for key, _ in pack.rows(values=False)] == [key for key, _ in rows]
    for pack in found:
        inside = pack.rows()
        assert pack.rows(1, pack.count - 1) == inside[1:-1]
        for at, (key, value) in enumerate(inside):
            assert (pack.index(key), pack.index(key + b"\x00"), pack.get(key)) == (at, at + 1, value)
        assert pack.get(inside[0][0] + b"\x00") is None
        assert (pack.index(b""), pack.index(b"\xff")) == (0, pack.count)


PLAIN_VALUES = st.one_of(
    st.lists(st.binary(max_size=40).map(lambda payload: plain_head(len(payload)) + payload), min_size=16, max_size=60),
    st.tuples(st.integers(16, 60), st.integers(0, 40)).map(
        lambda shape: [plain_head(shape[1]) + bytes([n]) * shape[1] for n in range(shape[0])]
    ),
)


@given(
    values=PLAIN_VALUES,
    first=st.integers(0, 300),
    cut=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    lists=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    limit=st.integers(1, 80),
    max_bytes=st.integers(1, 3000),
    since=st.integers(0, 400),
)
def test_a_page_of_plain_rows_that_stay_together_is_that_of_rows_one_by_one(
    values, first, cut, lists, limit, max_bytes, since
):
    ((key, value),) = packs_of(PREFIX, [pack_position(1000, first + n) for n in range(len(values))], values)
    pack = Pack(key, value)
    assert list(pack.stretches(0, pack.count)) == [(0, pack.count, True)]
    assert pack.is_plain
    low, stop = sorted(min(each, pack.count) for each in cut)
    together = PlainPart(pack, low, stop)
    assert together.wire_bytes == len(together.wire())
    check_rows_that_stay_together(together, pack.rows(low, stop), lists, limit, max_bytes, since)


@given(
    requests=st.lists(PLAIN_VALUES, max_size=4),
    cut=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    lists=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    limit=st.integers(1, 200),
    max_bytes=st.integers(1, 9000),
    since=st.integers(0, 300),
    bounds=st.tuples(st.integers(-5, 250), st.integers(-5, 250)),
)
def test_a_page_of_several_packs_that_stay_together_is_that_of_rows_one_by_one(
    requests, cut, lists, limit, max_bytes, since, bounds
):
    parts, expected, at = [], [], 0
    for values in requests:
        ((key, value),) = packs_of(PREFIX, [pack_position(1000, at + n) for n in range(len(values))], values)
        at += len(values)
        pack = Pack(key, value)
        low, stop = sorted(min(each, pack.count) for each in cut)
        first = low if not parts else 0  # rows between the parts were skipped
        parts.append(PlainPart(pack, first, max(first, stop)))
        expected += pack.rows(first, stop)
    together = PlainParts(parts)
    check_rows_that_stay_together(together, expected, lists, limit, max_bytes, since)
    assert list(together[slice(*bounds)]) == expected[slice(*bounds)]


def check_rows_that_stay_together(together, rows, lists, limit, max_bytes, since):
    assert (list(together), len(together)) == (rows, len(rows))
    assert [together[at] for at in range(-len(rows), len(rows))] == rows + rows
    span = Span(1, PREFIX, pack_position(1000, since) + NO_PAYLOAD_PART, b"\xff" * 20, 2000, 0, None)

    bounds = lists, span, limit, max_bytes
    reached = [row for row in rows if row[0] >= PREFIX + pack_position(1000, since)]
    before = len(rows) - len(reached)
    assert page_in_lists(together[before:], *bounds) == page_in_lists(reached, *bounds)
    assert extent_in_lists(together[before:], *bounds) == extent_in_lists(reached, *bounds)


@pytest.mark.parametrize(
    "other", [b"\x01" + bytes(8) + b"\x02a", encode_row(MessageRow(b"a", extras={"i": 1})), b"\x08"]
)
@pytest.mark.parametrize("others", [(0,), (10,), (23,), (0, 10, 23), (5, 6, 15), tuple(range(24))], ids=str)
@pytest.mark.parametrize("part", [(0, 24), (1, 24), (3, 20), (11, 12), (7, 7)], ids=str)
def test_rows_that_have_more_than_a_payload_leave_those_between_together(others, other, part):
    for plain in (b"\x00\x02a", b"\x00" + b"x" * (len(other) - 1)):
        values = [other if at in others else plain for at in range(24)]
        pack = Pack(*packs_of(PREFIX, [pack_position(1000, n) for n in range(24)], values)[0])
        assert pack.rows() == rows_of(request(0, values))
        stretches = list(pack.stretches(*part))
        assert [row for first, stop, _ in stretches for row in pack.rows(first, stop)] == pack.rows(*part)
        kept = [range(first, stop) for first, stop, is_plain in stretches if is_plain]
        assert all(values[at] == plain for each in kept for at in each)
        bounds = sorted({part[0] - 1, *(at for at in others if part[0] <= at < part[1]), part[1]})
        assert kept == [range(low + 1, high) for low, high in pairwise(bounds) if high - low > 8]


@pytest.mark.parametrize("first", [0, 5, 4000])
@pytest.mark.parametrize("lengths", [(100,), (100, 1000), (20, 20, 20, 900)], ids=str)
def test_the_packs_of_a_request_have_about_the_same_size(first, lengths):
    values = [plain_head(0) + bytes(first), *(bytes(lengths[at % len(lengths)]) for at in range(1, 1000))]
    packs = packs_of(PREFIX, [pack_position(1000, at) for at in range(1000)], values)
    sizes = [len(value) for _, value in packs]
    assert len(sizes) > 1
    each_length = 4 * max(Pack(*pack).count for pack in packs)  # for packs with values of different lengths
    assert max(sizes) - min(sizes) <= first + each_length + 2 * max(lengths)
    assert all(PACK_BYTES - 2 * max(lengths) <= size <= 2 * PACK_BYTES + first for size in sizes)


def test_rows_do_not_stay_together_if_one_is_empty():
    for plain in (b"\x00\x02a", b"\x00"):
        values = [plain] * 16
        values[7] = b""
        pack = Pack(*packs_of(PREFIX, [pack_position(1000, n) for n in range(16)], values)[0])
        assert list(pack.stretches(0, 16)) == [(0, 16, False)]
        assert pack.rows() == rows_of(request(0, values))


async def test_a_scan_keeps_plain_rows_together_in_lists_of_the_requested_lengths(store):
    await store.write([request(0, [plain_head(100) + bytes(100)] * 1000)], claim=None)
    await store.write([put_one(MESSAGE, PREFIX + pack_position(2000, 0), b"\x00\x02a")], claim=None)
    lists = []

    def feed(rows):
        lists.append(rows)
        return True

    start, stop = PREFIX + pack_position(1000, 5), PREFIX + b"\xff"
    await store.scan(MESSAGE, start, stop, feed, first_chunk=10)
    assert [row for rows in lists for row in rows] == (await everything(store))[5:]
    assert [isinstance(rows, PlainRows) for rows in lists] == [True] * (len(lists) - 1) + [False]
    assert [len(rows) for rows in lists[:2]] == [10, 40]
    lists.clear()
    await store.scan(MESSAGE, start, stop, feed, first_chunk=10, values=False)
    await store.scan(MESSAGE, start, stop, feed, first_chunk=10, reverse=True)
    assert not any(isinstance(rows, PlainRows) for rows in lists)


def test_rows_that_gain_nothing_by_it_stay_unchanged():
    suffixes = [pack_position(1, n) for n in range(20)]
    assert packs_of(PREFIX, suffixes, [b"x"] * 20) is not None
    assert packs_of(PREFIX, suffixes[:15], [b"x"] * 15) is None
    assert packs_of(PREFIX, suffixes, [b"x" * 1025] * 20) is None
    own_ttl = encode_row(MessageRow(b"m", ttl_s=5))
    assert packs_of(PREFIX, suffixes, [b"\x00\x02m"] * 19 + [own_ttl]) is None
    assert packs_of(
        PREFIX, suffixes, [b"\x00\x02m", b"", encode_row(MessageRow(b"m", 7, extras={"a": 1}))] * 6 + [b"", b""]
    )
    assert packs_of(PREFIX, suffixes, [b"x"] * 19 + [b"x" * (PACK_BYTES // 2 + 1)]) is None
    assert packs_of(PREFIX, suffixes[::-1], [b"x"] * 20) is None
    assert packs_of(PREFIX, [*suffixes[:-1], suffixes[-2]], [b"x"] * 20) is None
    assert packs_of(PREFIX, [*suffixes[:-1], b"\xff" * 11], [b"x"] * 20) is None


def test_a_pack_with_other_lengths_than_it_says_is_damage():
    ((key, value),) = packs_of(PREFIX, [pack_position(1, n) for n in range(16)], [b"x%02d" % n for n in range(16)])
    assert Pack(key, value).count == 16
    wrong = [value[:-1], value + b"x", MARK, value[:1] + b"\x03" + value[2:], value[:3] + b"\x0f" + value[4:]]
    for damaged in (*wrong, value[:1] + b"\x00" + value[2:], value[:2] + b"\x00\x00" + value[4:]):
        with pytest.raises(plyvel.CorruptionError):
            Pack(key, damaged)
    with pytest.raises(plyvel.CorruptionError):
        Pack(key[:-1] + b"\xff", value)


# --- in a store ------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as opened:
        yield opened


async def test_a_request_of_a_thousand_messages_is_a_few_rows_of_leveldb_and_one_of_few_is_a_row_for_each(tmp_path):
    random = Random(1)
    large, small = (
        request(0, [plain_head(100) + random.randbytes(100) for _ in range(1000)]),
        request(1000, [b"m"] * 15),
    )
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await store.write([large], claim=None)
        await store.write([small], claim=None)
        assert await everything(store) == rows_of(large) + rows_of(small)
    found = stored_rows(tmp_path / "data")
    assert [row[0] for row in found[-15:]] == [row[0] for row in rows_of(small)]
    in_packs = found[:-15]
    assert 2 <= len(in_packs) <= 1000 * 108 // PACK_BYTES
    assert all(value[:1] == MARK and len(value) < 2 * PACK_BYTES for _, value in in_packs)
    assert sum(len(value) for _, value in in_packs) < 1000 * 105


@pytest.mark.parametrize("count", [1, 20])
async def test_a_value_that_begins_as_a_pack_does_is_a_value(tmp_path, count):
    values = [MARK + b"%d" % n for n in range(count)]
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await store.write([request(100, values)], claim=None)
        await store.write([put_one(MESSAGE, b"short", MARK), put_one(MESSAGE, b"short2", b"\xff")], claim=None)
    async with await LevelDBStore.open(tmp_path / "data") as store:
        assert await everything(store) == [*rows_of(request(100, values)), (b"short", MARK), (b"short2", b"\xff")]
        assert await store.get(MESSAGE, PREFIX + pack_position(1000, 100)) == values[0]


def test_only_a_value_that_begins_as_a_pack_does_is_stored_in_another_way():
    assert stored(b"\x00m") == b"\x00m"
    assert stored(b"") == b""
    assert Pack(b"key", stored(MARK + b"m")).rows() == [(b"key", MARK + b"m")]


async def test_a_change_in_a_pack_changes_that_row_alone(store):
    put = request(0, [under(7, b"payload %03d" % n) for n in range(200)])
    rows = dict(rows_of(put))
    await store.write([put], claim=None)
    keys = list(rows)
    await store.write([Delete(MESSAGE, [keys[0], keys[50], keys[-1]])], claim=None)
    await store.discard(MESSAGE, [keys[60], keys[61]])
    await store.write([RollBack(keys[70], keys[80], 7)], claim=None)
    await store.write([put_one(MESSAGE, keys[50], b"again"), put_one(MESSAGE, keys[51] + b"x", b"between")], claim=None)
    for gone in (0, 60, 61, -1):
        del rows[keys[gone]]
    rows |= {key: under(-7, rows[key][10:]) for key in keys[70:80]}
    rows |= {keys[50]: b"again", keys[51] + b"x": b"between"}
    expected = sorted(rows.items())
    assert await everything(store) == expected
    assert await everything(store, reverse=True) == expected[::-1]
    assert await store.get(MESSAGE, keys[60]) is None
    assert await store.get(MESSAGE, keys[75]) == rows[keys[75]]


async def test_a_pack_whose_rows_are_all_removed_leaves_nothing(tmp_path):
    put = request(0, [b"m"] * 100)
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await store.write([put], claim=None)
        await store.write([Delete(MESSAGE, [key for key, _ in rows_of(put)])], claim=None)
        assert await everything(store) == []
    assert stored_rows(tmp_path / "data") == []


async def test_a_scan_begins_and_ends_in_the_middle_of_packs_in_both_directions(store):
    put = request(0, [b"\x00%03d" % n + b"." * 300 for n in range(300)])
    rows = rows_of(put)
    await store.write([put], claim=None)
    for first, last in ((0, 300), (1, 299), (10, 11), (77, 78), (100, 250), (299, 300)):
        start, stop = rows[first][0], rows[last][0] if last < 300 else LAST
        assert await read_rows(store, MESSAGE, start, stop, limit=1000) == rows[first:last]
        assert await read_rows(store, MESSAGE, start, stop, limit=1000, reverse=True) == rows[first:last][::-1]
        assert await read_rows(store, MESSAGE, start, stop, limit=3) == rows[first:last][:3]
        assert await read_rows(store, MESSAGE, start, stop, limit=2, reverse=True) == rows[first:last][::-1][:2]


async def test_large_rows_next_to_packs_are_fed_in_lists_of_a_bounded_size(store):
    small, large = request(0, [b"m"] * 100), request(100, [bytes([n]) * (400 << 10) for n in range(8)])
    await store.write([small], claim=None)
    await store.write([large], claim=None)
    await store.write([request(200, [b"m"] * 100)], claim=None)
    sizes, found = [], []

    def feed(rows):
        sizes.append((len(rows), sum(len(value) for _, value in rows)))
        found.extend(rows)
        return True

    await store.scan(MESSAGE, b"", LAST, feed, first_chunk=1000)
    assert found == await everything(store)
    assert len(found) == 208
    assert all(size <= 1 << 20 or count == 1 for count, size in sizes)


@given(
    st.lists(st.lists(st.integers(0, 700 << 10), max_size=30), max_size=5),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_lists_of_blocks_are_those_of_rows(runs, first_chunk, random):
    rows = [[(b"%d.%d" % (n, at), bytes(size)) for at, size in enumerate(run)] for n, run in enumerate(runs)]
    in_blocks = []
    for run in rows:
        cuts = sorted(random.randrange(len(run) + 1) for _ in range(3))
        parts = [run[low:high] for low, high in zip([0, *cuts], [*cuts, len(run)], strict=True)]
        in_blocks.append(Blocks(parts) if random.random() < 0.7 else run)
    expected = list(chunks(iter([row for run in rows for row in run]), first_chunk))
    assert list(chunks_of_runs(in_blocks, first_chunk)) == expected


async def test_a_directory_of_format_2_has_no_packs_in_the_volumes_that_were_there(tmp_path):
    directory = shutil.copytree(KEPT, tmp_path / "data")
    put = request(0, [b"m"] * 100)
    async with await LevelDBStore.open(directory) as store:
        before = await everything(store)
        await store.write([put], claim=None)
        (old,) = store._db.sets.current.all
        await store.begin_files()
        later = request(100, [b"l"] * 100)
        await store.write([later], claim=None)
        assert await everything(store) == sorted([*before, *rows_of(put), *rows_of(later)])
    assert not any(value[:1] == MARK for _, value in stored_rows(directory, old.path.name))
    assert any(value[:1] == MARK for _, value in stored_rows(directory, "00000002"))


async def test_volumes_that_are_rewritten_have_the_rows_that_are_left_in_packs(tmp_path):
    options = LevelDBOptions(StorageConfig(volume_bytes=20_000))
    async with await LevelDBStore.open(tmp_path / "data", options) as store:
        rows = []
        for first in range(0, 1200, 10):
            put = request(first, [b"m" * 100] * 10)
            await store.write([put], claim=None)
            await settled(store)
            rows += rows_of(put)
        await store.drop(MESSAGE, [(rows[0][0], rows[700][0])])
        assert await store.tidy() > 0
        assert await everything(store) == rows[700:]
        first = store._db.sets.current.all[0].path.name
    assert "." in first or first != "00000001"
    async with await LevelDBStore.open(tmp_path / "data", options) as store:
        assert await everything(store) == rows[700:]


async def test_rows_removed_while_volumes_are_rewritten_are_not_in_the_new_packs(tmp_path, monkeypatch):
    options = LevelDBOptions(StorageConfig(volume_bytes=20_000))
    async with await LevelDBStore.open(tmp_path / "data", options) as store:
        rows = []
        for first in range(0, 1200, 10):
            put = request(first, [b"m" * 100] * 10)
            await store.write([put], claim=None)
            await settled(store)
            rows += rows_of(put)
        await store.drop(MESSAGE, [(rows[0][0], rows[100][0])])
        left = rows[100:]
        real = tidying._copy
        loop = trio.lowlevel.current_trio_token()

        def copy_and_remove(keeper, sources, *arguments):
            yield from real(keeper, sources, *arguments)
            copied = [key for key, _ in left if sources[0] in keeper.volumes.places(MESSAGE, key)]
            for key in copied[1:4]:
                left.remove((key, b"m" * 100))
                yield from paused_until(loop, partial(store.discard, MESSAGE, [key]))

        monkeypatch.setattr(tidying, "_copy", copy_and_remove)
        await store.tidy()
        assert len(left) < 1100
        assert await everything(store) == left
