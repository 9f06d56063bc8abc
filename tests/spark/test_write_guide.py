"""The examples of writing in docs/spark.md run unchanged, and its tables name the actual options and columns."""

from __future__ import annotations

import re
from collections import Counter

from topics import Topics

from pyspark_plainsong.columns import _KNOWN
from pyspark_plainsong.options import _BATCH_WRITE, _WRITE
from tests.daemon.harness import Daemon
from tests.documents import DOCUMENTS

GUIDE = DOCUMENTS["docs/spark.md"].partition("\n## Writing a table")[2].partition("\n## Where Spark runs Python")[0]
URL = "http://127.0.0.1:7420"


def test_the_examples_of_writing_do_what_they_show(spark, tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    plain, named, ordered, stream = blocks
    with Daemon(tmp_path / "data") as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        for topic in ("results", "copies"):
            topics.create(topic)
        names = {"spark": spark}
        for code in (plain, named, ordered, stream):
            here = code.replace(URL, topics.url).replace('"copying"', f'"{tmp_path}/copying"')
            exec(compile(here, "docs/spark.md", "exec"), names)
        assert topics.counted("results") == Counter({b"first": 3, b"second": 3})
        assert topics.payloads("results")[-2:] == [b"first", b"second"]
        assert topics.counted("copies") == Counter({b"first": 3, b"second": 3})


def first_cells(table: str) -> set[str]:
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    return set(rows)


def test_the_tables_have_every_option_and_every_column() -> None:
    columns, _, rest = GUIDE.partition("\n## Writing a stream")
    options = rest.partition("\n## Options of writing")[2].partition("\n## ")[0]
    assert first_cells(columns) == set(_KNOWN)
    assert first_cells(options) == {*_WRITE, *_BATCH_WRITE}
