"""Tables stay exact when batches are repeated, divided differently, or interrupted between any two steps."""

from __future__ import annotations

import itertools
import random
import shutil

import pytest

from plainsong.cli.command import Exit
from pyspark_plainsong.pipeline.audit import keeping as keeping_module
from pyspark_plainsong.pipeline.audit import keeping as parts_module
from pyspark_plainsong.pipeline.audit.generator import payloads
from pyspark_plainsong.pipeline.audit.keeping import FAN_IN, TABLE, TABLES, TablesBusy, absorb, keep
from pyspark_plainsong.pipeline.audit.manifest import MANIFEST, FolderTaken, TablesUnreadable, load_manifest
from pyspark_plainsong.pipeline.audit.reading import arrow, frame, manifest_of
from tests.pipeline.audit_messages import check_equal, frame_of, messages_of, tables_in
from tests.pipeline.audit_reference import Tables


class Died(Exception):
    """Simulates the death of the process."""


@pytest.mark.usefixtures("adaptive")
@pytest.mark.parametrize("fan_in", [3, pytest.param(FAN_IN, marks=pytest.mark.torture)])
def test_messages_in_any_portions_with_repeats_make_the_tables_of_the_reference(spark, tmp_path, monkeypatch, fan_in):
    """Late and repeated events, dead letters, batches that overlap like those of a new query, and merges."""
    monkeypatch.setattr(keeping_module, "FAN_IN", fan_in)
    messages = messages_of(list(payloads(600, seed=3, bad=0.05)))
    cuts = [0, *sorted(random.Random(3).sample(range(1, 600), fan_in)), 600]
    with keep(tmp_path, TABLES, keep_s=0) as keeping:
        for start, end in itertools.pairwise(cuts):
            absorbed = absorb(keeping, frame_of(spark, messages[max(0, start - 40) : end]))
            assert absorbed.messages == end - start
        assert absorb(keeping, frame_of(spark, messages)).messages == 0
        for table in TABLES:
            assert len(keeping.manifest.of(table.name)) < fan_in
            assert any(part.level for part in keeping.manifest.of(table.name))
    check_equal(tables_in(tmp_path), Tables(messages))
    # The next batch removes merged parts from the disk.
    with keep(tmp_path, TABLES, keep_s=0) as keeping:
        absorb(keeping, frame_of(spark, messages_of([b"bad"], first=600)))
        assert not keeping.manifest.retired
        named = {part.path for part in keeping.manifest.parts}
    assert {each.parent.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*.parquet")} == named
    assert frame(spark, tmp_path, TABLE["usage"]).count() == len(Tables(messages).usage)


@pytest.fixture(scope="module")
def sixty():
    return messages_of(list(payloads(60, seed=4, bad=0.1)))


@pytest.fixture(scope="module")
def begun(spark, sixty, tmp_path_factory):
    """Tables of the first twenty messages."""
    folder = tmp_path_factory.mktemp("begun")
    with keep(folder, TABLES) as keeping:
        absorb(keeping, frame_of(spark, sixty[:20]))
    return folder


@pytest.fixture
def twenty(begun, tmp_path):
    """A copy of these tables."""
    return shutil.copytree(begun, tmp_path / "tables")


@pytest.mark.parametrize("where", ["before a part", "before the manifest", "after the manifest"])
def test_a_batch_that_died_at_any_step_is_whole_after_a_repeat(spark, twenty, sixty, monkeypatch, where):
    before = manifest_of(twenty)

    def dying(module, name, *, first):
        real = getattr(module, name)

        def die(*args, **named):
            if not first:
                real(*args, **named)
            raise Died

        monkeypatch.setattr(module, name, die)

    if where == "before a part":
        real_write = parts_module.write_part
        monkeypatch.setattr(
            keeping_module,
            "write_part",
            lambda rows, table, *rest: real_write(rows, table, *rest) if table.name != "edges" else dies(),
        )
    else:
        dying(keeping_module, "store_manifest", first=where == "before the manifest")
    with keep(twenty, TABLES) as keeping, pytest.raises(Died):
        absorb(keeping, frame_of(spark, sixty[20:]))
    is_in = where == "after the manifest"
    check_equal(tables_in(twenty), Tables(sixty if is_in else sixty[:20]))
    assert (manifest_of(twenty) == before) is not is_in
    monkeypatch.undo()
    with keep(twenty, TABLES) as keeping:
        absorb(keeping, frame_of(spark, sixty[20:]))
    check_equal(tables_in(twenty), Tables(sixty))
    named = {part.path for part in manifest_of(twenty).parts}
    assert {each.parent.relative_to(twenty).as_posix() for each in twenty.rglob("*.parquet")} == named


def dies():
    raise Died


def test_a_recreated_topic_is_read_from_its_beginning_and_another_topic_is_separate(spark, tmp_path):
    """The ids of the new topic may be smaller than those of the old one, since a clock may be set back."""
    later = messages_of([b"one"], first=100)
    with keep(tmp_path, TABLES) as keeping:
        keeping.begin({"default:audit": 1})
        assert absorb(keeping, frame_of(spark, later)).messages == 1
        assert absorb(keeping, frame_of(spark, messages_of([b"two"], first=50))).messages == 0
        assert absorb(keeping, frame_of(spark, messages_of([b"three"], first=50, topic="default:other"))).messages == 1
    with keep(tmp_path, TABLES) as keeping:
        keeping.begin({"default:audit": 2, "default:other": 1})
        assert absorb(keeping, frame_of(spark, messages_of([b"two"], first=50))).messages == 1
    assert len(tables_in(tmp_path).dead) == 3


def test_a_reader_by_an_older_manifest_sees_the_tables_as_they_were(spark, twenty, sixty):
    old = manifest_of(twenty)
    with keep(twenty, TABLES) as keeping:
        absorb(keeping, frame_of(spark, sixty[20:]))
    good = [sum(key[1] in {each[1] for each in part} for key in Tables(sixty).trail) for part in (sixty[:20], sixty)]
    assert [arrow(twenty, TABLE["trail"], manifest=each).num_rows for each in (old, None)] == good


def test_two_runs_do_not_share_a_folder(tmp_path):
    with keep(tmp_path, TABLES):
        with pytest.raises(TablesBusy, match="another process keeps"), keep(tmp_path, TABLES):
            pass
        assert load_manifest(tmp_path) is not None
    with keep(tmp_path, TABLES):
        pass


def test_a_folder_that_holds_other_things_is_refused_and_nothing_in_it_changes(tmp_path):
    precious = tmp_path / "data" / "2025" / "customers" / "precious.csv"
    precious.parent.mkdir(parents=True)
    precious.write_text("x", encoding="utf-8")
    (tmp_path / "lock").write_text("of another", encoding="utf-8")
    told = r"no manifest\.json, but 1 other thing such as 'data'"
    with pytest.raises(FolderTaken, match=told) as refused, keep(tmp_path, TABLES):
        pass
    assert refused.value.code == Exit.USAGE
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "lock"]
    assert precious.read_text(encoding="utf-8") == "x"
    assert (tmp_path / "lock").read_text(encoding="utf-8") == "of another"


def test_a_first_run_that_was_killed_before_its_manifest_blocks_nothing(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / f".{MANIFEST}.4711.tmp").touch()
    with keep(tmp_path, TABLES) as keeping:
        assert keeping.manifest.sequence == 0


def test_only_parts_that_no_manifest_names_are_swept(tmp_path):
    with keep(tmp_path, TABLES):
        pass
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    data = tmp_path / "data"
    left = data / "000000000001-0123abcd"
    for folder in (left / "trail", left / "mine", data / "2025" / "trail", data / "000000000002-0123abcd" / "usage"):
        folder.mkdir(parents=True)
        (folder / "part-0.parquet").touch()
    (data / "FORMAT").touch()
    (data / "000000000003-0123abcd").symlink_to(elsewhere)
    with keep(tmp_path, TABLES) as keeping:
        assert keeping.sweep() == 0, "it was done at the beginning"
    found = {each.relative_to(data).as_posix() for each in data.rglob("*")}
    assert found == {
        "000000000001-0123abcd",
        "000000000001-0123abcd/mine",
        "000000000001-0123abcd/mine/part-0.parquet",
        "2025",
        "2025/trail",
        "2025/trail/part-0.parquet",
        "FORMAT",
        "000000000003-0123abcd",
    }


def test_a_folder_without_tables_or_with_unreadable_ones_is_reported(tmp_path):
    with pytest.raises(TablesUnreadable, match="no audit tables"):
        manifest_of(tmp_path)
    for text in ("{", "[]", '{"version": 2}', '{"version": 1}'):
        (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
        with pytest.raises(TablesUnreadable, match="not a manifest of version 1"), keep(tmp_path, TABLES):
            pass


def test_tables_without_rows_are_empty_with_their_columns(spark, tmp_path):
    with keep(tmp_path, TABLES):
        pass
    for table in TABLES:
        assert arrow(tmp_path, table).column_names == table.columns.names
        assert frame(spark, tmp_path, table).schema == table.columns
