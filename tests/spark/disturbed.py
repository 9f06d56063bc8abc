"""The data source with faults injected: in a task after its first stored batch, and before or after a commit.

The option ``disturb`` is JSON of a ``Disturbance``; the source is registered by value, so that it need not be
installed where tasks run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from pyspark_plainsong import DefaultSource

_PATIENCE_S = 600.0


@dataclass
class Disturbance:
    """The faults to inject."""

    folder: str
    """The folder of the files by which tasks and test signal each other."""
    task: str = ""
    """``raise``, ``exit``, ``kill`` (the executor) or ``wait`` (signal ``reached``, continue at ``go``)."""
    partition: int = 1
    attempts: int = 1
    """The number of attempts that fail."""
    before_commit: str = ""
    """``raise``, ``kill`` (the driver's JVM) or ``wait``."""
    after_commit: str = ""
    batch: int | None = None
    """The only micro-batch with faults; None: all of them."""

    def option(self) -> str:
        return json.dumps(asdict(self))

    def in_task(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. The fault is injected when the second one is requested, so the first is stored by then."""
        context = TaskContext.get()
        assert context is not None
        batch = context.getLocalProperty("streaming.sql.batchId")
        here = context.partitionId() == self.partition and self.concerns(None if batch is None else int(batch))
        hit = context.attemptNumber() < self.attempts
        for number, each in enumerate(batches):
            if number == 1 and here and hit:
                self.happen(self.task)
            elif number == 1 and here and self.task == "wait":
                self.wait_for("reached")  # a speculative copy of the task must not overtake it
                (Path(self.folder) / "copied").touch()
            yield each

    def concerns(self, batch: int | None) -> bool:
        return self.batch is None or self.batch == batch

    def happen(self, what: str) -> None:
        if what == "raise":
            raise RuntimeError("disturbed")
        if what == "exit":
            os._exit(7)
        if what == "kill":
            # Workers are forked by a process of Python that the JVM started.
            jvm = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
            if (Path(self.folder) / "killed").exists():
                return  # once is enough
            (Path(self.folder) / "killed").touch()
            os.kill(jvm, signal.SIGKILL)
            time.sleep(_PATIENCE_S)  # until the signal ends this process
        if what == "wait":
            (Path(self.folder) / "reached").touch()
            self.wait_for("go")

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not (Path(self.folder) / name).exists():
            if time.monotonic() >= deadline:
                (Path(self.folder) / "given-up").touch()
                raise RuntimeError(f"{name} was never signalled")
            time.sleep(0.02)


def register(spark: SparkSession) -> None:
    """Register the source in the session, and make this session the active one, where Spark looks sources up.

    A stream runs in a copy of its session, with the sources registered when it started, and that copy may still be the
    active session.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark.dataSource.register(DisturbedSource)
    session: Any = spark
    SparkSession._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)


class DisturbedBatch(DataSourceArrowWriter):
    def __init__(self, writer: DataSourceArrowWriter, disturbance: Disturbance) -> None:
        self.writer, self.disturbance = writer, disturbance

    def write(self, iterator: Iterator[Any]) -> Any:
        return self.writer.write(self.disturbance.in_task(iterator))

    def commit(self, messages: list[Any]) -> None:
        self.disturbance.happen(self.disturbance.before_commit)
        self.writer.commit(messages)
        self.disturbance.happen(self.disturbance.after_commit)

    def abort(self, messages: list[Any]) -> None:
        self.writer.abort(messages)


class DisturbedStream(DataSourceStreamArrowWriter):
    def __init__(self, writer: DataSourceStreamArrowWriter, disturbance: Disturbance) -> None:
        self.writer, self.disturbance = writer, disturbance

    def write(self, iterator: Iterator[Any]) -> Any:
        return self.writer.write(self.disturbance.in_task(iterator))

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        hit = self.disturbance.concerns(batchId)
        self.disturbance.happen(self.disturbance.before_commit if hit else "")
        self.writer.commit(messages, batchId)
        self.disturbance.happen(self.disturbance.after_commit if hit else "")

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        self.writer.abort(messages, batchId)


class DisturbedSource(DefaultSource):
    """``plainsong``, disturbed."""

    @classmethod
    def name(cls) -> str:
        return "disturbed"

    def __init__(self, options: dict[str, str]) -> None:
        own = dict(options)
        self.disturbance = Disturbance(**json.loads(own.pop("disturb")))
        super().__init__(own)

    def writer(self, schema: Any, overwrite: bool) -> DisturbedBatch:
        return DisturbedBatch(super().writer(schema, overwrite), self.disturbance)

    def streamWriter(self, schema: Any, overwrite: bool) -> DisturbedStream:  # noqa: N802
        return DisturbedStream(super().streamWriter(schema, overwrite), self.disturbance)
