"""The benchmark runs end to end and reports everything; speed is not tested."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from bench import __main__ as command
from bench.bodies import NewPages
from bench.peers.fetch import are_fetched
from bench.profiles import QUICK
from bench.report import verdict_line
from bench.rounds import Row, Section, Spread, in_turns
from bench.scale_costs import Costs, derive
from bench.targets import TARGETS, judge
from plainsong.protocol.codec import AVRO
from plainsong.protocol.ids import pack_id, unpack_id

SECTIONS = (
    *("memory", "publish", "stream", "poll", "wake", "transactions", "delivery", "producers", "cleaning"),
    *("evenness", "growth", "spark", "hbase", "cluster", "front", "hostile", "backup", "secured", "chained"),
    "copied",
)


def test_front_ends_are_compared_with_one_process(report):
    for row in report.results["sections"]["front"]["rows"]:
        assert {"÷ one process", "p50 ÷ one process", "CPU of the owner", "÷ by CPU", "feeds"} <= row["values"].keys()


def test_every_section_has_rows_with_spreads_in_order(report):
    sections = report.results["sections"]
    assert tuple(sections) == SECTIONS
    for section in sections.values():
        assert section["rows"]
        for row in section["rows"]:
            for name, value in row["values"].items():
                assert value["low"] <= value["median"] <= value["high"]
                assert value["low"] >= 0 or name == "CPU more"  # a difference, nearly zero in a quick run


def test_publishing_covers_its_matrix(report):
    rows = report.results["sections"]["publish"]["rows"]
    cells = {(row["what"]["messages"], row["what"]["bytes"], row["what"]["connections"]) for row in rows}
    wanted = {(m, b, c) for m in QUICK.messages for b in QUICK.message_bytes for c in QUICK.connections}
    assert cells == wanted
    for row in rows:
        assert {"÷ bare", "÷ listener", "÷ raw request", "÷ raw group"} <= row["values"].keys()


def test_readers_far_behind_request_page_after_page_and_no_page_twice():
    firsts = [pack_id(ts_ms, 0) for ts_ms in (1, 2, 3)]
    asked = NewPages("t", firsts, 8_000).take("avro", 5)
    polls = [(limit, AVRO.decode_poll(request.partition(b"\r\n\r\n")[2])) for limit, request in asked]
    behind = [(limit, poll.limit, unpack_id(poll.start_from)[:2], poll.inclusive) for limit, poll in polls]
    assert behind == [
        *((8_000, 8_000, (1, 0), True), (8_000, 8_000, (1, 7_999), False)),
        *((7_999, 7_999, (1, 0), True), (7_999, 7_999, (1, 7_998), False)),
        *((7_998, 7_998, (1, 0), True), (7_998, 7_998, (1, 7_997), False)),
    ]


def test_a_stream_is_compared_with_single_and_large_requests(report):
    rows = {row["what"]["what"]: row["values"] for row in report.results["sections"]["stream"]["rows"]}
    assert set(rows) == {"stream", "stream, asyncio", "thousands", "singles"}
    for values in rows.values():
        assert {"messages/s", "÷ singles", "÷ thousands", "daemon µs", "client µs"} == values.keys()


def test_all_expired_rows_are_cleaned_and_their_space_is_reclaimed(report):
    for row in report.results["sections"]["cleaning"]["rows"]:
        assert row["what"]["rows"] == QUICK.expired_rows
        assert row["values"]["disk after MB"]["median"] < row["values"]["disk before MB"]["median"]


def test_spark_is_compared_with_its_own_sources_and_sinks(report):
    rows = {row["what"]["what"]: row["values"] for row in report.results["sections"]["spark"]["rows"]}
    kafka = ["÷ Kafka"] if are_fetched("kafka", "spark") else []
    rows_of_kafka = ("read, Kafka", "write, Kafka", "write, Kafka, not synced") if kafka else ()
    assert {name: [column for column in values if column.startswith("÷")] for name, values in rows.items()} == {
        "read": ["÷ from Parquet", *kafka],
        "narrow": ["÷ from Parquet", *kafka],
        "write": ["÷ to null", "÷ to Parquet", *kafka],
        **{name: [] for name in rows_of_kafka},
        "micro-batch": ["÷ rate source"],
        "visible": [],
        "archive": ["÷ copy"],
        "archive, process": ["÷ copy"],
    }


def test_each_mode_of_the_second_copy_is_compared_with_none_and_a_standby_takes_over(report):
    rows = report.results["sections"]["copied"]["rows"]
    singles = [row for row in rows if row["what"]["what"] == "single"]
    assert [row["what"]["put ms"] for row in singles] == list(QUICK.put_ms)
    for row in singles:
        assert {"none", "async", "sync", "async ÷ none", "sync ÷ none", "p50 ms", "p99 ms"} == row["values"].keys()
    assert [row["what"]["what"] for row in rows[len(singles) :]] == ["take-over", "switch"]


def test_hbase_is_compared_with_raw_calls_for_the_same_messages(report):
    rows = {row["what"]["what"]: row["values"] for row in report.results["sections"]["hbase"]["rows"]}
    ratios = {name: {column for column in values if column.startswith("÷")} for name, values in rows.items()}
    assert ratios["groups"] == ratios["store"] == {"÷ mutateRows"}
    assert ratios["single"] == {"÷ round trips"}
    assert ratios["poll frames"] == {"÷ scan", "÷ scan of rows"}
    assert rows["cost of a compare-and-set"]["log B"]["median"] > 100
    assert rows["cost of opening a topic"]["ms"]["median"] > 0


def test_several_instances_are_measured_while_serving_forwarding_and_handing_over(report):
    rows = {row["what"]["what"]: row["values"] for row in report.results["sections"]["cluster"]["rows"]}
    assert {"forwarded single", "forwarded publish", "forwarded poll of 1000"} < rows.keys()
    assert rows["forwarded single"]["forwarder µs"]["median"] > 0
    assert rows["topics"]["daemons µs"]["median"] > 0
    leaving, killed = rows["hand-over, leaving"], rows["hand-over, killed"]
    assert 0 < leaving["median s"]["median"] <= leaving["worst s"]["median"] < killed["median s"]["median"]


def test_a_run_yields_the_costs_that_the_plan_uses(report):
    derived = derive(report.results, "a test")
    assert derived.keys() == {field.name for field in fields(Costs)}
    assert all(cost["source"] for cost in derived.values())


def test_every_measured_target_has_a_verdict(report):
    verdicts = report.results["targets"]
    # The quick profile has no load with 64 connections; peers have a separate run.
    wanted = [t.says for t in TARGETS if "from 64" not in t.says and t.section in SECTIONS]
    assert [each["target"] for each in verdicts] == wanted
    assert all(each["reached"] in (True, False) for each in verdicts)
    assert all(each["target"] in report.said for each in verdicts)


def test_the_report_has_a_table_for_each_section(report):
    text = (report.directory / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Benchmark\n")
    assert "## Targets" in text
    for section in report.results["sections"].values():
        assert f"## {section['title']}\n" in text


def test_a_named_section_is_measured_alone_and_written_to_standard_output(tmp_path, monkeypatch, capsys):
    def measured(profile, scratch, say):
        say(f"of memory, {profile.name}")
        return Section("memory", "Memory", "", [Row({"state": "all"}, {"resident MB": Spread.of([1.0])})])

    monkeypatch.setattr(command, "MEASUREMENTS", dict.fromkeys(command.MEASUREMENTS) | {"memory": measured})
    at = ["--report", str(tmp_path / "report"), "--scratch", str(tmp_path / "scratch")]
    monkeypatch.setattr("sys.argv", ["bench", "memory", "--quick", *at])
    command.main()
    said = capsys.readouterr().out
    assert said.startswith("of memory, quick\n")
    assert f"report: {tmp_path / 'report'}" in said
    assert list(json.loads((tmp_path / "report/results.json").read_text(encoding="utf-8"))["sections"]) == ["memory"]


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
