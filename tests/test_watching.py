"""The shipped dashboard and alerts: the metrics that they use exist, their syntax is valid, and each alert fires."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.documents import DOCUMENTS, ROOT
from tests.metric_names import metrics_of_the_daemon, metrics_of_topics

ALERTS = ROOT / "etc/prometheus/alerts.yml"
#: In the second file rules are evaluated once per hour: three days of minutes take promtool eight seconds.
ALERTS_TESTS = [ROOT / f"etc/prometheus/{name}.yml" for name in ("alerts-test", "alerts-test-hours")]
DASHBOARD = ROOT / "etc/grafana/plainsong.json"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NOT TESTED: promtool is not installed (etc/tools fetches it)"
)


def named_metrics(text: str) -> set[str]:
    """Return all names that begin like our metrics, without the suffixes of histograms."""
    kinds = metrics_of_the_daemon()
    found = set()
    for name in re.findall(r"\b(?:plainsong|process)_\w+", text):
        base = re.sub(r"_(?:bucket|sum|count)$", "", name)
        found.add(base if kinds.get(base) == "histogram" else name)
    return found


def queries() -> list[str]:
    """Return every query of the dashboard, with values in place of its variables."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    values = {"$__rate_interval": "5m", "$instance": ".*", "$job": "plainsong", "$topic_job": "plainsong-topics"}
    for variable, value in values.items():
        targets = [each.replace(variable, value) for each in targets]
    assert not [each for each in targets if "$" in each]
    return targets


def promtool(*words: str) -> None:
    ran = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_metric_that_the_dashboard_and_the_alerts_name_exists():
    known = metrics_of_the_daemon().keys() | metrics_of_topics().keys()
    for text in (*queries(), *(file.read_text("utf-8") for file in (ALERTS, *ALERTS_TESTS, DASHBOARD))):
        assert named_metrics(text) <= known
    assert len(queries()) > 50


def test_the_dashboard_shows_every_metric_of_the_second_copy_that_changes_while_it_is_watched():
    shown = set().union(*map(named_metrics, queries()))
    of_the_copy = {name for name in metrics_of_the_daemon() if name.startswith("plainsong_replication_")}
    # Commit numbers have a meaning only relative to each other, which the lag shows.
    assert of_the_copy - shown == {
        "plainsong_replication_last_commit",
        "plainsong_replication_counted_commit",
        "plainsong_replication_oldest_timestamp_seconds",
    }


def test_every_alert_is_described_and_has_a_test_in_which_it_fires_and_one_in_which_it_does_not():
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8"))
    assert len(alerts) == len(set(alerts)) == 16
    described = re.findall(
        r"^\| `(\w+)` \| .+ \| (?:warning|critical) \|$", DOCUMENTS["docs/operations.md"], re.MULTILINE
    )
    assert described == alerts
    tests = "".join(file.read_text(encoding="utf-8") for file in ALERTS_TESTS)
    checked = re.findall(r"alertname: (\w+)\n +exp_alerts:(.*)", tests)
    assert {name for name, quiet in checked if not quiet} == set(alerts)
    assert {name for name, quiet in checked if quiet} == set(alerts)


@needs_promtool
def test_promtool_accepts_the_alerts_and_each_fires_when_it_should():
    promtool("check", "rules", str(ALERTS))
    promtool("test", "rules", *map(str, ALERTS_TESTS))


@needs_promtool
def test_every_query_of_the_dashboard_is_valid(tmp_path):
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", str(file))
