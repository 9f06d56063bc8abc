"""Gaps and damage in an archive are reported, and filled while the topic still has the messages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.connection import Where
from plainsong.cli.main import run as run_program
from pyspark_plainsong.pipeline.archive import archiving, layout
from pyspark_plainsong.pipeline.archive.archiving import append
from pyspark_plainsong.pipeline.archive.command import archive as archive_command
from pyspark_plainsong.pipeline.archive.manifest import Range
from pyspark_plainsong.pipeline.archive.reading import load_manifests
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.job import Run
from pyspark_plainsong.pipeline.locks import Busy
from tests.daemon.harness import Daemon, eventually
from tests.pipeline.archives import damage, in_archive, in_topic, published, raw_ids, url_of

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
    """A client of a namespace of the test's own if it changes the topic; otherwise of a shared one."""
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
    """The same of a topic of the test's own; the archive's root."""
    archived(spark, daemon, client.namespace, str(tmp_path / "own"))
    return str(tmp_path / "own")


def entries(root):
    return load_manifests(open_files(root))


def verified(run, root):
    findings = archiving.verify(run, "orders", root, *EVER, None)
    return findings, {name: count for name, count in findings.counts.items() if count}


def test_planted_damage_and_removed_files_are_found(client, run, root):
    damage(Path(root) / entries(root)[1].folder)
    findings, counts = verified(run, root)
    assert not findings.is_good
    assert len(findings.damaged) == 1
    assert counts == {"same": 200, "missing": 100}
    assert findings.examples["missing"] == [each.hex() for each in in_topic(client)[100:105]]
    gone = entries(root)[2]
    open_files(root).remove(gone.folder)
    findings, counts = verified(run, root)
    assert counts == {"same": 100, "missing": 200}  # and not waiting: the checkpoint is past it
    assert findings.holes == [Range(gone.start, gone.end)]


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
    parts = [Range(entry.start, entry.end) for entry in entries(own_topic)]
    client.admin.set_properties("orders", ttl_s=1)
    eventually("the topic has expired", lambda: in_topic(client) == [])
    findings, counts = verified(run, own_topic)
    assert findings.is_good
    assert counts == {"expired": 300}
    for number, part in enumerate(parts):
        copy = str(tmp_path / f"without-{number}")
        shutil.copytree(own_topic, copy)
        open_files(copy).remove(entries(copy)[number].folder)
        findings, counts = verified(run, copy)
        assert (findings.is_good, findings.holes, counts) == (False, [part], {"expired": 200})
        if number == 0:  # by its number, the second batch was not the first one
            shutil.rmtree(Path(copy) / layout.topic_folder(client.namespace, "orders") / "_checkpoints")
            assert verified(run, copy)[0].holes == [part]
    client.admin.delete_topic("orders")
    words = ["verify", "orders", "--generation", "1", "--url", url_of(daemon), "-n", client.namespace, "--root"]
    assert run_program(archive_command, [*words, own_topic], "archive") == 0
    assert run_program(archive_command, [*words, str(tmp_path / "without-1")], "archive") == Exit.FAILED
    assert "the archive does not match the topic: 1 gaps that no entry covers" in capsys.readouterr().err
    assert run_program(archive_command, [*words, str(tmp_path / "none")], "archive") == Exit.NOT_FOUND


# --- holes that a checkpoint is past -----------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_a_hole_is_filled_from_the_topic_and_reported(spark, client, run, root, capsys, number):
    open_files(root).remove(entries(root)[number].folder)
    assert len(in_archive(spark, root)) == 200
    append(run, ["orders"], root, every=None)
    assert "the archive had no messages from" in capsys.readouterr().err
    assert 'plainsong_pipeline_warnings_total{job="archive",warning="hole"} 1.0' in run.metrics.text()
    assert sorted(raw_ids(root)) == in_archive(spark, root) == in_topic(client)
    append(run, ["orders"], root, every=None)
    assert capsys.readouterr().err == ""
    assert verified(run, root)[0].is_good


def test_a_hole_that_may_have_expired_is_reported(spark, client, run, root):
    open_files(root).remove(entries(root)[0].folder)  # the age of the first message is now unknown
    with pytest.raises(
        CommandFailed, match=r"the archive has no messages before .*, although the checkpoint is past it"
    ) as told:
        append(run, ["orders"], root, every=None)
    assert told.value.code == Exit.STORE
    assert "--may-lose" in told.value.hint
    assert len(in_archive(spark, root)) == 200
    append(run, ["orders"], root, every=None, may_lose=True)
    assert in_archive(spark, root) == in_topic(client)
    append(run, ["orders"], root, every=None)


def test_a_second_append_of_a_topic_is_refused_and_changes_nothing(spark, client, run, root):
    before = sorted(Path(root).rglob("*"))
    with open_files(root).lock(layout.lock_file(client.namespace, "orders", "appending"), "it", print):
        with pytest.raises(Busy, match=r"the archive of .*:orders is already being written, by process \d+ on") as told:
            append(run, ["orders"], root, every=None)
        assert told.value.code == Exit.STORE
    assert sorted(Path(root).rglob("*")) == before
    append(run, ["orders"], root, every=None)
    assert in_archive(spark, root) == in_topic(client)
