"""Power cuts while a store rewrites volumes, sweeps a volume of version 0.1, or upgrades its directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from plainsong.protocol.effects import Table
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.storage.contract import MESSAGE, everything
from tests.torture import upkeep
from tests.torture.__main__ import ROOT
from tests.torture.disk import Disk, why_not
from tests.torture.power import STYLES, Record, Style, read_log
from tests.torture.power import Disk as Told

SEED = 191
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
Rows = list[tuple[bytes, bytes]]


class Recorded:
    """A run of a course in ``upkeep.py``, with all its writes to the disk."""

    def __init__(self, course: str, directory: Path, made: Path) -> None:
        self.disk = Disk(directory / "data", made, log=True)
        command = [sys.executable, "-m", "tests.torture.upkeep", course, str(self.disk.root)]
        done = subprocess.run(command, cwd=ROOT, env=self.disk.environ, capture_output=True, text=True, check=False)
        self.disk.close()
        assert done.returncode == 0, done.stderr
        assert self.disk.log is not None
        self.records: list[Record] = read_log(self.disk.log)

    def at(self, mark: str) -> int:
        """Return the number of records when the course reached a mark."""
        return next(
            n for n, each in enumerate(self.records, 1) if each.kind == "open_" and each.one.endswith(mark.encode())
        )

    def image(self, moment: int, style: Style, directory: Path, seed: int, lies: str = "") -> Path:
        """Build an image that a power cut after ``moment`` records may leave."""
        told = Told.that_was_reported(self.disk.root, self.records[:moment], lies)
        told.image(directory, style, Random(seed))
        return directory


def cuts(recorded: Recorded, since: str, count: int, seed: int) -> Iterable[tuple[int, int, Style]]:
    """Yield random moments after a mark, with the styles in turn."""
    rng = Random(seed)
    first, last = recorded.at(since), len(recorded.records)
    for number in range(count):
        yield number, rng.randint(first, last), STYLES[number % len(STYLES)]


async def messages_of(directory: Path, options: LevelDBOptions) -> Rows:
    """Return all messages; tidying and reopening must not change them."""
    async with await LevelDBStore.open(directory, options) as store:
        found = await everything(store, MESSAGE)
        await store.tidy()
        assert await everything(store, MESSAGE) == found
    async with await LevelDBStore.open(directory, options) as store:
        assert await everything(store, MESSAGE) == found
    return found


def counts() -> list[object]:
    return [pytest.param(24, id="some"), pytest.param(1_000, marks=pytest.mark.torture, id="many")]


@pytest.mark.parametrize("count", counts())
async def test_a_power_cut_while_volumes_are_rewritten_loses_no_row_and_brings_none_back(tmp_path, made, count):
    recorded = Recorded("rewriting", tmp_path, made)
    kept = upkeep.rows(upkeep.STAYS, upkeep.ROWS, 4)
    whole = sorted([*upkeep.rows(upkeep.GOES, upkeep.ROWS), *kept])
    for number, moment, style in cuts(recorded, upkeep.WRITTEN, count, SEED):
        found = await messages_of(recorded.image(moment, style, tmp_path / str(number), number), upkeep.OPTIONS)
        assert found == kept or (moment < recorded.at(upkeep.DROPPED) and found == whole), (moment, style, len(found))


@pytest.mark.parametrize("count", counts())
async def test_a_power_cut_while_the_volume_of_version_0_1_is_swept_loses_no_row_and_brings_none_back(
    tmp_path, made, count
):
    recorded = Recorded("sweeping", tmp_path, made)
    kept = upkeep.rows(upkeep.STAYS, upkeep.ROWS)
    whole = sorted([*upkeep.rows(upkeep.GOES, upkeep.LARGE_ROWS), *kept])
    for number, moment, style in cuts(recorded, upkeep.WRITTEN, count, SEED):
        found = await messages_of(recorded.image(moment, style, tmp_path / str(number), number), LevelDBOptions())
        assert found == kept or (moment < recorded.at(upkeep.DROPPED) and found == whole), (moment, style, len(found))


@pytest.mark.parametrize("count", counts())
async def test_a_power_cut_while_a_directory_of_version_0_1_is_taken_over_loses_no_row(tmp_path, made, count):
    recorded = Recorded("taking_over", tmp_path, made)
    async with await LevelDBStore.open(recorded.disk.root) as store:
        expected = {table: await everything(store, table) for table in Table}
    assert all(expected.values())
    for number, moment, style in cuts(recorded, upkeep.WRITTEN, count, SEED):
        image = recorded.image(moment, style, tmp_path / str(number), number)
        async with await LevelDBStore.open(image) as store:
            assert {table: await everything(store, table) for table in Table} == expected, (moment, style)


async def test_a_disk_that_reports_syncs_it_did_not_make_is_detected_after_a_rewrite(tmp_path, made):
    """Shows that an image would reveal lost data: here the disk falsely reports syncs."""
    recorded = Recorded("rewriting", tmp_path, made)
    image = recorded.image(recorded.at(upkeep.TIDIED), "lost", tmp_path / "image", SEED, lies=".ldb")
    try:
        found = await messages_of(image, upkeep.OPTIONS)
    except Exception:  # noqa: BLE001  # a store that does not open has lost them, too
        found = []
    assert found != upkeep.rows(upkeep.STAYS, upkeep.ROWS, 4)
