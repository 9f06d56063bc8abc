"""Possible states of the last commit in a preallocated log after a power cut or kill.

The disk has stored any sectors of that commit, and the others read as zeros. Either LevelDB opens the log and has every
earlier commit, and this one completely or not at all; or it refuses, and the store finds the start of the torn commit.
"""

from __future__ import annotations

from itertools import chain, combinations
from random import Random

import plyvel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.leveldb.engine.log_format import BLOCK_BYTES, HEADER
from storage.leveldb.engine.torn_end import SECTOR_BYTES, torn_record
from tests.storage.log_format import Refused, append, read

ROOM = bytes(3 * SECTOR_BYTES)


class Log:
    """A log of acknowledged commits, and a last one in progress."""

    def __init__(self, at: int, size: int, *, room: bytes = ROOM) -> None:
        """``at``: position of the last commit, which has ``size`` bytes; a block's last 1 to 6 bytes are skipped."""
        random = Random(at * 7 + size)
        log = bytearray()
        self.acknowledged: list[bytes] = []
        for left in [BLOCK_BYTES] * (at // BLOCK_BYTES) + [at % BLOCK_BYTES] * (at % BLOCK_BYTES > 0):
            self.acknowledged.append(random.randbytes(left - HEADER.size))
            append(log, self.acknowledged[-1])
        assert len(log) == at
        self.before = bytes(log)
        self.last = random.randbytes(size)
        append(log, self.last)
        self.end = len(log)
        self.whole = bytes(log) + room
        # If a block has less space left than a header needs, the commit begins in the next block.
        left = -at % BLOCK_BYTES
        self.start = at + left if left < HEADER.size else at

    @property
    def sectors(self) -> list[int]:
        """The sectors that the last commit wrote."""
        return list(range(self.start // SECTOR_BYTES, (self.end - 1) // SECTOR_BYTES + 1))

    def without(self, lost: tuple[int, ...] | set[int]) -> bytes:
        """Return the log as if these sectors were not stored, that is, with their previous content."""
        data = bytearray(self.whole)
        for sector in lost:
            first, end = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
            before = self.before[first:end]
            data[first:end] = before + bytes(min(end, len(data)) - first - len(before))
        return bytes(data)

    def check(self, data: bytes) -> str:
        """Check that every acknowledged commit is read; return the state of the last commit."""
        try:
            records = read(data, known=len(self.before))
        except Refused:
            assert torn_record(data) == self.start
            assert read(data[: self.start], known=len(self.before)) == self.acknowledged
            return "left out"
        if records == self.acknowledged:
            return "not there"
        assert records == [*self.acknowledged, self.last]
        return "there"


def subsets(items: list[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(items, count) for count in range(len(items) + 1)))


# --- power cuts -----------------------------------------------------------------------------------

#: Every offset in a sector at which a header crosses the sector boundary, and some others.
IN_SECTOR = [0, 7, 8, 100, 255, 300, 400, *range(490, 512)]


@pytest.mark.parametrize("size", [20, 505, 1100, 1900])
def test_any_sectors_of_the_last_commit_may_be_missing(size):
    outcomes = set()
    for sector in (0, 5):
        for offset in IN_SECTOR:
            at = sector * SECTOR_BYTES + offset
            if 0 < at < HEADER.size:
                continue
            log = Log(at, size)
            outcomes |= {log.check(log.without(lost)) for lost in subsets(log.sectors)}
    assert outcomes == {"there", "not there", "left out"}


@pytest.mark.parametrize("left", [*range(20), 511, 512, 513, 1024, 1500])
def test_any_sectors_of_a_last_commit_may_be_missing_that_continues_in_another_block(left):
    log = Log(2 * BLOCK_BYTES - left, 1600)
    for lost in subsets(log.sectors):
        log.check(log.without(lost))


@given(
    at=st.integers(7, 2 * BLOCK_BYTES).filter(lambda at: at % BLOCK_BYTES == 0 or at % BLOCK_BYTES >= HEADER.size),
    size=st.integers(12, 5 * BLOCK_BYTES),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.99]),
    run=st.integers(1, 80),
)
def test_any_sectors_of_a_last_commit_that_spans_several_blocks_may_be_missing(at, size, seed, share, run):
    log = Log(at, size)
    random = Random(seed)
    starts = [random.choice(log.sectors), *(sector for sector in log.sectors if random.random() < share / run)]
    lost = {sector for start in starts for sector in range(start, min(start + run, log.sectors[-1] + 1))}
    log.check(log.without(lost))


def test_a_last_commit_that_grew_the_file_may_miss_sectors_and_its_end():
    log = Log(BLOCK_BYTES - 700, 3 * BLOCK_BYTES, room=b"")
    random = Random(3)
    for _ in range(60):
        lost = set(random.sample(log.sectors, random.choice([1, 2, 20])))
        log.check(log.without(lost)[: random.randint(log.start, log.end)])


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 700])
def test_an_interrupted_write_has_stored_the_beginning_of_the_commit(size):
    log = Log(1000, size)
    # A record that lacks fewer bytes counts as damaged; the kernel cuts writes at page boundaries.
    for cut in range(log.start, log.end - 8):
        assert log.check(log.whole[:cut] + bytes(len(log.whole) - cut)) in {"not there", "left out"}


def test_a_kill_between_the_writes_of_a_commit_has_stored_its_first_blocks():
    log = Log(BLOCK_BYTES - 1000, 4 * BLOCK_BYTES)
    for cut in range(BLOCK_BYTES, log.end, 4096):
        assert log.check(log.whole[:cut] + bytes(len(log.whole) - cut)) == "left out"


# --- damage ---------------------------------------------------------------------------------------


def test_a_changed_byte_of_an_acknowledged_commit_is_damage_also_of_the_last_one():
    for at in (0, 300, BLOCK_BYTES - 600):
        log = Log(at, 900)
        for place in [*range(log.start, log.start + 40), *range(log.start + 40, log.end, 11), log.end - 1]:
            if place % BLOCK_BYTES - log.start % BLOCK_BYTES in (4, 5) or place % BLOCK_BYTES in (4, 5):
                continue  # the length field: such a record may end in unwritten space
            data = bytearray(log.whole)
            data[place] ^= 0x55
            with pytest.raises(Refused):
                read(bytes(data))
            assert torn_record(bytes(data)) is None


def test_a_commit_with_another_one_after_it_is_never_left_out():
    log = Log(300, 3000)
    more = bytearray(log.whole[: log.end])
    append(more, Random(1).randbytes(3000))
    for lost in log.sectors[1:-1]:
        data = bytearray(more)
        data[lost * SECTOR_BYTES : (lost + 1) * SECTOR_BYTES] = bytes(SECTOR_BYTES)
        with pytest.raises(Refused):
            read(bytes(data))
        assert torn_record(bytes(data) + ROOM) is None


def test_the_first_blocks_of_a_commit_that_has_another_one_after_it_may_not_be_missing_either():
    log = Log(BLOCK_BYTES - 3000, 2 * BLOCK_BYTES)
    more = bytearray(log.whole[: log.end])
    append(more, Random(1).randbytes(100))
    data = bytearray(more)
    data[log.start : BLOCK_BYTES] = bytes(3000)
    with pytest.raises(Refused):
        read(bytes(data))
    assert torn_record(bytes(data) + ROOM) is None


@given(data=st.binary(max_size=200), at=st.integers(0, 2000), zeros=st.integers(0, 40_000))
def test_a_log_of_any_bytes_is_searched_to_its_end(data, at, zeros):
    found = torn_record(bytes(at) + data + bytes(zeros))
    assert found is None or found <= at + len(data)


# --- LevelDB itself -------------------------------------------------------------------------------


class Real:
    """A LevelDB database with a replaced log."""

    def __init__(self, path) -> None:
        self.path = path
        database = plyvel.DB(str(path), create_if_missing=True)
        for number in range(40):
            # The last batch spans several blocks.
            with database.write_batch(transaction=True, sync=True) as batch:
                batch.put(b"%02d" % number, Random(number).randbytes(400 if number < 39 else 70_000))
            if number == 38:
                self.start = self.log.stat().st_size
        database.close()
        self.files = {each.name: each.read_bytes() for each in path.iterdir()}
        self.data = self.log.read_bytes()

    @property
    def log(self):
        (found,) = self.path.glob("*.log")
        return found

    def read(self, data: bytes) -> list[bytes]:
        """Return the database's keys with this log. Raises Refused."""
        for each in self.path.iterdir():
            each.unlink()
        for name, content in self.files.items():
            (self.path / name).write_bytes(content)
        self.log.write_bytes(data)
        try:
            database = plyvel.DB(str(self.path), paranoid_checks=True)
        except plyvel.CorruptionError as error:
            raise Refused(str(error)) from error
        with database.iterator(include_value=False) as keys:
            found = list(keys)
        database.close()
        return found


def test_leveldb_and_our_reader_read_a_log_with_zeros_after_it_as_one_without(tmp_path):
    real = Real(tmp_path / "real")
    assert real.read(real.data) == real.read(real.data + bytes(100_000)) == [b"%02d" % number for number in range(40)]
    random, outcomes = Random(5), set()
    whole = real.data + bytes(5000)
    sectors = range(real.start // SECTOR_BYTES, len(real.data) // SECTOR_BYTES + 1)
    in_block = BLOCK_BYTES // SECTOR_BYTES
    few = [
        list(sectors),
        [sectors[0]],
        [in_block],
        [2 * in_block],
        [sectors[0] + 2],
        [sectors[-1]],
        [sectors[0], in_block],
    ]
    for lost in [*few, *(random.sample(range(sectors[-1]), random.choice([1, 2, 40])) for _ in range(40))]:
        data = bytearray(whole)
        for sector in lost:
            end = (sector + 1) * SECTOR_BYTES
            first = real.start if sector == sectors[0] else sector * SECTOR_BYTES
            data[first:end] = bytes(end - first)
        try:
            expected = len(read(bytes(data)))
        except Refused as refused:
            outcomes.add(str(refused))
            with pytest.raises(Refused):
                real.read(bytes(data))
        else:
            outcomes.add("read")
            assert len(real.read(bytes(data))) == expected
    assert outcomes >= {"read", "checksum mismatch", "error in middle of record", "missing start of fragmented record"}
