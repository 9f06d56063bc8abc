"""Metrics of a job as a Prometheus text file for a node exporter, replaced atomically."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "plainsong_pipeline_"


class JobMetric(NamedTuple):
    """A metric that jobs may change."""

    kind: type[Counter] | type[Gauge]
    says: str
    labels: tuple[str, ...] = ()
    """Labels in addition to ``job``, which all metrics have."""


#: By name without the prefix. docs/pipeline.md describes each.
METRICS: dict[str, JobMetric] = {
    "rows_total": JobMetric(Counter, "Messages and rows handled by this run.", ("topic",)),
    "bytes_total": JobMetric(Counter, "Bytes of payloads handled by this run.", ("topic",)),
    "batches_total": JobMetric(Counter, "Batches, chunks or key ranges finished by this run.", ("topic",)),
    "dead_letters_total": JobMetric(
        Counter, "Messages that this run could not read and saved as dead letters.", ("topic",)
    ),
    "lag_seconds": JobMetric(Gauge, "Age of the oldest message waiting for the job.", ("topic",)),
    "ttl_used_ratio": JobMetric(Gauge, "That age, as a fraction of the topic's time to live.", ("topic",)),
    "warnings_total": JobMetric(Counter, "Warnings of this run, by kind.", ("warning",)),
    "last_start_time_seconds": JobMetric(Gauge, "Start time of the last run, in seconds since 1970."),
    "last_success_time_seconds": JobMetric(Gauge, "End time of the last successful run, in seconds since 1970."),
    "run_seconds": JobMetric(Gauge, "Duration of the last run, or of the current one so far."),
    "exit_code": JobMetric(Gauge, "Exit code of the last run; -1 while it is running."),
}


class JobMetrics:
    """The metrics of one run.

    Args:
      job: the job's name; every metric has it as its label ``job``.
      file: the file to write; None writes nothing.
    """

    def __init__(self, job: str, file: Path | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._job = job
        self._file = file
        self._registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge] = {}
        self._began_s = time.time()
        self._keep_last_success()
        self.set("last_start_time_seconds", self._began_s)
        self.set("exit_code", -1)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Increase a counter of ``METRICS``. Raises KeyError: ``METRICS`` has no such name."""
        child = self._child(name, labels)
        assert isinstance(child, Counter), name
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of ``METRICS``. Raises KeyError: ``METRICS`` has no such name."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), name
        child.set(value)

    def text(self) -> str:
        """Return all metrics as Prometheus text."""
        self.set("run_seconds", time.time() - self._began_s)
        return generate_latest(self._registry).decode()

    def write(self) -> None:
        """Replace the file. Raises OSError: the file is unchanged."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic only within a file system. The collector reads only *.prom files.
        beside = self._file.with_name(f".{self._file.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.text(), encoding="utf-8")
            beside.replace(self._file)
        finally:
            beside.unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Record the exit code and write the file. Raises OSError."""
        self.set("exit_code", code)
        if code == 0:
            self.set("last_success_time_seconds", time.time())
        self.write()

    def _child(self, name: str, labels: dict[str, str]) -> Counter | Gauge:
        known = METRICS[name]
        metric = self._made.get(name)
        if metric is None:
            metric = known.kind(PREFIX + name, known.says, ("job", *known.labels), registry=self._registry)
            self._made[name] = metric
        return metric.labels(job=self._job, **labels)

    def _keep_last_success(self) -> None:
        # Alerts look at the last success: a run that fails must not take it out of the file.
        if self._file is None:
            return
        with suppress(OSError, ValueError):
            for family in text_string_to_metric_families(self._file.read_text(encoding="utf-8")):
                for sample in family.samples:
                    if sample.name == f"{PREFIX}last_success_time_seconds" and sample.labels.get("job") == self._job:
                        self.set("last_success_time_seconds", sample.value)
