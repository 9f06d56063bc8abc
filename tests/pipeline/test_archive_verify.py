"""Gaps and damage in an archive are reported, even after the messages have expired in the topic."""

from __future__ import annotations

import re
import shutil

import pytest

from plainsong import Client
from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.connection import Where
from plainsong.cli.main import run as run_program
from pyspark_plainsong.pipeline.archive import archiving
from pyspark_plainsong.pipeline.archive.archiving import append
from pyspark_plainsong.pipeline.archive.command import archive as archive_command
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.job import Run
from tests.daemon.harness import Daemon, eventually
from tests.pipeline.archives import damage, files_of, in_topic, published, raw_ids, url_of

EVER = (bytes(20), b"\x7f" + b"\xff" * 19)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("verified") / "data") as running:
        yield running


def archived(spark, daemon, namespace, root):
    """300 messages in a topic, and in an archive of three batches."""
    with Client(url_of(daemon), namespace=namespace) as client:
        published(client, 0, 300)
        append(run_at(spark, daemon, namespace), ["orders"], root, every=None, batch_rows=100)


@pytest.fixture(scope="module")
def original(spark, daemon, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("original") / "archive")
    archived(spark, daemon, "shared", root)
    return root


@pytest.fixture
def client(daemon, request):
    """A client of a separate namespace if the test changes the topic; otherwise of a shared one."""
    own = "own_topic" in request.fixturenames
    name = "".join(char for char in request.node.name if char.isalnum())[:60] if own else "shared"
    with Client(url_of(daemon), namespace=name) as opened:
        yield opened


@pytest.fixture
def run(spark, daemon, client):
    return run_at(spark, daemon, client.namespace)


def run_at(spark, daemon, namespace):
    return Run("archive", Where((url_of(daemon),), namespace), spark=spark)


@pytest.fixture
def root(original, tmp_path):
    """An archive of 300 messages in three batches, of a topic that no test changes."""
    shutil.copytree(original, tmp_path / "archive")
    return str(tmp_path / "archive")


@pytest.fixture
def own_topic(spark, daemon, client, tmp_path):
    """A similar archive, of a topic that only this test uses."""
    archived(spark, daemon, client.namespace, str(tmp_path / "own"))
    return str(tmp_path / "own")


def verified(run, root):
    findings = archiving.verify(run, "orders", root, *EVER, None)
    return findings, {name: count for name, count in findings.counts.items() if count}


def without(namespace, root, number):
    """Remove the files of a batch from the table, as a restore or another program may."""
    table = TopicTable.open(open_files(root), namespace, "orders")
    batch = f"data/{number:012d}-"
    table.swap([], [each for each in table.all_files() if each.path.startswith(batch)])


def batch_files(root, number):
    return [path for path, each in files_of(root) if each.path.startswith(f"data/{number:012d}-")]


@pytest.mark.usefixtures("adaptive")
def test_planted_damage_and_removed_files_are_found(client, run, root):
    for file in batch_files(root, 2):
        damage(file)
    findings, counts = verified(run, root)
    assert not findings.is_good
    assert len(findings.damaged) == len(batch_files(root, 2))
    assert counts == {"same": 200, "missing": 100}
    assert findings.examples["missing"] == [each.hex() for each in in_topic(client)[100:105]]
    for file in batch_files(root, 3):
        file.unlink()
    findings, counts = verified(run, root)
    assert counts == {"same": 100, "missing": 200}  # not waiting: the table ends after them
    assert {*findings.damaged.values()} >= {"is missing"}


def test_rows_that_were_taken_out_of_the_table_are_missed(client, run, root):
    without(client.namespace, root, 2)
    findings, counts = verified(run, root)
    assert (findings.is_good, counts) == (False, {"same": 200, "missing": 100})
    assert findings.damaged
    assert all(re.fullmatch(r"has \d+ rows, not \d+", why) for why in findings.damaged.values())


@pytest.mark.usefixtures("adaptive")
def test_a_compacted_archive_still_equals_the_topic(spark, client, run, own_topic):
    archiving.compact(run, [], own_topic, compression="zstd", today=True)
    published(client, 300, 20)
    append(run, ["orders"], own_topic, every=None)
    published(client, 320, 7)
    findings, counts = verified(run, own_topic)
    assert findings.is_good
    assert counts == {"same": 320, "waiting": 7}
    assert sorted(raw_ids(own_topic)) == in_topic(client)[:320]


def test_messages_missing_from_an_archive_are_reported_even_if_they_have_expired_in_the_topic(
    client, daemon, run, own_topic, tmp_path, capsys
):
    client.admin.set_properties("orders", ttl_s=1)
    eventually("the topic has expired", lambda: in_topic(client) == [])
    findings, counts = verified(run, own_topic)
    assert findings.is_good
    assert counts == {"expired": 300}
    copy = str(tmp_path / "without")
    shutil.copytree(own_topic, copy)
    without(client.namespace, copy, 1)
    findings, counts = verified(run, copy)
    assert (findings.is_good, counts) == (False, {"expired": 200})
    assert findings.damaged
    assert all(re.fullmatch(r"has \d+ rows, not \d+", why) for why in findings.damaged.values())
    client.admin.delete_topic("orders")
    words = ["verify", "orders", "--generation", "1", "--url", url_of(daemon), "-n", client.namespace, "--root"]
    assert run_program(archive_command, [*words, own_topic], "archive") == 0
    assert run_program(archive_command, [*words, copy], "archive") == Exit.FAILED
    assert "the archive does not match the topic: " in capsys.readouterr().err
    assert run_program(archive_command, [*words, str(tmp_path / "none")], "archive") == Exit.NOT_FOUND


def test_pruned_messages_are_not_losses(client, run, own_topic):
    archiving.prune(run, ["orders"], own_topic, older_than_ms=0)  # today is not over
    assert verified(run, own_topic)[1] == {"same": 300}
    table = TopicTable.open(open_files(own_topic), client.namespace, "orders")
    table.prune("2999-01-01")
    findings, counts = verified(run, own_topic)
    assert (findings.is_good, counts) == (True, {"pruned": 300})


# --- rows that were lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_lost_rows_are_archived_again_from_the_topic_and_this_is_reported(client, run, root, capsys, number):
    without(client.namespace, root, number)
    append(run, ["orders"], root, every=None)
    assert "the archive had lost messages of" in capsys.readouterr().err
    assert 'plainsong_pipeline_warnings_total{job="archive",warning="hole"} 1.0' in run.metrics.text()
    assert sorted(raw_ids(root)) == in_topic(client)
    append(run, ["orders"], root, every=None)
    assert capsys.readouterr().err == ""
    assert verified(run, root)[0].is_good


def test_lost_rows_that_expired_are_no_silent_loss(client, run, own_topic):
    without(client.namespace, own_topic, 1)
    client.admin.set_properties("orders", ttl_s=1)
    eventually("the topic has expired", lambda: in_topic(client) == [])
    with pytest.raises(CommandFailed, match=r"the archive lacks \d+ messages of .* that it had") as told:
        append(run, ["orders"], own_topic, every=None)
    assert told.value.code == Exit.STORE
    assert "--may-lose" in told.value.hint
    assert len(raw_ids(own_topic)) == 200
    append(run, ["orders"], own_topic, every=None, may_lose=True)
    assert len(raw_ids(own_topic)) == 200
    assert verified(run, own_topic)[0].is_good
