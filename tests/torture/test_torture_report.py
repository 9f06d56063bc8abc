"""The report of ``make torture``, and the checks of the soak's readers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.history.records import Anomaly
from tests.daemon.harness import Daemon
from tests.torture.__main__ import Report
from tests.torture.course import Verdict
from tests.torture.soak import Soak, look


def test_the_report_counts_what_was_done_and_names_what_is_wrong():
    report = Report(seed=7)
    report.add("one call fails with EIO", Verdict("EIO at call 3", 7, done=1, messages=1_200, polls=90))
    report.add("one call fails with EIO", Verdict("EIO at call 4", 7, done=1, messages=800, polls=10))
    bad = Verdict("every fault in turn", 8, done=2, made=Counter({"killed": 2}), messages=5, polls=1)
    bad.anomalies.append(Anomaly("lost", "a message"))
    bad.surprises.append("it ended by itself")
    report.add("faults in turn", bad)
    said = str(report)
    assert "| one call fails with EIO | 2 | 2 | 2,000 | 100 | 0 |\n" in said
    assert "| faults in turn | 2 | 1 | 5 | 1 | 2 |\n" in said
    assert "| **all** | | 3 | 2,005 | 101 | **2** |\n" in said
    assert "| killed | 2 |\n" in said
    assert "lost: a message" in said
    assert "unexplained: it ended by itself" in said


@pytest.fixture
def soak(tmp_path: Path) -> Soak:
    """A soak without a running daemon, whose reader has seen messages 0 and 1 of p."""
    soak = Soak(Daemon(tmp_path / "data"))
    look(soak, "r", None, b"a", b"p 0 x")
    look(soak, "r", b"a", b"b", b"p 1 x")
    assert soak.wrong == []
    return soak


def test_a_reader_of_the_soak_notices_a_gap_except_for_unknown_outcomes(soak):
    soak.doubtful = {("p", 2)}
    look(soak, "r", b"b", b"c", b"p 3 x")
    assert soak.wrong == []
    look(soak, "r", b"c", b"d", b"p 5 x")
    assert soak.wrong == ["r saw no p 4, of 1 before 5"]


def test_a_reader_of_the_soak_notices_repeats_and_wrong_order(soak):
    look(soak, "r", b"b", b"c", b"p 1 x")
    look(soak, "r", b"c", b"b", b"tx")
    assert soak.wrong == ["r saw p 1 after 1", "r saw 62 after 63"]
