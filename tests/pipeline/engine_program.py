"""Reads a Delta table with another program: ``engine_program.py ENGINE FOLDER '[[DAY, VERSION], …]'``.

It runs in an environment without Plainsong, which proves that reading an archive needs none of our code. DAY and VERSION
may be null. For each pair it prints a line: a JSON array of ids (hex), payloads, and headers.
"""

from __future__ import annotations

import json
import sys
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

COLUMNS = "message_id, payload, headers"
Message = tuple[bytes, bytes, dict[str, str] | None]


class Arrow:
    """deltalake's own reader."""

    def __init__(self, folder: str, version: int | None) -> None:
        self.table = DeltaTable(folder, version=version)

    def rows(self, day: date | None) -> list[Message]:
        """Return the messages of all days or of one."""
        return rows_of(self.table.to_pyarrow_table(filters=None if day is None else [("day", "=", day)]))


class DataFusion(Arrow):
    """The SQL engine that deltalake includes."""

    def rows(self, day):
        query = QueryBuilder().register("orders", self.table)
        return rows_of(pa.table(query.execute(f"SELECT {COLUMNS} FROM orders{where(day)}").read_all()))


class Pandas(Arrow):
    def rows(self, day):
        found = self.table.to_pandas(filters=None if day is None else [("day", "=", day)])
        headers = [None if each is None else dict(each) for each in found["headers"]]
        return list(zip(found["message_id"], found["payload"], headers, strict=True))


class Polars(Arrow):
    def rows(self, day):
        import polars

        found = polars.scan_delta(self.table.table_uri, version=self.table.version())
        if day is not None:
            found = found.filter(polars.col("day") == day)
        return rows_of(found.select(*COLUMNS.split(", ")).collect().to_arrow())


class DuckDB(Arrow):
    """Over Arrow."""

    def rows(self, day):
        import duckdb

        with duckdb.connect() as connection:
            connection.register("orders", self.table.to_pyarrow_dataset())
            return self.selected(connection, "orders", day)

    def selected(self, connection, source, day):
        found = connection.sql(f"SELECT {COLUMNS} FROM {source}{where(day)}").fetchall()
        return [(id_, payload, None if pairs is None else dict(pairs)) for id_, payload, pairs in found]


class DuckDBDelta(DuckDB):
    """DuckDB's own reader of Delta, an extension."""

    def rows(self, day):
        import duckdb
        from duckdb_extensions import import_extension

        with duckdb.connect() as connection:
            import_extension("delta", con=connection)
            version = f", version = {self.table.version()}"
            return self.selected(connection, f"delta_scan('{self.table.table_uri}'{version})", day)


ENGINES = {each.__name__: each for each in (Arrow, DataFusion, Pandas, Polars, DuckDB, DuckDBDelta)}


def where(day: date | None) -> str:
    return "" if day is None else f" WHERE day = DATE '{day}'"


def rows_of(found: pa.Table) -> list[Message]:
    headers = [None if pairs is None else dict(to_pairs(pairs)) for pairs in found["headers"].to_pylist()]
    binary = [pc.cast(found[name], pa.binary()).to_pylist() for name in ("message_id", "payload")]
    return list(zip(*binary, headers, strict=True))


def to_pairs(pairs):
    """Return a map's pairs; some programs have a list of structures instead."""
    return [(each["key"], each["value"]) if isinstance(each, dict) else each for each in pairs]


def main(engine: str, folder: str, questions: str) -> None:
    for day, version in json.loads(questions):
        rows = ENGINES[engine](folder, version).rows(None if day is None else date.fromisoformat(day))
        print(json.dumps([[bytes(id_).hex(), bytes(payload).decode(), headers] for id_, payload, headers in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
