"""What a run of a job leaves for Prometheus: a text file, whole at every moment, for a node exporter to collect."""

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


class Known(NamedTuple):
    """A metric that a job may touch."""

    kind: type[Counter] | type[Gauge]
    says: str
    labels: tuple[str, ...] = ()
    """Besides ``job``, which all have."""


#: By name without the prefix. docs/pipeline.md describes each.
METRICS: dict[str, Known] = {
    "rows_total": Known(Counter, "Messages and rows handled by this run.", ("topic",)),
    "bytes_total": Known(Counter, "Bytes of payloads handled by this run.", ("topic",)),
    "batches_total": Known(Counter, "Batches, chunks or key ranges finished by this run.", ("topic",)),
    "dead_letters_total": Known(
        Counter, "Messages that this run could not read, and kept as dead letters.", ("topic",)
    ),
    "lag_seconds": Known(Gauge, "Age of the oldest message that waits for the job.", ("topic",)),
    "ttl_used_ratio": Known(Gauge, "That age, as a part of the topic's time to live.", ("topic",)),
    "warnings_total": Known(Counter, "Warnings of this run, by what they warn of.", ("warning",)),
    "last_start_time_seconds": Known(Gauge, "When the last run began, since 1970."),
    "last_success_time_seconds": Known(Gauge, "When a run last ended well, since 1970."),
    "run_seconds": Known(Gauge, "How long the last run took, or has taken so far."),
    "exit_code": Known(Gauge, "Exit code of the last run; -1 while it runs."),
}


class Metrics:
    """The metrics of one run.

    Args:
      job: its name, the label ``job`` of all of them.
      file: what to write; None: nothing is written.
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
        """Raise a counter of ``METRICS``. Raises KeyError: there is none of that name."""
        child = self._child(name, labels)
        assert isinstance(child, Counter), name
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of ``METRICS``. Raises KeyError: there is none of that name."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge), name
        child.set(value)

    def text(self) -> str:
        """All of them in Prometheus text."""
        self.set("run_seconds", time.time() - self._began_s)
        return generate_latest(self._registry).decode()

    def write(self) -> None:
        """Replace the file, if one is wanted. Raises OSError: it is as it was."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, since a rename is atomic within a file system only; the collector reads *.prom alone.
        beside = self._file.with_name(f".{self._file.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.text(), encoding="utf-8")
            beside.replace(self._file)
        finally:
            beside.unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Say how the run ended, and write. Raises OSError."""
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
        """What an alert looks at must outlive runs that fail."""
        if self._file is None:
            return
        with suppress(OSError, ValueError):
            for family in text_string_to_metric_families(self._file.read_text(encoding="utf-8")):
                for sample in family.samples:
                    if sample.name == f"{PREFIX}last_success_time_seconds" and sample.labels.get("job") == self._job:
                        self.set("last_success_time_seconds", sample.value)
