"""The security files on disk: they are read only if no other user can write to them, and written atomically."""

from __future__ import annotations

import os

import pytest

from broker.security.files import UnsafeFile, locked, read_guarded, stamp_of, write_guarded, write_secret


def test_a_file_that_others_can_write_is_not_read(tmp_path):
    path = tmp_path / "tokens.json"
    write_guarded(path, b"{}")
    for mode, is_read in ((0o600, True), (0o644, True), (0o620, False), (0o602, False), (0o666, False)):
        path.chmod(mode)
        if is_read:
            assert read_guarded(path, 10)[0] == b"{}"
        else:
            with pytest.raises(UnsafeFile, match="can be written by"):
                read_guarded(path, 10)


def test_a_secret_file_that_others_can_read_is_not_read(tmp_path):
    path = tmp_path / "tokens.json"
    write_guarded(path, b"{}")
    for mode in (0o600, 0o640):
        path.chmod(mode)
        assert read_guarded(path, 10, secret=True)[0] == b"{}"
    path.chmod(0o604)
    with pytest.raises(UnsafeFile, match="can be read by all users"):
        read_guarded(path, 10, secret=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(tmp_path):
    path = tmp_path / "tokens.json"
    write_guarded(path, b"{}")
    os.chown(path, 12345, 12345)
    with pytest.raises(UnsafeFile, match="a user other than"):
        read_guarded(path, 10)


def test_an_oversized_file_and_anything_but_a_file_are_not_read(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_bytes(b"12345")
    assert read_guarded(path, 5)[0] == b"12345"
    with pytest.raises(UnsafeFile, match="larger"):
        read_guarded(path, 4)
    with pytest.raises(OSError, match="directory"):
        read_guarded(tmp_path, 4)


def test_a_new_file_is_for_its_owner_alone_and_a_replaced_one_keeps_its_mode(tmp_path):
    path = tmp_path / "tokens.json"
    write_guarded(path, b"1")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    before = stamp_of(path)
    write_guarded(path, b"2")
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == b"2"
    assert stamp_of(path) != before
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.json"]


def test_a_link_to_the_file_stays_a_link(tmp_path):
    path, link = tmp_path / "tokens.json", tmp_path / "link"
    write_guarded(path, b"1")
    link.symlink_to(path)
    write_guarded(link, b"2")
    assert link.is_symlink()
    assert path.read_bytes() == b"2"


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "tokens.json"
    write_guarded(path, b"1")

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        write_guarded(path, b"2")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("tokens.json", b"1")]


def test_a_secret_is_never_written_over(tmp_path):
    path = tmp_path / "token"
    write_secret(path, "psg_1")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_secret(path, "psg_2")
    assert path.read_text() == "psg_1\n"


def test_the_lock_is_next_to_the_file(tmp_path):
    with locked(tmp_path / "tokens.json"):
        assert [each.name for each in tmp_path.iterdir()] == ["tokens.json.lock"]


def test_a_missing_file_has_no_stamp(tmp_path):
    assert stamp_of(tmp_path / "nothing") is None
