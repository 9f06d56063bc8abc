"""Programs that read Delta tables can read an archive: each message once, and no uncommitted batch."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder

from pyspark_plainsong.pipeline.archive import archiving
from pyspark_plainsong.pipeline.archive.layout import Range
from pyspark_plainsong.pipeline.job import Run
from tests.pipeline.archives import BATCHES, DAY_MS, HOUR_MS, TIMES, after, id_at, messages, two_days

WEEK_MS = 7 * 86_400_000
#: The second day, which is not over yet.
DAY = date(2026, 2, 1)


@pytest.fixture(scope="module")
def folder(spark, tmp_path_factory):
    """The table of an archive with one compacted day; another batch was written but not committed."""
    archive = two_days(spark, tmp_path_factory.mktemp("engines") / "archive")
    archiving.compact(Run("archive", spark=spark), [], archive.root, compression="zstd", keep_ms=WEEK_MS)
    end = archive.table.end(1)
    later = [TIMES[-1] + HOUR_MS * hour for hour in range(1, 4)]
    archive.writer.write(messages(spark, later), Range(end, after(id_at(later[-1]))))
    return Path(archive.root) / "default/orders"


class Arrow:
    """deltalake's own reader."""

    def __init__(self, folder: Path, version: int | None = None) -> None:
        self.table = DeltaTable(folder, version=version)

    def rows(self, day: date | None = None) -> list[tuple[bytes, bytes, dict[str, str] | None]]:
        """Return ids, payloads and headers, of all days or of one."""
        found = self.table.to_pyarrow_table(filters=None if day is None else [("day", "=", day)])
        return rows_of(found)


class DataFusion(Arrow):
    """The SQL engine that deltalake includes."""

    def rows(self, day=None):
        where = "" if day is None else f" WHERE day = '{day}'"
        query = QueryBuilder().register("orders", self.table)
        found = query.execute(f"SELECT message_id, payload, headers FROM orders{where}")
        return rows_of(pa.table(found.read_all()))


class Pandas(Arrow):
    def rows(self, day=None):
        found = self.table.to_pandas(filters=None if day is None else [("day", "=", day)])
        headers = [None if each is None else dict(each) for each in found["headers"]]
        return list(zip(found["message_id"], found["payload"], headers, strict=True))


class Polars(Arrow):
    def rows(self, day=None):
        import polars

        found = polars.scan_delta(self.table.table_uri, version=self.table.version())
        if day is not None:
            found = found.filter(polars.col("day") == day)
        return rows_of(found.select("message_id", "payload", "headers").collect().to_arrow())


class DuckDB(Arrow):
    """DuckDB, which reads the table through Arrow."""

    def rows(self, day=None):
        import duckdb

        with duckdb.connect() as connection:
            connection.register("orders", self.table.to_pyarrow_dataset())
            return self.selected(connection, "orders", day)

    def selected(self, connection, source, day):
        where = "" if day is None else f" WHERE day = DATE '{day}'"
        found = connection.sql(f"SELECT message_id, payload, headers FROM {source}{where}").fetchall()
        return [(id_, payload, None if pairs is None else dict(pairs)) for id_, payload, pairs in found]


class DuckDBDelta(DuckDB):
    """DuckDB's own reader of Delta, an extension."""

    def rows(self, day=None):
        import duckdb
        from duckdb_extensions import import_extension

        with duckdb.connect() as connection:
            import_extension("delta", con=connection)
            version = f", version = {self.table.version()}"
            return self.selected(connection, f"delta_scan('{self.table.table_uri}'{version})", day)


def rows_of(found: pa.Table) -> list[tuple[bytes, bytes, dict[str, str] | None]]:
    headers = [None if pairs is None else dict(to_pairs(pairs)) for pairs in found["headers"].to_pylist()]
    binary = [pc.cast(found[name], pa.binary()).to_pylist() for name in ("message_id", "payload")]
    return list(zip(*binary, headers, strict=True))


def to_pairs(pairs):
    """Return a map's pairs; some programs have a list of structures instead."""
    return [(each["key"], each["value"]) if isinstance(each, dict) else each for each in pairs]


NEEDS = {Pandas: "pandas", Polars: "polars", DuckDB: "duckdb", DuckDBDelta: "duckdb_extensions"}


@pytest.fixture(params=[Arrow, DataFusion, Pandas, Polars, DuckDB, DuckDBDelta], ids=lambda each: each.__name__)
def engine(request):
    needed = NEEDS.get(request.param)
    if needed is not None:
        pytest.importorskip(needed, reason=f"NOT TESTED: {needed} with an archive: pip install {needed}")
    return request.param


def expected(times_ms):
    number = {time_ms: at for batch in BATCHES for at, time_ms in enumerate(batch)}
    for time_ms in times_ms:
        at = number[time_ms]
        yield id_at(time_ms), f"payload {time_ms}".encode(), {"number": str(at)} if at % 2 else None


def sorted_rows(rows):
    return sorted(rows, key=lambda row: row[0])


def test_every_message_is_read_once_with_all_its_fields(engine, folder):
    assert sorted_rows(engine(folder).rows()) == list(expected(TIMES))


def test_one_day_can_be_read_alone(engine, folder):
    there = [time_ms for time_ms in TIMES if time_ms >= DAY_MS + 24 * HOUR_MS]
    assert sorted_rows(engine(folder).rows(DAY)) == list(expected(there))


def test_an_earlier_version_is_read_as_it_was(engine, folder):
    versions = [each["version"] for each in DeltaTable(folder).history() if "plainsong" in each]
    assert sorted_rows(engine(folder, versions[-2]).rows()) == list(expected([*BATCHES[0], *BATCHES[1]]))
