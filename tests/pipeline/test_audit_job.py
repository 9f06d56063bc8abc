"""The audit job at a real daemon: the tables equal the reference's, even after a run was killed, and answer questions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from plainsong import Client
from plainsong.cli.command import CommandFailed
from plainsong.cli.connection import Where
from plainsong.positions import now_ms
from plainsong.protocol.ids import pack_id
from pyspark_plainsong.pipeline.audit import stream
from pyspark_plainsong.pipeline.audit.command import WHAT, audit
from pyspark_plainsong.pipeline.audit.exporting import export_tables
from pyspark_plainsong.pipeline.audit.generator import SPOILING, payloads
from pyspark_plainsong.pipeline.audit.keeping import TABLES
from pyspark_plainsong.pipeline.audit.lineage import publish_flows
from pyspark_plainsong.pipeline.audit.manifest import TablesManifest, load_manifest, store_manifest
from pyspark_plainsong.pipeline.audit.stream import NOTES, Choices, run_stream
from pyspark_plainsong.pipeline.job import Run
from tests.daemon.harness import ROOT, Daemon, eventually
from tests.documents import DOCUMENTS, shell_lines
from tests.patience import SPARK_PATIENCE_S
from tests.pipeline.audit_messages import check_equal, tables_in
from tests.pipeline.audit_reference import Tables, distances, flows_of, judge
from tests.spark_session import own_settings, spark_environ

MESSAGES, SEED, BAD = 2000, 11, 0.02


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("audited") / "data") as running:
        yield "http://{}:{}".format(*running.address)


@pytest.fixture(scope="module")
def said(url):
    """A function that runs a command of the job in this process and returns the events of its output."""

    def say(*words, code=0):
        done = CliRunner().invoke(audit, [*words, "--url", url, "--json"], catch_exceptions=True)
        if code == 0:
            assert done.exit_code == 0, (done.output, done.exception)
        return [json.loads(line) for line in done.stdout.splitlines()] if code == 0 else done

    return say


@pytest.fixture(scope="module")
def answer(said):
    """A function that runs a command and returns the rows of its answer."""

    def ask(*words):
        return [each["row"] for each in said(*words) if "row" in each]

    return ask


@pytest.fixture(scope="module")
def root(spark, url, said, tmp_path_factory):
    """Tables of a generated topic, made by a run that was killed and a second run."""
    folder = tmp_path_factory.mktemp("tables") / "audit-tables"
    words = ("generate", "--messages", str(MESSAGES), "--seed", str(SEED), "--bad", str(BAD), "--topic", "audit")
    said(*words, "--create")
    assert said(*words)[-2]["before"] == MESSAGES, "generated again, nothing is published twice"
    # One batch is in, and another is half written.
    killed_when(url, folder, lambda: load_manifest(folder) and load_manifest(folder).sequence and half_written(folder))
    assert 0 < load_manifest(folder).rows("trail") < MESSAGES * (1 - BAD) * 0.9
    run = Run("audit", Where((url,)), spark=spark)
    total, _ = run_stream(run, ["audit"], folder, Choices(batch_rows=1500))
    assert 0 < total.messages < MESSAGES
    told = run.metrics.text().splitlines()
    for name, value in (("rows_total", total.messages), ("dead_letters_total", total.bad), ("lag_seconds", 0)):
        assert f'plainsong_pipeline_{name}{{job="audit",topic="audit"}} {float(value)}' in told
    return folder


def half_written(folder):
    return any(folder.glob("data/*/edges/_temporary"))


def killed_when(url, folder, ripe):
    """Start a run in a process of its own, and kill it with its JVM and workers once `ripe` returns a true value."""
    environ = {**own_settings(os.environ), **spark_environ(), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pyspark_plainsong.pipeline.audit",
        "run",
        "audit",
        "--root",
        str(folder),
        "--url",
        url,
    ]
    with subprocess.Popen(
        [*command, "--batch-rows", "200"], env=environ, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        try:
            eventually(
                "the run is where it is to be killed", lambda: ripe() or process.poll() is not None, SPARK_PATIENCE_S
            )
            assert process.poll() is None, "it was to be killed, but it ended"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.torture
def test_tables_of_a_repeatedly_killed_run_equal_the_reference(root, expected, spark, url, tmp_path):
    folder = tmp_path / "tables"
    killed_when(url, folder, lambda: half_written(folder))
    for sequence in (1, 3, 5):
        killed_when(url, folder, lambda sequence=sequence: load_manifest(folder).sequence >= sequence)
    run_stream(Run("audit", Where((url,)), spark=spark), ["audit"], folder, Choices(batch_rows=700))
    check_equal(tables_in(folder), expected)


@pytest.fixture(scope="module")
def expected(url):
    with Client(url) as client:
        return Tables(
            ("default:audit", bytes(m.id), int.from_bytes(bytes(m.id)[:8], "big"), m.payload)
            for m in client.read("audit")
        )


def test_tables_of_a_run_that_was_killed_and_continued_equal_the_reference(root, expected, url):
    with Client(url) as client:
        assert [message.payload for message in client.read("audit")] == list(payloads(MESSAGES, SEED, bad=BAD))
    assert len(expected.trail) + len(expected.dead) == MESSAGES
    assert len(expected.dead) > 10
    check_equal(tables_in(root), expected)


def test_a_run_adds_nothing_twice_whatever_spark_remembers_and_a_dry_run_reports_what_is_due(
    root, expected, spark, url, said
):
    told = said("run", "audit", "--root", str(root), "--dry-run")
    assert (told[0]["event"], told[0]["messages"]) == ("would", 0)
    run = Run("audit", Where((url,)), spark=spark)
    assert run_stream(run, ["audit"], root, Choices())[0].messages == 0
    check_equal(tables_in(root), expected)


def test_existing_tables_get_missing_rows_and_an_added_topic_is_read_from_its_beginning(spark, url, tmp_path):
    """Restoring a copy of the manifest restores its state; no newer checkpoint makes the next run skip messages."""
    run = Run("audit", Where((url,), "copies"), spark=spark)
    messages = list(payloads(30, 1))
    with Client(url, namespace="copies") as client:
        for topic in ("one", "two"):
            client.create_topic(topic)
            client.publish(topic, messages[:10])
        assert run_stream(run, ["one"], tmp_path, Choices())[0].messages == 10
        copy = (tmp_path / "manifest.json").read_bytes()
        client.publish("one", messages[10:])
        assert run_stream(run, ["one"], tmp_path, Choices())[0].messages == 20
        (tmp_path / "manifest.json").write_bytes(copy)
        assert run_stream(run, ["one", "two"], tmp_path, Choices())[0].messages == 30


def test_the_figures_of_a_run_have_every_batch_however_few_spark_remembers(spark, url, tmp_path):
    run = Run("audit", Where((url,), "figures"), spark=spark)
    with Client(url, namespace="figures") as client:
        client.create_topic("audit")
        client.publish("audit", list(payloads(20, 1)))
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1")
    try:
        total, _ = run_stream(run, ["audit"], tmp_path, Choices(batch_rows=10))
    finally:
        spark.conf.unset("spark.sql.streaming.numRecentProgressUpdates")
    assert (total.messages, total.batches) == (20, 2)
    assert 'plainsong_pipeline_rows_total{job="audit",topic="audit"} 20.0' in run.metrics.text()


def test_spark_checks_for_losses_unless_the_last_run_had_caught_up(spark, url, tmp_path, monkeypatch):
    """A quiet topic's tables end before the oldest message in the topic; a note decides whether that is a loss."""
    looked_out = []
    monkeypatch.setattr(stream, "_go", lambda *given: looked_out.append(not given[3].may_lose))
    run = Run("audit", Where((url,), "quiet"), spark=spark)
    with Client(url, namespace="quiet") as client:
        client.create_topic("audit")
        client.publish("audit", list(payloads(2, 1)))
    last = pack_id(1, 0).hex()
    store_manifest(tmp_path, TablesManifest(through={"quiet:audit": last}, lives={"quiet:audit": 1}))
    run_stream(run, ["audit"], tmp_path, Choices())
    run_stream(run, ["audit"], tmp_path, Choices(every="1 second"))
    (tmp_path / NOTES).write_text(json.dumps({"quiet:audit": [1, last, now_ms()]}), encoding="utf-8")
    run_stream(run, ["audit"], tmp_path, Choices())
    run_stream(run, ["audit"], tmp_path, Choices(every="1 second"))  # once, to catch up, and then it is followed
    assert looked_out == [True, True, True, False, False, True]


def test_the_trail_is_searched_by_entity_user_and_time(root, expected, said, answer):
    rows = sorted(((row[0], key[1]), row) for key, row in expected.trail.items())
    some = rows[len(rows) // 2][1]
    entity, user, start, end = some[4], some[3], rows[len(rows) // 4][1][0], rows[3 * len(rows) // 4][1][0]
    for words, fits in (
        (("--entity", entity), lambda row: row[4] == entity),
        (("--user", user), lambda row: row[3] == user),
        (("--from", str(start), "--to", str(end)), lambda row: start <= row[0] < end),
        (("--entity", entity, "--user", user, "--from", str(start)), lambda row: row[4] == entity and row[3] == user and row[0] >= start),
        (("--namespace", "other"), lambda row: False),
        (("--namespace", "other", "--all-namespaces"), lambda row: True),
    ):  # fmt: skip
        found = [each["messageId"] for each in answer("trail", "--root", str(root), "--limit", "5000", *words)]
        assert found == [key[1].hex() for key, row in reversed(rows) if fits(row)], words
    found = said("trail", "--root", str(root), "--oldest-first", "--limit", "7")
    assert [each["event"] for each in found] == ["trail"] * 7 + ["warning", "end"]
    assert [each["row"]["messageId"] for each in found[:7]] == [key[1].hex() for key, _ in rows[:7]]
    assert found[0]["time"] > found[0]["row"]["time"], "the one is now, the other the event's"
    program = next(row[5] for _, row in rows if row[5])
    by_program = answer("trail", "--root", str(root), "--limit", "5000", "--entity", f"program:{program}")
    assert len(by_program) == sum(row[5] == program or row[4] == f"program:{program}" for _, row in rows)


def test_usage_and_dead_letters_are_shown(root, expected, answer):
    dataset = next(iter(expected.usage))[2]
    found = answer("usage", "--root", str(root), "--dataset", dataset)
    mine = {key[1]: value for key, value in expected.usage.items() if key[2] == dataset}
    assert {each["program"]: [each["reads"], each["writes"], each["unknowns"]] for each in found} == {
        program: value[2:] for program, value in mine.items()
    }
    dead = answer("dead-letters", "--root", str(root))
    shown = {(each["topic"], bytes.fromhex(each["messageId"])): bytes.fromhex(each["payload"]) for each in dead}
    assert shown == {key: row[2] for key, row in expected.dead.items()}
    reason = dead[0]["reason"]
    assert {each["reason"] for each in answer("dead-letters", "--root", str(root), "--reason", reason)} == {reason}


def test_lineage_is_walked_up_and_down_to_any_depth(root, expected, answer):
    steps = {(source, target) for source, _, _, target in flows_of(expected.edges)}
    start = max({source for source, _ in steps}, key=lambda each: len(distances(steps, each)))
    for direction in ("up", "down"):
        turned = steps if direction == "down" else {(target, source) for source, target in steps}
        for depth in ("all", "1", "2"):
            words = ("--direction", direction, "--depth", depth, "--limit", "100000")
            flows = answer("lineage", start, "--root", str(root), *words)
            found: dict[str, int] = {}
            for each in flows:
                found.setdefault(each["target" if direction == "down" else "source"], each["distance"])
            far = distances(turned, start)
            assert found == {name: n for name, n in far.items() if depth == "all" or n <= int(depth)}
    by_run = answer("lineage", start, "--root", str(root), "--runs", "--limit", "100000")
    assert all(each["run"] for each in by_run)
    assert len(by_run) == sum(each["runs"] for each in answer("lineage", start, "--root", str(root), "--limit", "9999"))


def test_flows_are_published_for_the_console_on_request(spark, url, root, expected, said):
    """Each flow is published once, however many runs made it, with the values of the tables."""
    run = Run("audit", Where((url,)), spark=spark)
    with pytest.raises(CommandFailed):
        publish_flows(run, root, load_manifest(root))
    with Client(url, namespace="system") as client:
        client.create_topic("lineage")
        count = publish_flows(run, root, load_manifest(root))
        found = [json.loads(message.payload) for message in client.read("lineage", isolation="uncommitted")]
    assert len(found) == count
    assert {(each["from"], each["to"]) for each in found} == {
        (source, target) for source, _, _, target in flows_of(expected.edges)
    }
    assert all(each["v"] == 1 and each["runs"] >= 1 and each["program"] for each in found)
    done = said("run", "audit", "--root", str(root), "--publish-lineage", "--follow", code=2)
    assert "--follow" in done.output


def test_output_for_people_is_tables(root):
    done = CliRunner().invoke(audit, ["usage", "--root", str(root), "--limit", "3"])
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["program", "dataset", "reads", "writes", "unknowns", "first", "seen", "last", "seen"]
    assert len(lines) == 4
    assert "…" not in done.stdout, "no terminal is there that would be too narrow"
    assert done.stderr == "warning: only 3 rows shown; there may be more\n"


def test_missing_and_invalid_input_is_reported(said, tmp_path):
    def why(*words):
        done = said(*words, code=1)
        return done.output + str(done.exception)

    root = ("--root", str(tmp_path / "none"))
    assert "there are no audit tables" in why("trail", *root)
    assert "lacks a kind" in why("trail", *root, "--entity", "purchases")
    assert "neither a number" in why("lineage", "x", *root, "--depth", "0")
    assert "not a whole number" in why("generate", "--messages", "1.5", "--topic", "x")
    assert "either --topic or --out" in why("generate", "--messages", "1")
    assert "nosuch" in why("run", "nosuch", *root)
    assert "is not a folder; tables need one on a local or mounted disk" in why(
        "run", "audit", "--root", "hdfs://host/tables"
    )
    assert "there are no audit tables" in why("usage", "--root", f"file://{tmp_path}/none")
    told = said("trail", *root, "--entity", "purchases", code=2)
    assert (told.exit_code, json.loads(told.stdout.splitlines()[-1])["exit"]) == (2, 2)
    assert not (tmp_path / "none").exists()
    (tmp_path / "mine").touch()
    for more in ((), ("--dry-run",)):
        assert "has no manifest.json, but 1 other thing" in why("run", "audit", "--root", str(tmp_path), *more)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


SECTION = DOCUMENTS["docs/pipeline.md"].split("\n## audit\n")[1].split("\n## ")[0]
REASONS_TOLD = re.findall(
    r"`(\w+)`", " ".join(re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| (?:is|lacks|has) ", SECTION, re.M))
)


def test_the_page_shows_messages_that_are_good_and_names_every_reason_column_and_command():
    shown = re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)
    assert [judge(each.encode(), 1_740_000_000_000)["type"] for each in shown] == ["access", "metadata"]
    assert set(REASONS_TOLD) >= set(SPOILING)
    rows = dict(re.findall(r"^\| `(\w+)` \| a \w+.*? \| (.+) \|$", SECTION, re.MULTILINE))
    assert {name: re.findall(r"`(\w+)`", columns) for name, columns in rows.items()} == {
        table.name: table.columns.names for table in TABLES
    }
    lines = [line.split()[4] for line in shell_lines(SECTION) if " run audit " in line]
    assert set(lines) == set(audit.commands)


def test_the_python_of_the_page_runs(root, spark, monkeypatch, capsys):
    monkeypatch.chdir(root.parent)
    (block,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    exec(compile(block, "docs/pipeline.md", "exec"), {"spark": spark})
    out = capsys.readouterr().out
    assert "first_seen" in out
    assert "distance" in out


@pytest.mark.usefixtures("adaptive")
def test_tables_are_exported_as_plain_parquet_as_of_one_moment(root, expected, spark, tmp_path):
    out = tmp_path / "export"
    run = Run("audit", spark=spark)
    dry = Run("audit", spark=spark, dry_run=True)
    export_tables(dry, root, out, tuple(WHAT), None, False)
    assert not out.exists()
    export_tables(run, root, out, tuple(WHAT), None, False)
    rows = {name: spark.read.parquet(str(out / name)).count() for name in WHAT}
    steps = flows_of(expected.edges)
    pairs = {(source, target) for source, _, _, target in steps}
    assert rows == {
        "trail": len(expected.trail),
        "usage": len(expected.usage),
        "edges": len(expected.edges),
        "dead_letters": len(expected.dead),
        "flows": len({(source, program, target) for source, program, _, target in steps}),
        "closure": sum(len(distances(pairs, start)) for start in {source for source, _ in pairs}),
    }
    for own in (root, root / "data"):
        with pytest.raises(CommandFailed, match="the folder of the tables, or inside it"):
            export_tables(run, root, own, ("usage",), None, False)
