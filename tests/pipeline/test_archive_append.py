"""Each message of a topic is archived exactly once, whatever is killed, and a run reports messages that expired before."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from plainsong import Client
from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.connection import Where
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.archive import appending, archiving, layout, read
from pyspark_plainsong.pipeline.archive.appending import AppendOptions, Subject
from pyspark_plainsong.pipeline.archive.archiving import append, compact, verify
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter
from pyspark_plainsong.pipeline.job import Run
from pyspark_plainsong.pipeline.streams import CHECKPOINTS, DISPOSABLE, disposable_checkpoints
from tests.daemon.harness import ROOT, Daemon, eventually
from tests.patience import SPARK_PATIENCE_S
from tests.pipeline.archives import files_of, in_archive, in_topic, published, raw_ids, url_of
from tests.spark_session import spark_environ


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("archived") / "data") as running:
        yield running


@pytest.fixture
def client(daemon, request):
    name = "".join(char for char in request.node.name if char.isalnum())[:60]
    with Client(url_of(daemon), namespace=name) as opened:
        yield opened


@pytest.fixture
def run(spark, daemon, client):
    return Run("archive", Where((url_of(daemon),), client.namespace), spark=spark)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "archive")


@pytest.mark.usefixtures("adaptive")
def test_a_topic_is_archived_in_order_and_later_runs_add_only_new_messages(spark, client, run, root):
    published(client, 0, 300)
    append(run, ["orders"], root, every=None, batch_rows=100)
    assert in_archive(spark, root) == in_topic(client)
    published(client, 300, 50)
    append(run, ["orders"], root, every=None, batch_rows=100)
    append(run, ["orders"], root, every=None, batch_rows=100)
    assert in_archive(spark, root) == in_topic(client)
    log = DeltaTable(Path(root) / client.namespace / "orders")
    commits = [each["plainsong"] for each in log.history() if "plainsong" in each]
    commits = [json.loads(each) if isinstance(each, str) else each for each in commits]
    assert [each["rows"] for each in reversed(commits)] == [100, 100, 100, 50]
    assert [each["start"] for each in commits[:-1]] == [each["end"] for each in commits[1:]]
    assert log.transaction_version("plainsong:1") == 4
    payloads = [row.payload for row in read(spark, root).orderBy("message_id").collect()]
    assert payloads == [f"message {number}".encode() for number in range(350)]
    assert sorted(raw_ids(root)) == in_topic(client)
    for file, _ in files_of(root):
        ids = pq.read_table(file, partitioning=None)["message_id"].to_pylist()
        assert ids == sorted(ids)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a[1]{a,b}#b?c* d", id="everything"),
        *(
            pytest.param(name, id=kind, marks=pytest.mark.torture)
            for kind, name in (
                ("brackets", "a[1]"),
                ("braces", "{a,b}"),
                ("hash", "a#b"),
                ("wildcards", "a?b*"),
                ("spaces", "a b c"),
            )
        ),
    ],
)
def test_a_root_may_have_almost_any_name(spark, client, run, tmp_path, name):
    published(client, 0, 10)
    for root in (str(tmp_path / name), f"file:{tmp_path / name}"):
        append(run, ["orders"], root, every=None)
        assert in_archive(spark, root) == in_topic(client)
    compact(run, ["orders"], root, compression="zstd", today=True)
    findings = verify(run, "orders", root, bytes(20), b"\x7f" + bytes(19), None)
    assert (findings.is_good, findings.counts["same"]) == (True, 10)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a\\b", "a%20b"])
def test_a_root_that_the_library_would_misread_is_refused_before_anything_is_written(client, run, tmp_path, name):
    published(client, 0, 10)
    with pytest.raises(CommandFailed, match="cannot have a backslash or a percent sign in its path") as raised:
        append(run, ["orders"], str(tmp_path / name), every=None)
    assert raised.value.code == Exit.USAGE
    assert list(tmp_path.iterdir()) == []


def test_several_topics_have_archives_side_by_side(spark, client, run, root):
    for topic in ("orders-a", "orders-b", "other"):
        published(client, 0, 10, topic)
    append(run, ["orders-*"], root, every=None)
    rows = read(spark, root).groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in rows} == {"orders-a": 10, "orders-b": 10}
    assert read(spark, root, namespace=client.namespace, topic="orders-a").count() == 10
    with pytest.raises(CommandFailed, match="there is no topic 'order-a'"):
        append(run, ["order-a"], root, every=None)


def test_a_topic_that_begins_with_an_underscore_is_read_with_the_others_and_compacted(spark, client, run, root):
    client.create_topic("_orders")
    published(client, 0, 10, "_orders")
    append(run, ["_orders"], root, every=None)
    assert in_archive(spark, root) == in_topic(client, "_orders")
    compact(run, [], root, compression="zstd", today=True)
    assert len(files_of(root)) == 1
    assert in_archive(spark, root) == in_topic(client, "_orders")


def test_two_concurrent_runs_archive_each_message_once(spark, client, run, root, monkeypatch):
    def overtaken(self, *given):
        written = real(self, *given)
        monkeypatch.setattr(ArchiveWriter, "write", real)
        other = Run("archive", run.where, spark=spark.newSession())  # the names of queries are unique in a session
        append(other, ["orders"], root, every=None, batch_rows=70)
        return written

    real = ArchiveWriter.write
    published(client, 0, 300)
    with monkeypatch.context():
        monkeypatch.setattr(ArchiveWriter, "write", overtaken)
        append(run, ["orders"], root, every=None, batch_rows=100)
    assert sorted(raw_ids(root)) == in_archive(spark, root) == in_topic(client)


def test_an_archive_of_an_earlier_version_is_refused_with_the_way_out(client, run, root):
    published(client, 0, 10)
    (Path(root) / client.namespace / "orders/gen=1/batches").mkdir(parents=True)
    for call in (append, compact, archiving.migrate):
        options = {"every": None} if call is append else {"compression": "zstd"}
        if call is archiving.migrate:
            call(run, ["orders"], root, **options)
            append(run, ["orders"], root, every=None)
            continue
        with pytest.raises(CommandFailed, match="was written by an earlier version") as raised:
            call(run, ["orders"], root, **options)
        assert raised.value.code == Exit.STORE
    assert sorted(raw_ids(root)) == in_topic(client)


def test_a_recreated_topic_gets_an_archive_of_its_own_generation(spark, client, run, root):
    published(client, 0, 10)
    append(run, ["orders"], root, every=None)
    client.admin.delete_topic("orders")
    published(client, 0, 20)
    append(run, ["orders"], root, every=None)
    rows = read(spark, root).groupBy("generation").count().collect()
    assert {row["generation"]: row["count"] for row in rows} == {1: 10, 2: 20}


def test_a_dry_run_reports_what_is_due_and_writes_nothing(client, run, root, capsys):
    published(client, 0, 30)
    run.dry_run = True
    append(run, ["orders"], root, every=None)
    assert "orders: would archive 30 messages" in capsys.readouterr().out
    assert not Path(root).exists()
    run.dry_run = False
    append(run, ["orders"], root, every=None)
    before = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")}
    run.dry_run = True
    append(run, ["orders"], root, every=None)
    assert "orders: would archive 0 messages" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")} == before


class Enough(Exception):
    """Ends a run that follows topics."""


def test_a_followed_pattern_archives_topics_that_match_it_later(spark, client, run, root, monkeypatch):
    later = ["foo-b", "foo-c"]
    appended = []

    def tell(self, *, following=False):
        real(self, following=following)
        appended.append(self)
        if rows_in(root) == 10 * (3 - len(later)):
            if not later:
                raise Enough
            published(client, 0, 10, later.pop(0))

    real = archiving.Appending.tell
    monkeypatch.setattr(archiving.Appending, "tell", tell)
    monkeypatch.setattr(archiving, "LOOK_EVERY", 1)
    published(client, 0, 10, "foo-a")
    published(client, 0, 10, "foo-more")
    with pytest.raises(Enough):
        append(run, ["foo-?"], root, every="1 seconds")
    rows = read(spark, root).groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in rows} == {"foo-a": 10, "foo-b": 10, "foo-c": 10}
    for each in appended:
        real(each)
        assert not each._written, "a batch that was reported is not kept"


def test_a_metric_shows_an_archive_that_is_late(client, run, root, capsys):
    client.create_topic("orders", ttl_s=3600)
    client.publish("orders", [b"early"])
    assert append(run, ["orders"], root, every=None, warn_at=0.0) == ["orders"]
    assert "warning: " in capsys.readouterr().err
    assert 'plainsong_pipeline_warnings_total{job="archive",warning="behind"} 1.0' in run.metrics.text()
    assert append(run, ["orders"], root, every=None, warn_at=0.0) == []  # nothing waits any more
    assert 'plainsong_pipeline_lag_seconds{job="archive",topic="orders"} 0.0' in run.metrics.text()


def test_a_run_checks_for_losses_unless_the_archive_caught_up_recently(client, run, root):
    def fails_on_data_loss(**choices):
        return Subject(run, client, "orders", AppendOptions(root, **choices)).source(bytes(20))["failOnDataLoss"]

    published(client, 0, 10)
    assert fails_on_data_loss() == "true"
    assert fails_on_data_loss(may_lose=True) == "false"
    append(run, ["orders"], root, every=None)
    assert fails_on_data_loss() == "false"  # messages published since then live for a week
    client.admin.set_properties("orders", ttl_s=1)
    eventually("the last run is older than the ttl", lambda: fails_on_data_loss() == "true")


def test_a_run_that_took_longer_than_messages_live_fails(client, run, root, monkeypatch):
    published(client, 0, 10)
    append(run, ["orders"], root, every=None)
    subject = Subject(run, client, "orders", AppendOptions(root))
    assert subject.source(bytes(20))["failOnDataLoss"] == "false"
    subject.check_nothing_was_lost()
    monkeypatch.setattr(appending, "now_ms", lambda: now_ms() + 8 * 86_400_000)
    with pytest.raises(CommandFailed, match="took longer than messages live"):
        subject.check_nothing_was_lost()


# --- killed ------------------------------------------------------------------------------------------


class Died(Exception):
    """Simulates the death of a run."""


@pytest.mark.parametrize("step", ["write", "append"])
def test_a_run_that_dies_after_any_step_loses_and_duplicates_nothing(spark, client, run, root, monkeypatch, step):
    owner = ArchiveWriter if step == "write" else TopicTable
    real = getattr(owner, step)

    def dies(*given):
        real(*given)
        raise Died(step)

    published(client, 0, 40)
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, dies)
        with pytest.raises(Exception, match=f"Died.*{step}"):
            append(run, ["orders"], root, every=None)
    assert rows_in(root) == (40 if step == "append" else 0)
    published(client, 40, 10)
    append(run, ["orders"], root, every=None)
    assert sorted(raw_ids(root)) == in_archive(spark, root) == in_topic(client)


#: Far beyond the time that a job needs to start and to do this much, even on a busy machine.
PATIENCE_S = 600
#: Files that a run creates in turn; the appearance of each is a moment to kill it.
TRACES = ("_delta_log", "_temporary", "_SUCCESS", "_delta_log/*[1-9].json")


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.torture)])
def test_an_archive_killed_again_and_again_holds_each_message_once(spark, client, daemon, root, kills):
    published(client, 0, 4_000)
    folder = Path(root) / layout.topic_folder(client.namespace, "orders")
    random_numbers = random.Random(7)
    command = [
        sys.executable,
        "-m",
        "pyspark_plainsong.pipeline.archive",
        "append",
        "orders",
        "--root",
        root,
        "--batch-rows",
        "1000",
    ]
    command += ["--url", url_of(daemon), "-n", client.namespace, "--json", "--master", "local[2]"]
    environ = {**os.environ, **spark_environ(), "PYTHONPATH": str(ROOT)}
    for trace in ["_temporary", *random_numbers.choices(TRACES, k=kills - 1)]:
        before = traces(folder, trace)
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        came_far = partial(came_as_far, process, folder, trace, before)
        eventually("the job has left the trace, or ended", came_far, PATIENCE_S)
        assert process.poll() is None or rows_in(root) == 4_000  # killed, or all was archived before
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    following = subprocess.Popen(
        [*command, "--follow", "--every", "1s"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        eventually("everything is archived", lambda: rows_in(root) == 4_000, PATIENCE_S)
        published(client, 4_000, 100)
        eventually("the new messages are archived", lambda: rows_in(root) == 4_100, PATIENCE_S)
    finally:
        following.terminate()
        out, _ = following.communicate(timeout=SPARK_PATIENCE_S)
    assert following.returncode == Exit.INTERRUPTED
    assert json.loads(out.splitlines()[-1])["exit"] == Exit.INTERRUPTED
    assert sorted(raw_ids(root)) == in_archive(spark, root) == in_topic(client)


def rows_in(root):
    """Count the committed rows without reading them, since some tests poll this."""
    return sum(file.rows for _, file in files_of(root))


def traces(folder, trace):
    """Return the paths below a folder whose ends match ``trace``; other processes may be writing to the folder."""
    walked = ((Path(at) / name).as_posix() for at, below, names in os.walk(folder) for name in (*below, *names))
    return {path for path in walked if fnmatchcase(path, f"*/{trace}")}


def came_as_far(process, folder, trace, before):
    return process.poll() is not None or traces(folder, trace) - before


def test_a_runs_own_checkpoints_are_written_without_processes_unless_the_user_chose_a_class(spark):
    chosen = spark.conf.get(CHECKPOINTS)
    spark.conf.unset(CHECKPOINTS)
    try:
        with disposable_checkpoints(spark):
            assert spark.conf.get(CHECKPOINTS) == DISPOSABLE
        assert spark.conf.get(CHECKPOINTS, None) is None
        spark.conf.set(CHECKPOINTS, "of.the.User")
        with disposable_checkpoints(spark):
            assert spark.conf.get(CHECKPOINTS) == "of.the.User"
        assert spark.conf.get(CHECKPOINTS) == "of.the.User"
    finally:
        spark.conf.set(CHECKPOINTS, chosen)
