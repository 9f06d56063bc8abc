"""A separate driver that writes, for tests that kill it: ``writing_program.py '<JSON of a Program>'``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topics
from disturbed import Disturbance, register

from tests.daemon.harness import eventually
from tests.spark_session import CHECKPOINTS, MASTER, SETTINGS, own_settings, spark_environ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

_PATIENCE_S = 600.0
_PATH = os.pathsep.join((str(Path(__file__).parents[2]), str(Path(__file__).parent)))


@dataclass
class Save:
    """One of the program's streams or batches."""

    options: dict[str, str]
    disturbance: Disturbance
    rows: int = 0
    """Number of rows of a batch; 0 for a stream, which reads the files in ``disturbance.folder``/in."""


@dataclass
class Program:
    """The program's saves, and the settings of its session."""

    saves: list[Save]
    master: str = MASTER
    settings: dict[str, str] = field(default_factory=dict)

    def run(self) -> int:
        """Run the program in a process and return its exit code."""
        with self._process() as process:
            return process.wait(_PATIENCE_S)

    def run_and_kill(self) -> None:
        """Run the program until all its saves wait, and kill it with its child processes."""
        reached = [Path(save.disturbance.folder) / "reached" for save in self.saves]
        with self._process() as process:
            eventually(
                "all saves wait, or the program ended",
                lambda: process.poll() is not None or all(map(Path.exists, reached)),
                _PATIENCE_S,
            )
            assert process.poll() is None
        for each in reached:
            each.unlink()

    @contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(self))],
            env={**own_settings(os.environ), **spark_environ(), "PYTHONPATH": _PATH},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(asked: dict[str, Any]) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("plainsong deaths").master(asked["master"])
    settings = {**SETTINGS, "spark.sql.execution.arrow.maxRecordsPerBatch": "250", **asked["settings"]}
    del settings[CHECKPOINTS]  # a killed driver must leave checkpoints as a user's driver would
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    streams = [started(spark, save) for save in asked["saves"] if not save["rows"]]
    for save in asked["saves"]:
        if save["rows"]:
            frame = topics.numbers(spark, save["rows"])
            frame.write.format("disturbed").options(**options_of(save)).mode("append").save()
    for query in streams:
        query.awaitTermination()
    spark.stop()


def started(spark: SparkSession, save: dict[str, Any]) -> StreamingQuery:
    """Start a stream, which runs concurrently with the batches."""
    folder = save["disturbance"]["folder"]
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(f"{folder}/in")
    stream = lines.selectExpr("value as payload").writeStream.format("disturbed").options(**options_of(save))
    return stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()


def options_of(save: dict[str, Any]) -> dict[str, str]:
    return {**save["options"], "disturb": json.dumps(save["disturbance"])}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
