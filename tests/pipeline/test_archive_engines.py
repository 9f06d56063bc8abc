"""Programs that read Delta tables can read an archive: each message once, and nothing of an uncommitted batch.

They run in an environment of their own (``requirements-engines.lock``).
"""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pyspark_plainsong.pipeline.archive import archiving
from pyspark_plainsong.pipeline.archive.layout import Range
from pyspark_plainsong.pipeline.job import Run
from scripts.locked import installed
from tests.daemon.harness import clean_environ
from tests.pipeline.archives import BATCHES, DAY_MS, HOUR_MS, TIMES, after, id_at, messages, two_days
from tests.pipeline.engine_program import ENGINES

PROGRAM = Path(__file__).with_name("engine_program.py")
WEEK_MS = 7 * 86_400_000
#: The second day, which is not over yet.
DAY = date(2026, 2, 1)


@pytest.fixture(scope="module")
def python():
    """The interpreter of the environment with all engines."""
    found = installed("engines")
    if found is None:
        pytest.skip(
            "NOT TESTED: pandas, Polars and DuckDB with an archive: requirements-engines.lock was not installed"
        )
    return found


@pytest.fixture(scope="module")
def folder(spark, tmp_path_factory):
    """The table of an archive with one compacted day; another batch was written but not committed."""
    archive = two_days(spark, tmp_path_factory.mktemp("engines") / "archive")
    archiving.compact(Run("archive", spark=spark), [], archive.root, compression="zstd", keep_ms=WEEK_MS)
    end = archive.table.end(1)
    later = [TIMES[-1] + HOUR_MS * hour for hour in range(1, 4)]
    archive.writer.write(messages(spark, later), Range(end, after(id_at(later[-1]))))
    return Path(archive.root) / "default/orders"


def expected(times_ms):
    number = {time_ms: at for batch in BATCHES for at, time_ms in enumerate(batch)}
    for time_ms in times_ms:
        at = number[time_ms]
        yield [id_at(time_ms).hex(), f"payload {time_ms}", {"number": str(at)} if at % 2 else None]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reads_every_message_once_a_day_alone_and_an_earlier_version_as_it_was(engine, python, folder):
    versions = [each["version"] for each in DeltaTable(folder).history() if "plainsong" in each]
    questions = {
        (None, None): TIMES,
        (DAY.isoformat(), None): [time_ms for time_ms in TIMES if time_ms >= DAY_MS + 24 * HOUR_MS],
        (None, versions[-2]): [*BATCHES[0], *BATCHES[1]],
    }
    command = [python, PROGRAM, engine, folder, json.dumps(list(questions))]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (asked, times_ms), line in zip(questions.items(), done.stdout.splitlines(), strict=True):
        assert sorted(json.loads(line)) == list(expected(times_ms)), asked
