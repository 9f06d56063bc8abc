"""One contract for the places of backups: a folder, an object store in memory, and a real S3 server."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.backup import files as backup_files
from storage.backup.files import LOCKS, LocalFiles, StoredFiles
from storage.backup.folder import BackupFolder, HoldsCopy, canonical, sealed
from storage.base import StoreInUse, StoreUnusable
from storage.replication.bases import encode_format
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.object_store import open_blocking
from tests.patience import PATIENCE_S
from tests.storage.replication.s3_server import BUCKET, s3_server
from tests.storage.test_backup_folder import ROWS, a_backup, an_object


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(params=["folder", "memory", "s3"])
def opened(request, tmp_path, monkeypatch):
    """Open the files of one place: each call as another process does."""
    monkeypatch.setattr(backup_files, "LOOK_S", 0.01)
    if request.param == "folder":
        return lambda: LocalFiles(tmp_path / "backups")
    if request.param == "memory":
        objects = open_blocking("memory:", timeout_s=PATIENCE_S)
        return lambda: StoredFiles(objects, "memory:")
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}/backups"
    return lambda: StoredFiles(open_blocking(url, timeout_s=PATIENCE_S, repeats=True), url)


@pytest.fixture
def files(opened):
    found = opened()
    found.make("FORMAT", b"{}")
    return found


@pytest.fixture
def folder(opened):
    return BackupFolder.make(opened())


def test_a_file_is_read_as_it_was_written_last_and_a_missing_one_is_an_error(files):
    with pytest.raises(FileNotFoundError):
        files.get("objects/ab/1")
    files.put("objects/ab/1", bytes(range(256)) * 8000)
    assert files.get("objects/ab/1") == bytes(range(256)) * 8000
    files.put("objects/ab/1", b"")
    assert files.get("objects/ab/1") == b""


def test_files_are_listed_by_folder_with_their_sizes_and_removed_ones_are_gone(files):
    assert files.sizes("objects") == {}
    for number in range(9, 0, -1):
        files.put(f"objects/a{number}/x", b"x" * number)
    files.put("backups/x.json", b"1")
    files.put("objectst", b"1")
    assert list(files.sizes("objects").items()) == [(f"objects/a{number}/x", number) for number in range(1, 10)]
    files.remove(["objects/a1/x", "objects/a9/x"])
    assert list(files.sizes("objects")) == [f"objects/a{number}/x" for number in range(2, 9)]
    assert list(files.sizes("backups")) == ["backups/x.json"]


def test_a_place_with_other_files_is_left_alone(opened):
    opened().make("photo.jpg", b"x")
    with pytest.raises(StoreUnusable, match="is not a folder of backups"):
        BackupFolder.make(opened())
    assert opened().get("photo.jpg") == b"x"


def test_only_one_process_at_a_time_changes_backups_and_the_next_need_not_wait(opened, monkeypatch):
    opened().make("FORMAT", b"{}")
    monkeypatch.setattr(backup_files, "RENEW_S", 0.02)
    with opened().locked(), pytest.raises(StoreInUse, match="another process"), opened().locked():
        pass
    monkeypatch.setattr(backup_files, "LOCK_S", 10 * PATIENCE_S)
    for _ in range(2):
        with opened().locked() as check:
            check()


def test_of_many_that_lock_at_the_same_time_one_at_a_time_succeeds(opened, monkeypatch):
    opened().make("FORMAT", b"{}")
    monkeypatch.setattr(backup_files, "RENEW_S", 0.01)
    inside, most, done = [], [], []

    def attempt(number):
        while True:
            try:
                with opened().locked() as check:
                    inside.append(number)
                    most.append(len(inside))
                    try:
                        check()
                    finally:
                        inside.remove(number)
                done.append(number)
                return
            except StoreInUse:
                continue

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert set(most) == {1}


DYING = """
import os, sys
from storage.backup.files import LocalFiles, StoredFiles
from storage.replication.object_store import open_blocking
from pathlib import Path

place = sys.argv[1]
if place.startswith("s3:"):
    files = StoredFiles(open_blocking(place, timeout_s=30), place)
else:
    files = LocalFiles(Path(place))
with files.locked():
    files.put("objects/ab/" + "ab" * 32, b"x" * 1000)
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_leaves_no_backup_and_the_next_takes_its_lock(opened, monkeypatch):
    folder = BackupFolder.make(opened())
    if folder.files.shown == "memory:":
        pytest.skip("memory ends with its process")
    root = str(Path(__file__).parents[2])
    ended = subprocess.run([sys.executable, "-c", DYING, folder.files.shown], cwd=root, check=False)
    assert ended.returncode == -9
    assert folder.ids() == []
    assert folder.stored() == {"ab" * 32}
    monkeypatch.setattr(backup_files, "LOCK_S", 0.05)
    with folder.locked():
        made = a_backup(folder, 1, an_object(folder, ROWS))
    assert folder.ids() == [made["id"]]


def pass_some(listener, server, size):
    """Pass the first bytes of one connection on to a server, and end both."""
    incoming, _ = listener.accept()
    with incoming, socket.create_connection(server) as outgoing:
        while size > 0 and (some := incoming.recv(min(size, 1 << 16))):
            outgoing.sendall(some)
            size -= len(some)


def test_a_process_that_waits_for_a_lock_says_so_once(monkeypatch):
    monkeypatch.setattr(backup_files, "LOOK_S", 0.01)
    monkeypatch.setattr(backup_files, "LOCK_S", 0.05)
    objects, said = open_blocking("memory:", timeout_s=PATIENCE_S), []
    objects.put(f"{LOCKS}/{1:020}", b'{"free": false, "run": "another"}')
    for _ in range(2):
        with StoredFiles(objects, "memory:", on_wait=said.append).locked():
            pass
    assert said == ["memory: is locked; waiting for up to 0.05 s to see whether its process runs"]


def test_an_upload_that_is_cut_off_leaves_no_file(s3, tmp_path, monkeypatch):
    """The connection ends in the middle of the body, as when a process is killed."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    folder = BackupFolder.make(StoredFiles(open_blocking(url, timeout_s=PATIENCE_S), url))
    made = sealed({"format": 1, "id": "20261121T055514Z-000001", "topics": [], "padding": "x" * 1_000_000})
    server = urlsplit(s3["AWS_ENDPOINT"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=pass_some, args=(listener, (server.hostname, server.port), 300_000))
        relay.start()
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        cut = StoredFiles(open_blocking(url, timeout_s=PATIENCE_S), url)
        with pytest.raises(ObjectStoreUnavailable):
            cut.put(f"backups/{made['id']}.json", canonical(made))
        relay.join()
    assert folder.ids() == []
    folder.put_manifest(made)
    assert folder.ids() == [made["id"]]


def test_backups_share_objects_and_a_pruned_one_takes_only_its_own(folder):
    with folder.locked():
        old, shared, new = (an_object(folder, rows) for rows in (ROWS[:2], ROWS[2:5], ROWS[5:]))
        first, second = a_backup(folder, 1, old, shared), a_backup(folder, 2, shared, new)
        assert folder.manifest(first["id"]) == first
        done = folder.prune(1)
    assert done.removed == [first["id"]]
    assert folder.ids() == [second["id"]]
    assert folder.stored() == {shared["sha256"], new["sha256"]}
    assert folder.verify(second, deep=True).ok


def test_missing_and_damaged_objects_are_found(folder):
    gone, bad = an_object(folder, ROWS[:2]), an_object(folder, ROWS[2:5])
    made = a_backup(folder, 1, gone, bad)
    folder.files.remove([f"objects/{gone['sha256'][:2]}/{gone['sha256']}"])
    folder.files.put(f"objects/{bad['sha256'][:2]}/{bad['sha256']}", b"something else")
    found = folder.verify(made)
    assert (found.missing, [each.sha256 for each in found.damaged]) == ([gone["sha256"]], [bad["sha256"]])


def test_the_place_of_a_second_copy_is_no_place_of_backups(opened):
    files = opened()
    files.make("FORMAT", encode_format("a-store"))
    for call in (BackupFolder.make, BackupFolder.open):
        with pytest.raises(HoldsCopy, match="second copy"):
            call(files)


# --- where another process has taken the lock ----------------------------------------------------


@pytest.fixture
def lost(monkeypatch):
    """A folder in an object store whose lock another process has taken, since its holder was stopped for too long."""
    objects = open_blocking("memory:", timeout_s=PATIENCE_S)
    folder = BackupFolder.make(StoredFiles(objects, "memory:"))

    def take():
        last = int(objects.sizes(LOCKS)[-1][0].rpartition("/")[2])
        objects.put(f"{LOCKS}/{last + 1:020}", b'{"free": false, "run": "another"}')

    return folder, take


def test_a_backup_whose_lock_was_taken_is_not_completed(lost):
    folder, take = lost
    with folder.locked():
        entry = an_object(folder, ROWS)
        take()
        with pytest.raises(StoreInUse):
            a_backup(folder, 1, entry)
    assert folder.ids() == []


def test_a_backup_whose_lock_is_taken_while_its_manifest_is_written_is_removed(lost, monkeypatch):
    folder, take = lost
    put = folder.files.put

    def put_late(name, data):
        put(name, data)
        take()

    with folder.locked():
        entry = an_object(folder, ROWS)
        monkeypatch.setattr(folder.files, "put", put_late)
        with pytest.raises(StoreInUse):
            a_backup(folder, 1, entry)
    assert folder.ids() == []


def test_pruning_ends_before_it_removes_objects_once_its_lock_was_taken(lost, monkeypatch):
    folder, take = lost
    with folder.locked():
        old, new = an_object(folder, ROWS[:2]), an_object(folder, ROWS[2:])
        a_backup(folder, 1, old), a_backup(folder, 2, new)
        sizes = folder.files.sizes

        def sizes_late(prefix):
            if prefix == "objects":
                take()
            return sizes(prefix)

        monkeypatch.setattr(folder.files, "sizes", sizes_late)
        with pytest.raises(StoreInUse):
            folder.prune(1)
    monkeypatch.undo()
    assert folder.stored() == {old["sha256"], new["sha256"]}


def test_wrong_credentials_are_an_error_without_a_secret(s3, monkeypatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    url = f"s3://{BUCKET}/x"
    with pytest.raises(ObjectStoreRefused, match="PermissionDenied") as refused:
        BackupFolder.make(StoredFiles(open_blocking(url, timeout_s=PATIENCE_S, repeats=True), url))
    assert "wrong-secret" not in f"{refused.value}{refused.value.hint}"


def test_a_process_that_was_stopped_while_it_took_a_lock_does_not_get_one_that_others_have_had_since(monkeypatch):
    monkeypatch.setattr(backup_files, "LOOK_S", 0.01)
    monkeypatch.setattr(backup_files, "RENEW_S", 0.01)
    objects = open_blocking("memory:", timeout_s=PATIENCE_S)
    late, create = StoredFiles(objects, "memory:"), objects.create

    def create_late(name, data):
        monkeypatch.setattr(objects, "create", create)
        with ExitStack() as stack:
            check = stack.enter_context(StoredFiles(objects, "memory:").locked())
            for _ in range(5):
                check()
            assert objects.get(name) is None
            held.push(stack.pop_all())
        return create(name, data)

    with ExitStack() as held:
        monkeypatch.setattr(objects, "create", create_late)
        with pytest.raises(StoreInUse), late.locked():
            pass
