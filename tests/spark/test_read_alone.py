"""Executors need only one zip, pyspark, pyarrow and the standard library."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tables import READ, Tables

from pyspark_plainsong.source import DefaultSource, Lacking
from tests.daemon.harness import ROOT, Daemon
from tests.patience import PATIENCE_S

#: Reads as a task does, with all other packages blocked from import.
TASK = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"msgpack", "fastavro", "click", "broker", "storage", "actors", "pandas", "numpy", "httpcore2"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Nothing())
import pyspark_plainsong
from pyspark_plainsong.readers import BatchReader
from pyspark_plainsong.options import ReadOptions
from pyspark_plainsong.columns import read_schema

assert pyspark_plainsong.__file__.startswith(sys.argv[2]), pyspark_plainsong.__file__
options = ReadOptions.parse({"url": sys.argv[1], "namespace": "demo", "subscribe": "alone"}, streaming=False)
reader = BatchReader(options, read_schema(include_transaction=True))
for part in reader.partitions():
    for batch in reader.read(part):
        for row in batch.to_pylist():
            print(row["payload"].decode(), row["routing_key"], row["headers"])
own = {name for name in sys.modules if name.partition(".")[0] == "plainsong"}
assert own == {"plainsong", "plainsong.protocol", "plainsong.protocol.frames"}, own
assert not [name for name in sys.modules if name.startswith("pyspark_plainsong.pipeline")]
"""


def packed(folder: Path) -> Path:
    """Pack the minimum that executors need; ``plainsong pipeline zip`` adds the rest for drivers."""
    archive = folder / "plainsong.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [
            *sorted((ROOT / "pyspark_plainsong").glob("*.py")),
            *(ROOT / "plainsong" / name for name in FRAMES),
        ]:
            file.write(path, path.relative_to(ROOT))
    return archive


FRAMES = ("__init__.py", "protocol/__init__.py", "protocol/frames.py")


def test_a_task_reads_attributes_with_one_zip_and_nothing_else_of_ours(tmp_path):
    archive = packed(tmp_path)
    with Daemon(tmp_path / "data") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        messages = [{"payload": "x", "attributes": {"routingKey": "k", "a": "b"}}, "y"]
        tables.ask("POST", f"{READ}/{tables.create('alone')}/publish", {"messages": messages})
        done = subprocess.run(
            [sys.executable, "-c", TASK, tables.url, str(archive)],
            env={**os.environ, "PYTHONPATH": str(archive)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["x k [('a', 'b')]", "y None None"]


def test_a_missing_pyarrow_is_reported_with_the_interpreter_that_lacks_it(monkeypatch):
    """The error is raised when Spark creates the source, before Spark imports pyarrow itself."""
    monkeypatch.setattr("pyspark_plainsong.source.find_spec", lambda name: None)
    with pytest.raises(Lacking, match=f"run {sys.executable}, which has no pyarrow.*PYSPARK_PYTHON"):
        DefaultSource({})
