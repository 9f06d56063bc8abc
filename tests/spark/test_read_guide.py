"""The examples of reading in docs/spark.md run unchanged, and its tables name the actual options and columns."""

from __future__ import annotations

import re

from tables import Tables

from pyspark_plainsong.columns import COLUMNS, TRANSACTION_COLUMN
from pyspark_plainsong.options import _BATCH_READ, _CONNECTION, _READ, _STREAM_READ
from tests.daemon.harness import Daemon
from tests.documents import DOCUMENTS, ROOT

#: The section about writing, which follows, has a test of its own.
GUIDE = DOCUMENTS["docs/spark.md"].partition("\n## Writing")[0]
URL = "http://127.0.0.1:7420"


def test_the_examples_of_reading_do_what_they_show(spark, tmp_path, monkeypatch):
    blocks = re.findall(r"```(python|sql)\n(.*?)```", GUIDE, re.DOTALL)
    assert [kind for kind, _ in blocks] == [
        "python",
        "python",
        "python",
        "sql",
        "sql",
        "sql",
        "python",
        "python",
        "python",
    ]
    (of_readme,) = [
        code for code in re.findall(r"```python\n(.*?)```", DOCUMENTS["README.md"], re.DOTALL) if "spark." in code
    ]
    distribution = (ROOT / "etc/dist/spark/README.md").read_text(encoding="utf-8")
    (of_distribution,) = re.findall(r"```python\n(.*?)```", distribution, re.DOTALL)
    of_distribution = of_distribution.replace("subscribe=", 'namespace="demo", subscribe=')
    blocks += [("python", of_distribution), ("python", of_readme)]
    monkeypatch.chdir(tmp_path)
    with Daemon(tmp_path / "data") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        for topic in ("orders", "prices"):
            tables.publish(tables.create(topic), "first", "second")
        names = {"spark": spark}
        for kind, code in blocks:
            here = (
                code.replace(URL, tables.url)
                .replace("archive", f"{tmp_path}/a")
                .replace('checkpoint"', f'{tmp_path}/c"')
            )
            if kind == "sql":
                spark.sql(here)
            else:
                exec(compile(here, "docs/spark.md", "exec"), names)
        assert names["orders"].count() == 2
        assert spark.sql("SELECT * FROM orders").count() == 2
        assert spark.sql("SELECT * FROM lasting_orders").count() == 2
        spark.sql("DROP VIEW lasting_orders")
        spark.sql("DROP TABLE messages")
        assert sorted(bytes(row.payload) for row in names["payloads"].collect()) == [b"first", b"second"]
        assert names["newest"]["behind"] == {"demo:orders": 0}
        assert names["yesterday"].count() == 0
        assert names["back_then"].count() == 0
        assert sorted(row.text for row in spark.read.parquet(f"{tmp_path}/a").collect()) == ["first", "second"]
        spark.catalog.dropTempView("orders")


def first_cells(heading: str) -> set[str]:
    """Names in the first column of a section's tables."""
    section = GUIDE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_the_tables_have_every_option_and_every_column():
    assert first_cells("Options of reading") == {*_CONNECTION, *_READ, *_BATCH_READ, *_STREAM_READ}
    assert first_cells("Reading a table") == {*COLUMNS, TRANSACTION_COLUMN}
