"""A topic's plain rows that LevelDB stores individually are joined when read, also between rows that are not plain."""

from __future__ import annotations

from itertools import chain
from random import Random

import plyvel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reading import walk_rows
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import FIRST_BOUND, NO_PAYLOAD_PART, after, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import PLAIN_GAP, PlainItems, PlainRows, plain_head, plain_wire
from plainsong.protocol.topic.asks import Span
from plainsong.protocol.topic.reading import Paging
from storage.base import MAX_CHUNK_ROWS, Blocks, chunks_of_runs
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine.database import Database
from storage.leveldb.engine.packs import MARK, MIN_ROWS, packs_of, stored
from storage.leveldb.engine.ranges import JOINED_ROWS, LIST_ROWS, TOGETHER
from tests.storage.contract import LAST
from tests.storage.fed_in_lists import extent_in_lists, page_in_lists

NAME = TopicName("ns", "topic")
PREFIX = generation_prefix(NAME, 1)
MESSAGE = Table.MESSAGE
BYTE = bytes([MESSAGE])
OPTIONS = LevelDBOptions()
PLAIN = st.binary(max_size=40).map(lambda payload: plain_head(len(payload)) + payload)
#: A row with a pointer, one with extras, an empty one, one that begins like a pack, and a large one.
OTHER = st.sampled_from([b"\x01" + bytes(8) + b"\x02a", b"\x04" + bytes(4) + b"\x02a", b"", MARK + b"x"])
LARGE = st.just(plain_head(5000) + bytes(5000))


def position(number: int) -> bytes:
    return pack_position(1000 + number // 7, number % 7)


def key(number: int) -> bytes:
    return PREFIX + position(number)


# --- a list of rows ---------------------------------------------------------------------------------


@given(
    values=st.lists(PLAIN, max_size=40),
    is_known=st.booleans(),
    lists=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    limit=st.integers(1, 50),
    max_bytes=st.integers(1, 3000),
    since=st.integers(0, 50),
)
def test_a_page_and_an_extent_of_joined_rows_equal_those_of_rows_one_by_one(
    values, is_known, lists, limit, max_bytes, since
):
    rows = [(key(number), value) for number, value in enumerate(values)]
    items = [position(number) + PLAIN_GAP + value for number, value in enumerate(values)]
    joined = PlainItems(PREFIX, items, sum(map(len, items)) if is_known else None)
    assert (list(joined), len(joined)) == (rows, len(rows))
    assert [joined[at] for at in range(-len(rows), len(rows))] == rows + rows
    assert joined.wire() == plain_wire([position(number) for number in range(len(values))], values)
    span = Span(1, PREFIX, position(since) + NO_PAYLOAD_PART, b"\xff" * 20, 2000, 0, None)

    bounds = lists, span, limit, max_bytes
    assert page_in_lists(joined[since:], *bounds) == page_in_lists(rows[since:], *bounds)
    assert extent_in_lists(joined[since:], *bounds) == extent_in_lists(rows[since:], *bounds)
    if not since:
        assert page_in_lists(joined, *bounds) == page_in_lists(rows, *bounds)


# --- lists of LevelDB -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A database that may contain packs, and one that contains none; each test and each example uses new topics."""
    found = [
        Database(tmp_path_factory.mktemp("joined") / "one", OPTIONS.volume_shape(packed=packed), create=True)
        for packed in (True, False)
    ]
    yield found
    for each in found:
        each.close()


def lists_of(database: Database, start: bytes, stop: bytes, first: int = 100, **options) -> list:
    with database.rows(MESSAGE, start, stop, wanted=first, **options) as rows:
        assert isinstance(rows, Blocks)
        return list(chunks_of_runs([rows], first))


numbers = iter(range(1, 1 << 20))
RUNS = st.lists(
    st.one_of(
        st.lists(PLAIN, min_size=1, max_size=40).map(lambda values: (values, False)),
        st.lists(PLAIN, min_size=MIN_ROWS, max_size=60).map(lambda values: (values, True)),
        st.lists(OTHER, min_size=1, max_size=20).map(lambda values: (values, False)),
        st.lists(st.one_of(PLAIN, OTHER, LARGE), min_size=1, max_size=20).map(lambda values: (values, False)),
    ),
    max_size=6,
)


@given(
    runs=RUNS,
    bounds=st.tuples(st.integers(-2, 150), st.integers(-2, 150)),
    first=st.integers(1, 300),
    largest=st.sampled_from([0, 1, 40, 6000]),
    random=st.randoms(),
)
def test_lists_have_the_rows_of_a_range_in_order_and_joined_rows_are_plain(
    opened, runs, bounds, first, largest, random
):
    for may_pack, database in zip((True, False), opened, strict=True):
        prefix = generation_prefix(NAME, next(numbers))
        rows: list[tuple[bytes, bytes]] = []
        with database.batch(sync=False) as batch:
            for values, packs in runs:
                suffixes = [position(len(rows) + at) for at in range(len(values))]
                made = packs_of(prefix, suffixes, values) if packs and may_pack else None
                there = [(prefix + suffix, value) for suffix, value in zip(suffixes, values, strict=True)]
                for name, value in made or [(name, stored(value) if may_pack else value) for name, value in there]:
                    batch.put(BYTE + name, value)
                rows += there
        low, high = sorted(bounds)
        start = prefix + (position(low) if low >= 0 else b"\x00" * 10)
        stop = prefix + (position(high) + random.choice([b"", b"\x00"]) if high >= 0 else b"\xff" * 10)
        if start >= stop:
            continue
        found = lists_of(database, start, stop, first, largest=largest)  # the lists under test
        assert [row for some in found for row in some] == [row for row in rows if start <= row[0] < stop]
        assert all(0 < len(some) <= MAX_CHUNK_ROWS for some in found)
        joined = [row for some in found if isinstance(some, PlainItems) for row in some]
        assert all(value[:1] == b"\x00" for _, value in joined)
        # Other kinds of reads find the same rows.
        with database.rows(MESSAGE, start, stop, reverse=True) as down:
            assert list(down) == [row for some in found for row in some][::-1]
        with database.rows(MESSAGE, start, stop, values=False) as keys:
            assert [name for name, _ in keys] == [name for some in found for name, _ in some]


def written(database: Database, values: list[bytes], generation: int) -> bytes:
    prefix = generation_prefix(NAME, generation)
    with database.batch(sync=False) as batch:
        for number, value in enumerate(values):
            batch.put(BYTE + prefix + position(number), value)
    return prefix


def test_plain_rows_are_joined_in_lists_that_grow(opened):
    for database in opened:
        prefix = written(database, [plain_head(1) + b"m"] * 2000, next(numbers))
        found = lists_of(database, prefix + position(0), prefix + b"\xff" * 10, 5000)
        joined = [isinstance(some, PlainItems) for some in found]
        assert joined.index(True) <= 3  # where packs are possible, it first detects that these rows are not packs
        assert all(joined[joined.index(True) :])
        assert max(map(len, found)) == LIST_ROWS


def test_after_rows_that_are_not_plain_others_are_joined_once_a_whole_list_is_plain(opened):
    plain, other = plain_head(1) + b"m", b"\x01" + bytes(8) + b"\x02a"
    for database in opened:
        prefix = written(database, [plain] * 700 + [other] * 700 + [plain] * 1500, next(numbers))
        found = lists_of(database, prefix + position(0), prefix + b"\xff" * 10, 100)
        joined = [key for some in found if isinstance(some, PlainRows) for key, _ in some]
        before = [name for name in joined if name < prefix + position(700)]
        after_them = [name for name in joined if name >= prefix + position(1400)]
        assert len(joined) == len(before) + len(after_them)
        assert len(before) > 650
        assert len(after_them) > 450
        assert len(before) + len(after_them) < 2200 + JOINED_ROWS


def test_only_few_large_rows_after_small_ones_are_in_memory_at_once(opened):
    size = 64 << 10
    values = [plain_head(1) + b"m"] * 900 + [plain_head(size) + bytes(size)] * 60
    for database in opened:
        prefix = written(database, values, next(numbers))
        found = lists_of(database, prefix + position(0), prefix + b"\xff" * 10, 100)
        assert sum(map(len, found)) == 960
        assert max(sum(len(value) >= size for _, value in some) for some in found) <= TOGETHER


def test_where_the_size_of_rows_is_known_no_list_takes_more_memory_than_others(opened):
    _, database = opened
    values = [plain_head(1000) + bytes(1000)] * 1500
    prefix = written(database, values, next(numbers))
    found = lists_of(database, prefix + position(0), prefix + b"\xff" * 10, 1000, largest=len(values[0]))
    longest = max(map(len, found))
    assert TOGETHER < longest < LIST_ROWS
    assert sum(len(value) for _, value in found[0]) <= 256 << 10


def test_the_first_lists_have_no_more_rows_than_were_requested(opened):
    for database in opened:
        prefix = written(database, [plain_head(1) + b"m"] * 2000, next(numbers))
        with database.rows(MESSAGE, prefix + position(0), prefix + b"\xff" * 10, packed=False, wanted=1201) as rows:
            lengths = [len(some) for some in rows.lists]
        assert lengths[:3] == [500, 500, 201]
        assert sum(lengths) == 2000


def test_large_rows_are_read_one_by_one(opened):
    size = 300 << 10
    for database in opened:
        prefix = written(database, [plain_head(size) + bytes(size)] * 12, next(numbers))
        found = lists_of(database, prefix + position(0), prefix + b"\xff" * 10, 100)
        assert [len(some) for some in found] == [1] * 12 or max(
            map(len, found)
        ) <= 3  # pairs are collected into lists of 1 MiB
        read = 0
        with database.rows(MESSAGE, prefix + position(0), prefix + b"\xff" * 10, wanted=100) as rows:
            for some in rows.lists:
                read += 1
                assert len(some) == 1
        assert read == 12


def test_a_range_over_two_generations_has_the_rows_of_both(opened):
    for database in opened:
        one = next(numbers)
        next(numbers)
        first, second = (written(database, [plain_head(1) + b"m"] * 40, each) for each in (one, one + 1))
        with database.rows(MESSAGE, first + position(30), second + position(10)) as rows:
            assert [name for name, _ in rows] == [first + position(n) for n in range(30, 40)] + [
                second + position(n) for n in range(10)
            ]


def joined(lists, packed: bool):
    for some in lists:
        assert isinstance(some, PlainItems) or packed
        yield some


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_rows_before_a_damaged_block_are_read_and_then_the_damage_is_an_error(tmp_path, packed, last):
    random = Random(1)
    values = [plain_head(100) + random.randbytes(100) for _ in range(3000)]
    path, shape = tmp_path / "one", OPTIONS.volume_shape(packed=packed)
    database = Database(path, shape, create=True)
    prefix = written(database, values, 1)
    if not last:
        written(database, values, 2)
    database.flush_memory()
    database.close()
    (file,) = [each for each in path.glob("*.ldb") if values[-1] in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(values[-1]) + 7] ^= 1
    file.write_bytes(data)
    database = Database(path, shape, create=False)
    try:
        found: list = []
        with (
            database.rows(MESSAGE, prefix + position(0), prefix + b"\xff" * 10, wanted=100) as rows,
            pytest.raises(plyvel.CorruptionError),
        ):
            found.extend(chain.from_iterable(joined(rows.lists, packed)))
        assert found == [(prefix + position(n), values[n]) for n in range(len(found))]
        assert 2000 < len(found) < 3000
        # Ranges that end before that block are read without error.
        with database.rows(MESSAGE, prefix + position(100), prefix + position(300), wanted=100) as rows:
            assert len(list(rows)) == 200
        near = len(found) - 5
        with database.rows(MESSAGE, prefix + position(near - 60), prefix + position(near), wanted=5000) as rows:
            assert len(list(rows)) == 60
        with pytest.raises(plyvel.CorruptionError), database.rows(MESSAGE, prefix + position(2999), LAST) as rows:
            list(rows)
    finally:
        database.close()


@pytest.mark.parametrize("wanted", [0, 1, 40, 5000])
def test_rows_before_a_damaged_pack_are_read_and_damage_after_the_range_does_not_matter(opened, wanted):
    database, _ = opened
    prefix = generation_prefix(NAME, next(numbers))
    value = plain_head(1) + b"m"
    with database.batch(sync=False) as batch:
        for number in range(6):
            suffixes = [position(number * MIN_ROWS + at) for at in range(MIN_ROWS)]
            ((name, pack),) = packs_of(prefix, suffixes, [value] * MIN_ROWS)
            batch.put(BYTE + name, pack[:-1] if number == 4 else pack)
    good = [(prefix + position(number), value) for number in range(4 * MIN_ROWS)]
    found: list = []
    with (
        database.rows(MESSAGE, prefix + position(0), prefix + b"\xff" * 10, wanted=wanted) as rows,
        pytest.raises(plyvel.CorruptionError),
    ):
        found.extend(chain.from_iterable(rows.lists))
    assert found == good
    for stop in range(MIN_ROWS, 3 * MIN_ROWS + 5, 7):
        with database.rows(MESSAGE, prefix + position(0), prefix + position(stop), wanted=wanted) as rows:
            assert list(rows) == good[:stop]


# --- in a store -------------------------------------------------------------------------------------


async def test_a_scan_of_small_requests_gives_joined_rows_and_one_of_a_view_gives_those_very_rows(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        values = [plain_head(3) + b"%03d" % number for number in range(600)]
        for first in range(0, 600, 10):
            suffixes = [position(number) for number in range(first, first + 10)]
            await store.write([Put(MESSAGE, PREFIX, suffixes, values[first : first + 10])], claim=None)
        rows = [(key(number), value) for number, value in enumerate(values)]
        lists: list = []

        def feed(some):
            lists.append(some)
            return True

        await store.scan(MESSAGE, PREFIX + b"\x00" * 10, PREFIX + b"\xff" * 10, feed, first_chunk=50)
        assert [row for some in lists for row in some] == rows
        assert all(isinstance(some, PlainItems) for some in lists)
        lists.clear()
        view = await store.pin(60)
        await view.scan(MESSAGE, PREFIX + b"\x00" * 10, PREFIX + b"\xff" * 10, feed, first_chunk=50)
        await view.aclose()
        assert [row for some in lists for row in some] == rows
        lists.clear()
        await store.scan(MESSAGE, b"", LAST, feed, first_chunk=50)
        assert [row for some in lists for row in some] == rows


@pytest.mark.parametrize(("messages", "rows"), [(MIN_ROWS - 1, MIN_ROWS - 1), (MIN_ROWS, 1)])
async def test_a_commit_of_few_messages_of_a_topic_has_a_row_for_each(tmp_path, messages, rows):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        suffixes = [position(number) for number in range(messages)]
        await store.write([Put(MESSAGE, PREFIX, suffixes, [plain_head(1) + b"m"] * messages)], claim=None)
    with plyvel.DB(str(tmp_path / "data" / "volumes" / "00000001")) as database:
        assert sum(name[:1] == BYTE for name, _ in database) == rows


async def test_a_page_of_small_requests_reads_one_row_more_than_it_has_room_for(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        for first in range(0, 1000, 10):
            suffixes = [position(number) for number in range(first, first + 10)]
            await store.write([Put(MESSAGE, PREFIX, suffixes, [plain_head(1) + b"m"] * 10)], claim=None)
        for since, own in ((FIRST_BOUND, 0), (after(position(20) + NO_PAYLOAD_PART), 1)):
            for limit in (1, 10, 300, 700):
                walk = Counted(Span(1, PREFIX, since, b"\xff" * 20, 2000, 0, None), limit, 1 << 20)
                await walk_rows(store, walk)
                page = walk.page()
                # A read that starts after a message also reads that message's row.
                assert (page.count, page.end, walk.rows) == (limit, "more", limit + 1 + own)


class Counted(Paging):
    """A page that counts the rows fed to it."""

    rows = 0

    def feed_rows(self, rows):
        self.rows += len(rows)
        return super().feed_rows(rows)
