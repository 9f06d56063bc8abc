"""Finds everything that is wrong with a history: a pure function over the clients' records."""

from __future__ import annotations

from tests.cluster.history.of_order import of_producers, of_time
from tests.cluster.history.of_reads import of_reads
from tests.cluster.history.of_writes import of_logs, of_transactions, of_writes
from tests.cluster.history.outcome import Outcome
from tests.cluster.history.records import Anomaly, History

CHECKS = (of_logs, of_writes, of_transactions, of_time, of_producers, of_reads)


def check(history: History) -> list[Anomaly]:
    """Return all anomalies.

    The topics must have been read after all work had ended, and every transaction must be decided.
    """
    outcome = Outcome(history)
    return [anomaly for of in CHECKS for anomaly in of(outcome)]


def verdict(history: History) -> str:
    """Return a summary of the history, and its first anomalies."""
    found = check(history)
    lines = [history.summary(), f"{len(found)} anomalies", *(f"{kind}: {text}" for kind, text in found[:20])]
    return "\n".join(lines)
