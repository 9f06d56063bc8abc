"""Sync calls that the kernel receives: one for each commit, and the error if one fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from storage.leveldb import LevelDBStore
from tests.storage.contract import everything

ROOT = Path(__file__).parents[2]
COMMITS = 30

CHILD = """
import sys, trio
from pathlib import Path
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.names import TopicName
from storage.base import StoreError
from storage.leveldb import LevelDBStore

async def main():
    async with await LevelDBStore.open(Path(sys.argv[1])) as store:
        for number in range(int(sys.argv[2])):
            try:
                claim = await store.claim(TopicName("ns", "topic"))
                await store.write([put_one(Table.MESSAGE, b"%04d" % number, b"v")], claim=claim)
                print("acknowledged", number)
            except StoreError as error:
                print("unknown", number, error)

trio.run(main)
"""


def traced(directory: Path, *injected: str) -> tuple[list[str], str]:
    """Return the output of a child that makes ``COMMITS`` commits one by one, and its fdatasync calls."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("NOT TESTED: what the kernel syncs, since there is no strace")
    log = directory.with_suffix(".strace")
    command = [strace, "-f", "-y", "-o", str(log), "-e", "trace=fdatasync", *injected]
    command += [sys.executable, "-c", CHILD, str(directory), str(COMMITS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"NOT TESTED: what the kernel syncs, since tracing is not permitted: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), log.read_text()


def test_every_acknowledged_commit_was_synced_by_a_call_of_its_own(tmp_path):
    said, trace = traced(tmp_path / "data")
    assert said == [f"acknowledged {number}" for number in range(COMMITS)]
    assert len(re.findall(r"fdatasync\(\d+<[^>]*\.log>", trace)) >= COMMITS


@pytest.mark.parametrize("when", ["18", "18..24", "20+9"])
async def test_after_a_sync_that_fails_the_store_opens_again_and_has_everything_acknowledged(tmp_path, when):
    # The first fourteen calls open the store; the eighteenth belongs to a commit. Reopening may hit the next fault.
    said, _ = traced(tmp_path / "data", "-e", f"inject=fdatasync:error=EIO:when={when}")
    acknowledged = {int(line.split()[1]) for line in said if line.startswith("acknowledged")}
    unknown = {int(line.split()[1]) for line in said if line.startswith("unknown")}
    assert unknown
    assert acknowledged
    async with await LevelDBStore.open(tmp_path / "data") as store:
        there = {int(key) for key, _ in await everything(store)}
    assert acknowledged <= there <= acknowledged | unknown
