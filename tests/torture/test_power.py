"""Images of power cuts contain only states that a journalling file system may leave."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.torture.power import STYLES, Disk, Record, Style

ROOT = Path("/disk/data")
CREATES = 0o101


def told(*calls: tuple) -> Disk:
    """Return a disk with the records ``(kind, fd, number, name or bytes, name)``; its root directory is durable."""
    disk = Disk(ROOT)
    safe = [("mkdir", -1, 0, ""), ("open_", 3, 0, ""), ("sync", 3, 0, b"")]
    for at, (kind, fd, number, *texts) in enumerate([*safe, *calls]):
        one, two = [*(named(each) for each in texts), b""][:2]
        disk.apply(Record(kind, fd, float(at), number, one, two))
    return disk


def named(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    return f"{ROOT}/{text}".rstrip("/").encode()


def left(disk: Disk, directory: Path, style: Style, seed: int = 0) -> dict[str, bytes]:
    """Return the files of an image."""
    disk.image(directory, style, Random(seed))
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


def test_synced_data_is_in_every_image(tmp_path):
    disk = told(("open_", 4, CREATES, "log"), ("write", 4, 0, b"kept"), ("sync", 4, 0, b""), ("write", 4, 4, b"more"))
    for style in STYLES:
        for seed in range(20):
            content = left(disk, tmp_path / f"{style}{seed}", style, seed)["log"]
            assert content[:4] == b"kept"
            assert len(content) <= 8


def test_unsynced_data_is_lost_or_kept_whole_or_in_part(tmp_path):
    disk = told(("open_", 4, CREATES, "log"), ("sync", 4, 0, b""), ("write", 4, 0, b"abcdefgh"))
    assert left(disk, tmp_path / "lost", "lost") == {"log": b""}
    assert left(disk, tmp_path / "kept", "kept") == {"log": b"abcdefgh"}
    assert left(disk, tmp_path / "holes", "holes") == {"log": bytes(8)}
    torn = {left(disk, tmp_path / f"torn{seed}", "torn", seed)["log"] for seed in range(60)}
    assert torn <= {b"abcdefgh"[:size] for size in range(9)}
    assert len(torn) > 4


def made_longer(*calls: tuple) -> Disk:
    """Return a disk with a synced log of 4096 zeros, followed by these records."""
    return told(("open_", 4, CREATES, "log"), ("truncate", 4, 4096, b""), ("sync", 4, 0, b""), *calls)


def test_a_write_into_a_preallocated_file_may_lack_any_sectors(tmp_path):
    disk = made_longer(("write", 4, 100, b"x" * 1500))
    seen = set()
    for seed in range(200):
        content = left(disk, tmp_path / f"{seed}", "holes", seed)["log"]
        assert len(content) == 4096
        parts = [set(content[first:end]) for first, end in ((100, 512), (512, 1024), (1024, 1536), (1536, 1600))]
        assert all(part in ({0}, {ord("x")}) for part in parts)
        assert not any(content[:100] + content[1600:])
        seen.add(tuple(part != {0} for part in parts))
    assert len(seen) == 16


def test_a_write_into_a_preallocated_file_keeps_its_beginning_and_the_length(tmp_path):
    disk = made_longer(("write", 4, 0, b"first"), ("sync", 4, 0, b""), ("write", 4, 5, b"y" * 1000))
    assert left(disk, tmp_path / "lost", "lost")["log"] == b"first" + bytes(4091)
    for seed in range(40):
        content = left(disk, tmp_path / f"{seed}", "torn", seed)["log"]
        assert len(content) == 4096
        stored = len(content.rstrip(b"\0")) - 5
        assert content == (b"first" + b"y" * stored).ljust(4096, b"\0")


def test_a_file_that_was_extended_and_not_synced_has_either_length_and_any_sectors(tmp_path):
    disk = told(
        *(("open_", 4, CREATES, "log"), ("write", 4, 0, b"first"), ("sync", 4, 0, b"")),
        *(("truncate", 4, 4096, b""), ("write", 4, 5, b"y" * 1000)),
    )
    assert left(disk, tmp_path / "lost", "lost")["log"] == b"first"
    for seed in range(40):
        content = left(disk, tmp_path / f"{seed}", "holes", seed)["log"]
        assert (len(content), content[:5]) == (4096, b"first")
        assert {*content[5:512]} in ({0}, {ord("y")})


def test_a_name_that_was_not_synced_may_be_missing_and_with_it_the_file(tmp_path):
    disk = told(("open_", 4, CREATES, "new"), ("write", 4, 0, b"bytes"))
    assert left(disk, tmp_path / "lost", "lost") == {}
    assert left(disk, tmp_path / "kept", "kept") == {"new": b"bytes"}


@pytest.mark.parametrize("synced", ["file", "directory"])
def test_a_rename_survives_once_the_file_or_its_directory_was_synced_after_it(tmp_path, synced):
    begun = [("open_", 4, CREATES, "new"), ("write", 4, 0, b"2"), ("sync", 4, 0, b""), ("rename", -1, 0, "new", "now")]
    assert left(told(*begun), tmp_path / "before", "lost") == {"new": b"2"}
    disk = told(*begun, ("sync", 4 if synced == "file" else 3, 0, b""))
    assert left(disk, tmp_path / "after", "lost") == {"now": b"2"}


def test_a_removed_name_reappears_unless_the_removal_was_synced(tmp_path):
    begun = [("open_", 4, CREATES, "old"), ("write", 4, 0, b"1"), ("sync", 4, 0, b""), ("unlink", -1, 0, "old")]
    assert left(told(*begun), tmp_path / "before", "lost") == {"old": b"1"}
    assert left(told(*begun, ("sync", 3, 0, b"")), tmp_path / "after", "lost") == {}


def test_changes_of_names_survive_in_their_order(tmp_path):
    disk = told(*[("open_", 4, CREATES, f"{number}") for number in range(5)])
    for seed in range(30):
        there = sorted(left(disk, tmp_path / f"{seed}", "torn", seed))
        assert there == [str(number) for number in range(len(there))]


def test_a_file_moves_with_its_directory(tmp_path):
    disk = told(
        *(("mkdir", -1, 0, "a"), ("open_", 4, CREATES, "a/file"), ("write", 4, 0, b"1"), ("sync", 4, 0, b"")),
        *(("rename", -1, 0, "a", "b"), ("sync", 3, 0, b"")),
    )
    assert left(disk, tmp_path / "image", "lost") == {"b/file": b"1"}
