"""Archived messages are replayed in order, each once, whatever is killed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plainsong import Client, Outgoing
from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.connection import Where
from plainsong.cli.main import program
from plainsong.cli.main import run as run_program
from pyspark_plainsong.pipeline.archive import archiving
from pyspark_plainsong.pipeline.archive.archiving import append
from pyspark_plainsong.pipeline.archive.command import archive
from pyspark_plainsong.pipeline.archive.writing import Log
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.job import Run
from pyspark_plainsong.pipeline.replay import replaying
from pyspark_plainsong.pipeline.replay.command import replay
from pyspark_plainsong.pipeline.replay.plans import Plan, Plans, ReplayChunk
from pyspark_plainsong.pipeline.replay.replaying import archive_source, parquet_source
from tests.client.proxy import Proxy
from tests.daemon.harness import ROOT, Daemon, eventually
from tests.documents import DOCUMENTS, shell_lines
from tests.patience import SPARK_PATIENCE_S
from tests.spark_session import spark_environ

ARCHIVED = "archived"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("replayed") / "data") as running:
        yield running


def url_of(daemon):
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture
def client(daemon, request):
    name = "".join(char for char in request.node.name if char.isalnum())[:60]
    with Client(url_of(daemon), namespace=name) as opened:
        opened.create_topic("again")
        yield opened


@pytest.fixture
def run(spark, daemon, client):
    return Run("replay", Where((url_of(daemon),), client.namespace), spark=spark)


@pytest.fixture(scope="module")
def original(spark, daemon, tmp_path_factory):
    """An archive of 300 messages, every third of which has attributes; and the messages."""
    root = str(tmp_path_factory.mktemp("original") / "archive")
    with Client(url_of(daemon), namespace=ARCHIVED) as client:
        client.create_topic("orders")
        client.publish("orders", [message(number) for number in range(300)])
        append(Run("archive", Where((url_of(daemon),), ARCHIVED), spark=spark), ["orders"], root, every=None)
        return root, list(client.read("orders"))


@pytest.fixture
def root(original, tmp_path):
    shutil.copytree(original[0], tmp_path / "archive")
    return str(tmp_path / "archive")


@pytest.fixture
def first(original):
    """The original messages."""
    return original[1]


def message(number):
    payload = f"message {number}".encode()
    return payload if number % 3 else Outgoing(payload, attributes={"number": str(number)}, routing_key="some")


def source_of(run, root):
    return archive_source(root, Log(ARCHIVED, "orders", 1), open_files(root))


def plan_of(run, source, chunk_rows=80):
    wanted = Plan(source.name, "00" * 20, source.end, run.where.namespace, "again", 1)
    return replaying.with_chunks(run.session(), source, wanted, chunk_rows)


def told(messages):
    return [(message.payload, dict(message.attributes)) for message in messages]


def without_originals(messages):
    kept = ("number", "routingKey")
    return [(payload, {name: own[name] for name in kept if name in own}) for payload, own in messages]


@pytest.mark.usefixtures("adaptive")
def test_an_archive_is_replayed_in_order_with_its_original_ids(client, run, root, first):
    source = source_of(run, root)
    plans = Plans(source.files, source.folder)
    plan = plan_of(run, source)
    assert plan.rows == 300
    assert max(chunk.rows for chunk in plan.chunks) <= 80
    assert replaying.follow(run, source, plans, plan) == 300
    assert without_originals(told(client.read("again"))) == told(first)
    originals = [(own["originalId"], own["originalPublishTimeMs"]) for _, own in told(client.read("again"))]
    assert originals == [(str(each.id), str(each.id.publish_time_ms)) for each in first]


def test_a_replay_continues_from_the_topic_and_not_from_its_plan(client, run, root, first):
    source = source_of(run, root)
    plans = Plans(source.files, source.folder)
    plan = plan_of(run, source)
    options = replaying._options(run, plan, 0, None)
    rows = replaying.outgoing(source.rows(run.session(), *plan.bounds(0)), source.key, with_originals=True)
    rows.write.format("plainsong").options(**options).mode("append").save()  # and killed before the plan was written
    assert replaying.resume_at(run, plan) == 1
    assert replaying.follow(run, source, plans, plan) == 300 - plan.chunks[0].rows
    assert without_originals(told(client.read("again"))) == told(first)
    (kept,) = plans.all()
    assert kept.is_done
    assert replaying.follow(run, source, plans, kept) == 0


def test_a_compaction_in_between_changes_nothing(spark, client, daemon, run, root, first):
    source = source_of(run, root)
    plans = Plans(source.files, source.folder)
    plan = plan_of(run, source)
    compacting = Run("archive", Where((url_of(daemon),), ARCHIVED), spark=spark)
    archiving.compact(compacting, [], root, compression="zstd", today=True)
    assert replaying.follow(run, source, plans, plan) == 300
    assert without_originals(told(client.read("again"))) == told(first)


def test_a_topic_that_has_forgotten_the_replay_does_not_get_everything_again(client, run, root):
    source = source_of(run, root)
    plans = Plans(source.files, source.folder)
    plan = plan_of(run, source)
    replaying.follow(run, source, plans, plan)
    (kept,) = plans.all()
    client.admin.delete_topic("again")
    client.create_topic("again")
    with pytest.raises(CommandFailed, match="it has forgotten the producer replay:"):
        replaying.follow(run, source, plans, kept)
    assert told(client.read("again")) == []


def test_any_parquet_with_a_payload_and_an_order_can_be_replayed(spark, client, run, tmp_path):
    rows = spark.range(100, -1, -1).selectExpr("id AS number", "cast(cast(id AS STRING) AS BINARY) AS payload")
    path = str(tmp_path / "rows.parquet")
    rows.repartition(3).write.parquet(path)
    source = parquet_source(spark, path, "number")
    wanted = Plan(source.name, "", "", client.namespace, "again", 1)
    plan = replaying.with_chunks(spark, source, wanted, 30)
    assert replaying.follow(run, source, Plans(source.files, source.folder), plan) == 101
    assert told(client.read("again")) == [(str(number).encode(), {}) for number in range(101)]


def test_a_column_that_only_one_of_the_files_has_is_published_from_that_file(spark, client, run, tmp_path):
    path = str(tmp_path / "rows")
    rows = spark.range(2).selectExpr("id AS number", "cast(id AS STRING) AS payload")
    rows.where("number = 0").coalesce(1).write.parquet(path)
    rows.where("number = 1").selectExpr("*", "'key' AS routing_key").coalesce(1).write.mode("append").parquet(path)
    source = parquet_source(spark, path, "number")
    plan = replaying.with_chunks(spark, source, Plan(source.name, "", "", client.namespace, "again", 1), 30)
    assert replaying.follow(run, source, Plans(source.files, source.folder), plan) == 2
    assert told(client.read("again")) == [(b"0", {}), (b"1", {"routingKey": "key"})]


@pytest.mark.parametrize("key", ["number", "key", "part", "chunk", "rows"])
def test_rows_are_replayed_in_order_and_once_whatever_the_name_of_their_key(spark, client, daemon, tmp_path, key):
    numbers = [*range(-5, 1)]  # two chunks; as text, the start of the second would be the smaller one
    rows = spark.createDataFrame([(number, str(number)) for number in numbers], f"{key} long, payload string")
    rows.repartition(2).write.parquet(str(tmp_path / "rows.parquet"))
    words = ["--parquet", str(tmp_path / "rows.parquet"), "--order-by", key, "--into", "again", "--chunk-rows", "3"]
    assert run_program(replay, [*words, "--url", url_of(daemon), "-n", client.namespace], "replay") == 0
    assert [int(message.payload) for message in client.read("again")] == numbers


def test_files_of_one_name_in_two_folders_are_two_replays(spark, client, daemon, tmp_path, capsys):
    def replay_of(folder, *more):
        words = ["--parquet", str(tmp_path / folder / "rows.parquet"), "--order-by", "number", "--into", "again"]
        return run_program(replay, [*words, "--url", url_of(daemon), "-n", client.namespace, *more], "replay")

    for folder, count in (("one", 2), ("two", 3)):
        rows = spark.range(count).selectExpr("id AS number", f"'{folder}' AS payload")
        rows.write.parquet(str(tmp_path / folder / "rows.parquet"))
    assert replay_of("one") == replay_of("two") == 0
    assert [message.payload for message in client.read("again")] == [b"one"] * 2 + [b"two"] * 3
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    assert replay_of("copy") == 0
    assert "all of this has been replayed before" in capsys.readouterr().out
    shutil.copytree(tmp_path / "one" / "rows.parquet", tmp_path / "lost" / "rows.parquet")
    assert replay_of("lost") == 1
    assert "its plan is missing" in capsys.readouterr().err


def test_a_plan_of_an_older_version_is_continued_with_its_producer(spark, tmp_path):
    path = str(tmp_path / "rows.parquet")
    spark.range(5).selectExpr("id AS number", "cast(id AS STRING) AS payload").write.parquet(path)
    source = parquet_source(spark, path, "number")
    as_read = source.as_read(spark)
    older = Plan(
        source.name, "", "", "n", "again", 1, as_read={"files": as_read["files"]}, chunks=(ReplayChunk("0", 5),)
    )
    plans = Plans(source.files, source.folder)
    plans.save(older)
    wanted = Plan(source.name, "", "", "n", "again", 1, as_read=as_read)
    assert plans.chosen(wanted, any_range=True, anew=False) == older
    assert older.family == Plan(source.name, "", "", "n", "again", 1).family != wanted.family
    with pytest.raises(CommandFailed, match="the files are not those"):
        plans.chosen(replace(wanted, as_read={**as_read, "files": "others"}), any_range=True, anew=False)


def test_attributes_too_large_for_the_original_ids_are_refused_before_anything_is_published(
    spark, client, daemon, tmp_path, capsys
):
    source, root = client.namespace, str(tmp_path / "archive")
    client.create_topic("large")
    client.publish("large", [b"small", Outgoing(b"large", attributes={"name": "x" * 4046})])
    append(Run("archive", Where((url_of(daemon),), source), spark=spark), ["large"], root, every=None)
    words = ["large", "--root", root, "--into", "again", "--chunk-rows", "1", "--url", url_of(daemon), "-n", source]
    assert run_program(replay, words, "replay") == Exit.USAGE
    said = capsys.readouterr().err
    assert "1 row would have more than 4096 bytes of attributes with originalId" in said
    assert "--no-originals" in said
    assert told(client.read("again")) == []
    assert run_program(replay, [*words, "--no-originals"], "replay") == 0
    assert told(client.read("again")) == told(client.read("large"))


def test_a_message_that_has_an_original_id_keeps_it(spark, client, daemon, tmp_path):
    source, root = client.namespace, str(tmp_path / "archive")
    own = [{"originalId": "mine"}, {"originalPublishTimeMs": "5"}, {"originalId": "a", "originalPublishTimeMs": "1"}]
    client.create_topic("replayed")
    client.publish("replayed", [Outgoing(b"x", attributes=each) for each in own])
    append(Run("archive", Where((url_of(daemon),), source), spark=spark), ["replayed"], root, every=None)
    words = ["replayed", "--root", root, "--into", "again", "--url", url_of(daemon), "-n", source]
    assert run_program(replay, words, "replay") == 0
    found = [attributes for _, attributes in told(client.read("again"))]
    ids = [str(message.id) for message in client.read("replayed")]
    assert found == [own[0], {"originalId": ids[1], "originalPublishTimeMs": "5"}, own[2]]


def test_rewritten_parquet_is_not_taken_for_the_replayed_file(spark, tmp_path):
    path = str(tmp_path / "rows.parquet")
    rows = spark.range(5).selectExpr("id AS number", "cast(id AS STRING) AS payload")
    rows.write.parquet(path)
    source = parquet_source(spark, path, "number")
    before = source.as_read(spark)
    assert source.as_read(spark) == before
    rows.write.mode("overwrite").parquet(path)
    assert source.as_read(spark) != before


def replayed(daemon, client, root, *more):
    words = ["orders", "--root", root, "--into", "again", "--archive-namespace", ARCHIVED, "--url", url_of(daemon)]
    return run_program(replay, [*words, "-n", client.namespace, *more], "replay")


def test_a_killed_replay_with_anew_continues_with_the_same_command(client, daemon, root, first, monkeypatch, capsys):
    assert replayed(daemon, client, root, "--chunk-rows", "80") == 0
    real, saves = Plans.save, []

    def dying(plans, plan):
        saves.append(plan)
        if plan.done == 2:
            raise CommandFailed("killed")
        real(plans, plan)

    with monkeypatch.context() as patched:
        patched.setattr(Plans, "save", dying)
        assert replayed(daemon, client, root, "--anew", "--chunk-rows", "80") == 1
    assert replayed(daemon, client, root, "--anew", "--chunk-rows", "80") == 0
    assert without_originals(told(client.read("again"))) == 2 * told(first)


def test_a_replay_whose_plan_is_lost_is_refused_and_not_planned_again(client, daemon, root, first, capsys):
    assert replayed(daemon, client, root, "--chunk-rows", "80") == 0
    (plan_file,) = Path(root).rglob("_replays/*.json")
    plan_file.unlink()
    assert replayed(daemon, client, root, "--chunk-rows", "30") == 1
    assert "its plan is missing" in capsys.readouterr().err
    assert len(list(client.read("again"))) == 300
    assert replayed(daemon, client, root, "--anew") == 0
    assert len(list(client.read("again"))) == 600


def test_a_second_replay_at_the_same_time_is_refused(client, daemon, root, capsys):
    wanted = Plan(Log(ARCHIVED, "orders", 1).name + " generation 1", "", "", client.namespace, "again", 1)
    with open_files(root).lock(f"{ARCHIVED}/orders/_replays/{wanted.lock}", "it", print):
        assert replayed(daemon, client, root) == Exit.STORE
    assert "into again is already being written" in capsys.readouterr().err
    assert replayed(daemon, client, root) == 0


def test_rows_without_an_order_or_a_payload_are_refused(spark, run, tmp_path):
    rows = spark.range(4).selectExpr("id % 2 AS same", "id", "if(id = 3, NULL, cast(id AS STRING)) AS payload")
    path = str(tmp_path / "rows.parquet")
    rows.write.parquet(path)
    for where, key, says in (("id < 3", "same", "does not order them"), ("true", "id", "no payload in 1 row")):
        other = f"{path}-{key}"
        spark.read.parquet(path).where(where).write.parquet(other)
        source = parquet_source(spark, other, key)
        with pytest.raises(CommandFailed, match=says):
            replaying.with_chunks(spark, source, Plan(source.name, "", "", "n", "again", 1), 10)
    with pytest.raises(CommandFailed, match="no column none"):
        parquet_source(spark, path, "none").rows(spark, "", "")


@pytest.fixture
def next_to_spark(request):
    """A file in the folder where Spark's JVM was started, against which Spark resolves relative paths."""
    rows = request.config.invocation_params.dir / "rows.parquet"
    yield rows
    shutil.rmtree(rows)


@pytest.mark.usefixtures("adaptive")
def test_the_lines_of_the_page_run_from_top_to_bottom(spark, daemon, next_to_spark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAINSONG_URL", url_of(daemon))
    monkeypatch.setenv("PLAINSONG_NAMESPACE", "page")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with Client(url_of(daemon), namespace="page") as client:
        client.create_topic("orders")
        client.publish("orders", [b"one", b"two"])
        rows = spark.range(3).selectExpr("id AS number", "cast(id AS STRING) AS payload")
        rows.write.mode("overwrite").parquet(str(next_to_spark))
        ran = [in_process(line) for line in shell_lines(DOCUMENTS["docs/pipeline.md"]) if is_ours(line)]
        assert len(ran) > 7
        assert [message.payload for message in client.read("orders-again")] == [b"one", b"two", b"0", b"1", b"2"]
    out = capsys.readouterr().out
    assert "orders: 2 messages, 6 B in 1 batch" in out
    assert "orders-again: would publish 2 messages in 1 chunk" in out
    assert "           2  in the topic and in the archive, identical" in out


def is_ours(line):
    return line.startswith(("plainsong topic", "plainsong pipeline run archive", "plainsong pipeline run replay"))


def in_process(line):
    words = shlex.split(line)[1:]
    command = {"archive": archive, "replay": replay}[words[2]] if words[0] == "pipeline" else program
    arguments = words[3:] if words[0] == "pipeline" else words
    assert run_program(command, arguments, "plainsong") == 0, line
    return line


# --- killed ------------------------------------------------------------------------------------------


def test_a_killed_replay_continues_and_each_message_is_published_once(spark, client, daemon, root, first):
    command = [
        sys.executable,
        "-m",
        "pyspark_plainsong.pipeline.replay",
        "orders",
        "--root",
        root,
        "--into",
        "again",
        "--json",
    ]
    command += ["--archive-namespace", ARCHIVED]
    environ = {**os.environ, **spark_environ(), "PYTHONPATH": str(ROOT)}
    with Proxy(daemon.address) as proxy:
        command += ["--chunk-rows", "100", "--url", proxy.url, "-n", client.namespace, "--master", "local[2]"]
        # The answer to its first chunk is withheld, so that it cannot finish before it is killed.
        proxy.after = {b"/topics/again/publish": "swallow"}
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        eventually(
            "a chunk is published",
            lambda: client.admin.messages("again", limit=1) or process.poll() is not None,
            SPARK_PATIENCE_S,
        )
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert 0 < len(list(client.read("again"))) < 300
        assert run_program(replay, command[3:], "replay") == 0  # the same command
    assert without_originals(told(client.read("again"))) == told(first)
