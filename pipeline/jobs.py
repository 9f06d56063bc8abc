"""The jobs there are: where each stands and what it says of itself, so that listing them loads none."""

from __future__ import annotations

from typing import NamedTuple

from plainsong.cli.verb import CommandFailed, Exit
from protocol.errors import nearest


class Listed(NamedTuple):
    """A job as ``plainsong pipeline list`` shows it."""

    package: str
    """What is run: ``python -m PACKAGE``."""
    says: str
    """One line; the job's own help begins with the same."""


#: By name, in the order people meet them.
JOBS: dict[str, Listed] = {
    "archive": Listed("pipeline.archive", "Keep topics as Parquet files, beyond their expiry."),
    "replay": Listed("pipeline.replay", "Publish archived messages again, in order."),
    "audit": Listed("pipeline.audit", "Audit trail, usage registry and lineage of datasets."),
    "report": Listed("pipeline.report", "Queues, throughput, latencies and hold times, with plots."),
    "maintain": Listed("pipeline.maintain", "What waits to be cleaned, the plan; in HBase, the cleaning."),
}


def job_named(name: str) -> Listed:
    """The job of that name. Raises CommandFailed naming the nearest one."""
    if name not in JOBS:
        raise CommandFailed(f"there is no job {name[:60]!r}", hint=nearest(name, JOBS), code=Exit.USAGE)
    return JOBS[name]
