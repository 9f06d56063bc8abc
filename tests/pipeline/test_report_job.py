"""A report on a real daemon's topics has the same figures as a computation in Python, and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from plainsong import Client
from plainsong.cli.command import CommandFailed
from plainsong.cli.connection import Where
from plainsong.positions import now_ms
from plainsong.protocol.ids import unpack_id
from pyspark_plainsong.pipeline.archive.archiving import append
from pyspark_plainsong.pipeline.job import Run
from pyspark_plainsong.pipeline.report.command import ReportOptions, report_on, topics_of
from pyspark_plainsong.pipeline.report.facts import Grid, TopicFacts, grid_over
from pyspark_plainsong.pipeline.report.sources import Decision
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually
from tests.patience import SPARK_PATIENCE_S
from tests.pipeline import reported
from tests.pipeline.reported import Row, Topic


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("report") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon):
    with Client("http://{}:{}".format(*daemon.address), namespace="shop") as made:
        fill(made)
        yield made


@pytest.fixture
def run(daemon, spark) -> Run:
    return Run("report", Where(("http://{}:{}".format(*daemon.address),), "shop"), spark=spark)


def fill(client: Client) -> None:
    """Fill two topics with plain messages and with transactions of every outcome; one transaction stays open."""
    for topic in ("orders", "parcels"):
        client.create_topic(topic, ttl_s=3600)
    client.publish("orders", [b"one", b"two"])
    for number, fate in enumerate(["commit", "abort", "commit", "invalidate"]):
        transaction = client.transactions.begin(client_id=f"client-{number}")
        client.publish("orders", [b"in %d" % number] * (number + 1), transaction=transaction)
        client.store("parcels", [b"stored"] * 3, transaction=transaction)
        client.publish("parcels", [], transaction=transaction)
        client.publish("orders", [b"behind it"])
        getattr(client.transactions, fate)(transaction)
    still_open = client.transactions.begin(client_id="slow", type="long")
    client.publish("parcels", [b"x"], transaction=still_open)
    client.publish("parcels", [b"waits"])


def since_the_beginning(topics: list[TopicFacts]) -> Grid:
    return grid_over(min(each.known_from_ms for each in topics) - 1000, now_ms() + 1000)


def rows_of(client: Client, topic: str) -> list[Row]:
    rows = []
    for seen in client.admin.messages(topic, limit=1000):
        pointer = abs(seen.write_pointer or 0) * (-1 if seen.state == "rolled-back" else 1)
        written = unpack_id(seen.id).write_ts_ms or None
        rows.append(Row(f"shop:{topic}", bytes(seen.id), seen.publish_time_ms, written, len(seen.payload), pointer))
    return rows


def decisions_of(client: Client, rows: list[Row]) -> list[Decision]:
    found = []
    for pointer in {abs(row.pointer) for row in rows} - {0}:
        told = client.transactions.get(pointer)
        found.append(Decision(pointer, told.id, told.client_id, told.state, told.started_ms, told.decided_ms))
    return found


@pytest.mark.usefixtures("adaptive")
def test_the_figures_match_the_topics(client, run, tmp_path):
    wanted = ReportOptions(("orders", "parcels"), parquet=str(tmp_path / "tables"))
    topics = topics_of(run, wanted)
    grid = since_the_beginning(topics)
    made = report_on(run, wanted, topics, grid)
    rows = rows_of(client, "orders") + rows_of(client, "parcels")
    decisions = decisions_of(client, rows)
    fate = {each.pointer: each.state for each in decisions}
    readable = [row for row in rows if row.pointer >= 0 and fate.get(row.pointer) not in ("aborted", "invalid")]
    plain = [Topic(each.topic, each.ttl_ms, each.known_from_ms, each.whole) for each in topics]
    assert made.messages == len(rows)
    assert {tuple(row.values()) for row in made.sizes} == reported.sizes(readable, plain, grid)
    assert {tuple(row.values()) for row in made.rates} == reported.rates(rows, plain, grid)
    expected = reported.visible(rows, decisions)
    for row in made.latency:
        waits = [expected[each.message_id] for each in rows if each.topic == row["topic"]]
        assert row["messages"] == sum(known == "exact" for _, known in waits)
        assert row["max_ms"] == max(waited_ms or 0 for waited_ms, _ in waits)
        assert row["waiting"] == sum(known == "waiting" for _, known in waits)
        assert row["unknown"] == row["at_least"] == 0
    waiting = {row["topic"]: row["waiting"] for row in made.latency}
    assert waiting == {"shop:orders": 0, "shop:parcels": 2}
    held = {(row["client"], row["topic"]): row for row in made.holds}
    assert len(held) == 9
    assert held["slow", "shop:parcels"]["state"] == "in_progress"
    for row in made.holds:
        told = next(each for each in decisions if each.transaction == row["transaction"])
        until = told.decided_ms or made.made_ms
        assert row["open_ms"] == until - told.begun_ms >= row["held_ms"] >= 0
    assert {row["topic"] for row in made.stored} == {"shop:parcels"}
    assert sorted(os.listdir(tmp_path / "tables")) == ["holds", "latency", "latency_steps", "rates", "sizes", "stored"]
    assert run.spark.read.parquet(str(tmp_path / "tables" / "rates")).count() == len(made.rates)
    assert not made.notes
    (tmp_path / "tables" / "holds" / "notes.txt").touch()
    with pytest.raises(CommandFailed, match=r"tables/holds would be replaced, but it holds files"):
        report_on(run, wanted, topics, grid)


def test_young_topics_are_known_completely(client, run):
    assert all(each.whole and each.generation == 1 for each in topics_of(run, ReportOptions()))


def test_transactions_over_the_query_limit_are_reported(client, run):
    wanted = ReportOptions(("orders",), max_pointers=1)
    topics = topics_of(run, wanted)
    made = report_on(run, wanted, topics, since_the_beginning(topics))
    assert "3 older write pointers" in made.notes[0]
    assert made.latency[0]["unknown"] > 0


def test_a_missing_topic_is_reported_with_the_nearest_name(client, run):
    with pytest.raises(CommandFailed, match="order"):
        topics_of(run, ReportOptions(("order",)))


def test_a_dry_run_reports_what_would_be_read_and_starts_no_spark(client, daemon):
    url = "http://{}:{}".format(*daemon.address)
    line = [str(PLAINSONG), "pipeline", "run", "report", "--url", url, "-n", "shop", "--dry-run", "--json"]
    # Without Java, starting Spark would fail.
    environ = {**clean_environ(), "PATH": "", "JAVA_HOME": ""}
    done = subprocess.run(line, capture_output=True, text=True, env=environ, timeout=SPARK_PATIENCE_S, check=True)
    (plan,) = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "plan"]
    assert plan["topics"] == ["shop:orders", "shop:parcels"]
    assert plan["endMs"] - plan["startMs"] == 86_400_000


@pytest.mark.parametrize("words", [["--offline"], ["--offline", "--archive", "x"], ["--from", "yesterday"]])
def test_invalid_options_end_it_before_any_request(words):
    line = [str(PLAINSONG), "pipeline", "run", "report", "--url", "http://127.0.0.1:1", *words]
    done = subprocess.run(
        line, capture_output=True, text=True, env=clean_environ(), timeout=SPARK_PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_with_an_archive_messages_that_expired_count_and_each_counts_once(daemon, spark, tmp_path):
    where = Where(("http://{}:{}".format(*daemon.address),), "kept")
    root = str(tmp_path / "archive")
    with Client(where.urls, namespace="kept") as client:
        client.create_topic("orders", ttl_s=3600)
        began_ms = now_ms() - 1000
        client.publish("orders", [b"early"] * 5)
        append(Run("archive", where, spark=spark), ["orders"], root, every=None)
        client.admin.set_properties("orders", ttl_s=1)
        eventually("they expire", lambda: not client.admin.stats("orders")["messages"])
        client.admin.set_properties("orders", ttl_s=3600)
        client.publish("orders", [b"late"] * 3)
        append(Run("archive", where, spark=spark), ["orders"], root, every=None)
    run = Run("report", where, spark=spark)
    grid = grid_over(began_ms, now_ms() + 1000)

    (alone,) = topics_of(run, ReportOptions())
    assert (alone.stats["messages"], alone.whole) == (3, False)

    wanted = ReportOptions(archive=root)
    both = topics_of(run, wanted)
    made = report_on(run, wanted, both, grid)
    assert (made.messages, both[0].whole) == (8, True)
    assert sum(row["messages"] for row in made.rates) == 8
    assert made.of_topic(made.sizes, "kept:orders")[-1]["messages"] == 8
    assert "no write pointers" in " ".join(made.notes)

    offline = ReportOptions(("orders",), root, offline=True, ttl_ms=3_600_000)
    nobody = Run("report", Where(("http://127.0.0.1:1",), "kept"), spark=spark)
    again = report_on(nobody, offline, topics_of(nobody, offline), grid)
    assert [row["messages"] for row in again.rates] == [row["messages"] for row in made.rates]


def test_offline_requires_an_archive_that_has_the_topic_and_a_ttl(spark, tmp_path):
    run = Run("report", Where((), "kept"), spark=spark)
    with pytest.raises(CommandFailed, match="has no messages of kept:orders"):
        topics_of(run, ReportOptions(("orders",), str(tmp_path), offline=True, ttl_ms=1000))
