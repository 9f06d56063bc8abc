"""The benchmark runs from end to end and reports what it should; never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.profiles import QUICK
from bench.report import verdict_line
from bench.rounds import Row, Section, Spread, in_turns
from bench.scale_costs import Costs, derive
from bench.targets import TARGETS, judge
from tests import hbase_server, spark_session

ROOT = Path(__file__).parents[2]
#: Ten times what it takes.
PATIENCE_S = 1200
SECTIONS = (
    *("memory", "publish", "stream", "poll", "wake", "transactions", "delivery", "producers", "cleaning"),
    *("evenness", "growth", "spark", "hbase", "cluster", "front", "hostile", "backup", "secured", "chained"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of one quick run of everything."""
    lacking = spark_session.why_not() or hbase_server.why_not()
    if lacking is not None:
        pytest.skip(lacking)
    directory = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench", "--quick"]
    command += ["--report", str(directory / "report"), "--scratch", str(directory / "scratch")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((directory / "scratch").iterdir())
    return directory / "report", done.stdout


def results(report) -> dict:
    return json.loads((report[0] / "results.json").read_text(encoding="utf-8"))


def test_front_ends_are_measured_beside_one_process(report):
    for row in results(report)["sections"]["front"]["rows"]:
        assert {"÷ one process", "p50 ÷ one process", "CPU of the owner", "÷ by CPU", "feeds"} <= row["values"].keys()


def test_every_section_has_rows_with_spreads_in_order(report):
    sections = results(report)["sections"]
    assert tuple(sections) == SECTIONS
    for section in sections.values():
        assert section["rows"]
        for row in section["rows"]:
            for name, value in row["values"].items():
                assert value["low"] <= value["median"] <= value["high"]
                assert value["low"] >= 0 or name == "CPU more"  # a difference, of hardly anything in a quick run


def test_publishing_covers_its_matrix(report):
    rows = results(report)["sections"]["publish"]["rows"]
    cells = {(row["what"]["messages"], row["what"]["bytes"], row["what"]["connections"]) for row in rows}
    wanted = {(m, b, c) for m in QUICK.messages for b in QUICK.message_bytes for c in QUICK.connections}
    assert cells == wanted
    for row in rows:
        assert {"÷ bare", "÷ lane", "÷ raw request", "÷ raw group"} <= row["values"].keys()


def test_a_stream_is_measured_beside_single_requests_and_large_ones(report):
    rows = {row["what"]["what"]: row["values"] for row in results(report)["sections"]["stream"]["rows"]}
    assert set(rows) == {"stream", "stream, asyncio", "thousands", "singles"}
    for values in rows.values():
        assert {"messages/s", "÷ singles", "÷ thousands", "daemon µs", "client µs"} == values.keys()


def test_all_expired_rows_are_cleaned_and_their_space_comes_back(report):
    for row in results(report)["sections"]["cleaning"]["rows"]:
        assert row["what"]["rows"] == QUICK.expired_rows
        assert row["values"]["disk after MB"]["median"] < row["values"]["disk before MB"]["median"]


def test_spark_is_measured_beside_its_own_sources_and_sinks(report):
    rows = {row["what"]["what"]: row["values"] for row in results(report)["sections"]["spark"]["rows"]}
    assert {name: [column for column in values if column.startswith("÷")] for name, values in rows.items()} == {
        "read": ["÷ from Parquet"],
        "narrow": ["÷ from Parquet"],
        "write": ["÷ to null", "÷ to Parquet"],
        "micro-batch": ["÷ rate source"],
        "visible": [],
        "archive": ["÷ Parquet"],
    }


def test_hbase_is_measured_beside_raw_calls_for_the_same_messages(report):
    rows = {row["what"]["what"]: row["values"] for row in results(report)["sections"]["hbase"]["rows"]}
    ratios = {name: {column for column in values if column.startswith("÷")} for name, values in rows.items()}
    assert ratios["groups"] == ratios["store"] == {"÷ mutateRows"}
    assert ratios["single"] == {"÷ round trips"}
    assert ratios["poll frames"] == {"÷ scan", "÷ scan of rows"}
    assert rows["cost of a compare-and-set"]["log B"]["median"] > 100
    assert rows["cost of opening a topic"]["ms"]["median"] > 0


def test_several_instances_are_measured_at_work_forwarding_and_changing_hands(report):
    rows = {row["what"]["what"]: row["values"] for row in results(report)["sections"]["cluster"]["rows"]}
    assert {"forwarded single", "forwarded publish", "forwarded poll of 1000"} < rows.keys()
    assert rows["forwarded single"]["forwarder µs"]["median"] > 0
    assert rows["topics"]["daemons µs"]["median"] > 0
    leaving, killed = rows["hand-over, leaving"], rows["hand-over, killed"]
    assert 0 < leaving["median s"]["median"] <= leaving["worst s"]["median"] < killed["median s"]["median"]


def test_a_run_gives_the_costs_that_the_plan_reckons_with(report):
    derived = derive(results(report), "a test")
    assert derived.keys() == {field.name for field in fields(Costs)}
    assert all(cost["source"] for cost in derived.values())


def test_every_target_that_was_measured_has_a_verdict(report):
    verdicts = results(report)["targets"]
    # One is about 64 connections, which the quick profile leaves out; some are about peers, which have a run of their own.
    wanted = [t.says for t in TARGETS if "from 64" not in t.says and t.section in SECTIONS]
    assert [each["target"] for each in verdicts] == wanted
    assert all(each["reached"] in (True, False) for each in verdicts)
    assert all(each["target"] in report[1] for each in verdicts)


def test_the_report_has_a_table_for_each_section(report):
    text = (report[0] / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Benchmark\n")
    assert "## Targets" in text
    for section in results(report)["sections"].values():
        assert f"## {section['title']}\n" in text


def test_sides_are_measured_in_turns_and_compared_within_a_round():
    order = []

    def side(name: str, value: float):
        return lambda: order.append(name) or value * len(order)

    found = in_turns({"a": side("a", 1.0), "b": side("b", 2.0)}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert Spread.ratio(found["b"], found["a"]) == Spread(2.4, 1.5, 4.0)


@pytest.mark.parametrize(("ratio", "reached"), [(2.5, True), (2.49, False)])
def test_a_target_is_judged_by_its_worst_case(ratio, reached):
    section = Section("publish", "Publishing", "")
    for connections, value in ((1, 0.1), (16, ratio), (64, 9.0)):
        what = {"messages": 1, "bytes": 100, "connections": connections}
        section.rows.append(Row(what, {"÷ bare": Spread.of([value])}))
    (verdict,) = judge([section])
    assert verdict.reached is reached
    assert verdict.result == ratio
    assert verdict_line(verdict).startswith("reached" if reached else "MISSED")
