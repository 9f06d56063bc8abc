"""A folder of backups: manifests and objects are complete or absent, and pruning keeps what is needed."""

from __future__ import annotations

import json

import pytest

from broker.command.backup import _findings
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder, DamagedManifest, canonical
from storage.backup.objects import DamagedObject, encode_row, name_of
from storage.base import StoreInUse, StoreTooNew, StoreUnusable

ROWS = [(b"shop:orders:\x00\x00\x00\x01" + each.to_bytes(10, "big"), b"\x00\x02m") for each in range(9)]


def an_object(folder, rows, table="messages"):
    data = b"".join(map(encode_row, rows))
    times = {"fromMs": 5, "toMs": 7, "kept": folder.put(name_of(data), data)}
    return {"sha256": name_of(data), "table": table, "rows": len(rows), "bytes": len(data), **times}


def a_backup(folder, day, *entries, left_out=None):
    topic = {"namespace": "shop", "topic": "orders", "objects": list(entries)}
    backup_id = f"2026112{day}T055514Z-00000{day}"
    more = {} if left_out is None else {"leftOut": left_out}
    return folder.put_manifest(
        {"format": 1, "id": backup_id, "cutMs": day, "topics": [topic], "service": [], "metadata": [], **more}
    )


@pytest.fixture
def folder(tmp_path):
    return BackupFolder.make(LocalFiles(tmp_path / "backups"))


def test_only_its_owner_may_look_into_a_folder(folder):
    assert folder.files.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(StoreUnusable, match="is not a folder of backups"):
        BackupFolder.make(LocalFiles(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_folder_of_a_newer_format_is_refused(folder):
    (folder.files.path / "FORMAT").write_bytes(canonical({"format": 2}))
    with pytest.raises(StoreTooNew, match="format 2"):
        BackupFolder.make(LocalFiles(folder.files.path))


def test_every_flipped_bit_of_a_manifest_is_found(folder):
    made = a_backup(folder, 1, an_object(folder, ROWS))
    place = folder.files.path / "backups" / f"{made['id']}.json"
    whole = place.read_bytes()
    assert folder.manifest(made["id"]) == made
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        place.write_bytes(flipped)
        with pytest.raises((DamagedManifest, StoreTooNew)):
            folder.manifest(made["id"])


def test_every_flipped_bit_of_an_object_is_found(folder):
    """Flipped bits that change no row, in unused bits of a compressed stream, are found too."""
    made = a_backup(folder, 1, an_object(folder, ROWS * 3))
    (entry,) = made["topics"][0]["objects"]
    place = next(folder.files.path.rglob(entry["sha256"]))
    whole = place.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        place.write_bytes(flipped)
        assert [each.sha256 for each in folder.verify(made).damaged] == [entry["sha256"]], bit
    place.write_bytes(whole)
    assert folder.verify(made).ok


def test_a_damaged_object_is_not_used_again(folder):
    entry = an_object(folder, ROWS)
    assert folder.digest(entry["sha256"]) == entry["kept"]
    next(folder.files.path.rglob(entry["sha256"])).write_bytes(b"something else")
    assert folder.digest(entry["sha256"]) is None


def test_missing_and_damaged_objects_are_named_with_their_messages(folder):
    gone, bad, good = (an_object(folder, rows) for rows in (ROWS[:2], ROWS[2:5], ROWS[5:]))
    made = a_backup(folder, 1, gone, bad, good)
    assert folder.verify(made, deep=True).ok
    place = next(folder.files.path.rglob(bad["sha256"]))
    flipped = bytearray(place.read_bytes())
    flipped[10] ^= 4
    place.write_bytes(flipped)
    next(folder.files.path.rglob(gone["sha256"])).unlink()
    shown = folder.verify(made).shown()
    assert shown["missing"] == [gone["sha256"]]
    (damaged,) = shown["damaged"]
    assert damaged.pop("why")
    assert damaged == {"sha256": bad["sha256"], "topic": "shop:orders", "fromMs": 5, "toMs": 7, "messages": 3}
    assert not shown["ok"]
    assert f"{gone['sha256']}  shop:orders: 2 messages from" in next(_findings(made, folder.verify(made)))


def test_deep_verifying_parses_rows(folder):
    made = a_backup(folder, 1, an_object(folder, [(ROWS[0][0], b"\xff not a row")]))
    assert folder.verify(made).ok
    assert not folder.verify(made, deep=True).ok


def test_pruning_removes_objects_that_no_remaining_backup_has(folder):
    old, shared, new = (an_object(folder, rows) for rows in (ROWS[:2], ROWS[2:5], ROWS[5:]))
    first, second = a_backup(folder, 1, old, shared), a_backup(folder, 2, shared, new)
    (folder.files.path / "objects" / shared["sha256"][:2] / ".new-killed").write_bytes(b"half")
    done = folder.prune(1, since_ms=2)
    assert done.removed == [first["id"]]
    assert done.objects == 2
    assert done.damaged == {}
    assert old["sha256"] not in folder.stored()
    assert folder.ids() == [second["id"]]
    assert folder.verify(second, deep=True).ok


@pytest.mark.parametrize(
    ("keep_last", "since_ms", "left"),
    [
        (1, None, {5}),
        (2, None, {4, 5}),
        (1, 3, {3, 4, 5}),
        (3, 5, {3, 4, 5}),
        (9, None, {1, 2, 3, 4, 5}),
        (1, 9, {5}),
        (0, None, {5}),
        (0, 4, {4, 5}),
    ],
)
def test_a_backup_that_is_among_the_newest_or_not_too_old_is_kept(folder, keep_last, since_ms, left):
    for day in range(1, 6):
        a_backup(folder, day, an_object(folder, ROWS[day : day + 1]))
    folder.prune(keep_last, since_ms)
    assert {folder.manifest(each)["cutMs"] for each in folder.ids()} == left
    assert len(list(folder.files.path.glob("objects/*/*"))) == len(left)


def spoil(folder, made, content=b"{}"):
    (folder.files.path / "backups" / f"{made['id']}.json").write_bytes(content)


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff", canonical({"format": 2})])
def test_one_unreadable_manifest_is_named_and_the_others_are_listed(folder, content):
    made = [a_backup(folder, day, an_object(folder, ROWS[day : day + 1])) for day in (1, 2, 3)]
    spoil(folder, made[1], content)
    found, unreadable = folder.manifests()
    assert list(found.values()) == [made[0], made[2]]
    assert list(unreadable) == [made[1]["id"]]
    assert made[1]["id"] in unreadable[made[1]["id"]]


def test_no_object_is_pruned_while_a_backups_needs_are_unknown_and_that_backup_is_named(folder):
    made = [a_backup(folder, day, an_object(folder, ROWS[day : day + 1])) for day in (1, 2, 3, 4)]
    whole = (folder.files.path / "backups" / f"{made[1]['id']}.json").read_bytes()
    (folder.files.path / "objects" / "ab").mkdir(exist_ok=True)
    (folder.files.path / "objects" / "ab" / ".new-killed").write_bytes(b"half")
    spoil(folder, made[1])
    done = folder.prune(2)
    assert done.removed == [made[0]["id"]]
    assert list(done.damaged) == [made[1]["id"]]
    assert (done.objects, done.bytes) == (1, 4)  # the incomplete object
    assert folder.ids() == [each["id"] for each in made[1:]]
    # Repaired from a copy, the backup is complete; if dropped, its objects are removed with those of earlier backups.
    spoil(folder, made[1], whole)
    assert folder.verify(folder.manifest(made[1]["id"])).ok
    (folder.files.path / "backups" / f"{made[1]['id']}.json").unlink()
    assert folder.prune(2).objects == 2
    assert all(folder.verify(each).ok for each in folder.manifests()[0].values())


def test_a_damaged_manifest_does_not_count_among_the_newest_that_pruning_keeps(folder):
    made = [a_backup(folder, day, an_object(folder, ROWS[day : day + 1])) for day in (1, 2, 3)]
    spoil(folder, made[2])
    done = folder.prune(1)
    assert done.removed == [made[0]["id"]]
    assert folder.ids() == [made[1]["id"], made[2]["id"]]


def test_the_newest_complete_backup_is_never_pruned(folder):
    entries = [an_object(folder, ROWS[day : day + 1]) for day in range(5)]
    whole = [a_backup(folder, day, entries[day]) for day in (0, 1)]
    partial = [a_backup(folder, day, entries[day], left_out=[{"topic": "shop:orders"}]) for day in (2, 3, 4)]
    assert folder.prune(1).removed == [whole[0]["id"], *(each["id"] for each in partial[:2])]
    assert folder.ids() == [whole[1]["id"], partial[2]["id"]]


def test_two_processes_do_not_change_a_folder_at_once(folder):
    with folder.locked(), pytest.raises(StoreInUse), BackupFolder.open(LocalFiles(folder.files.path)).locked():
        pass
    with folder.locked():
        pass


def test_an_object_under_a_wrong_name_is_refused(folder):
    with pytest.raises(DamagedObject):
        folder.put("0" * 64, b"something else")
    assert folder.stored() == set()


def test_a_manifest_is_present_only_once_it_is_complete(folder):
    (folder.files.path / "backups").mkdir()
    (folder.files.path / "backups" / ".new-abc").write_bytes(json.dumps({"id": "x"}).encode())
    assert folder.ids() == []
    with pytest.raises(StoreUnusable, match="no complete backup"):
        folder.last_id()
