"""Power cuts while LevelDB appends an edit to its manifest: it opens with every row; anything else is damage."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from storage.base import StoreDamaged, StoreFull
from storage.leveldb.engine.database import Database, Shape
from storage.leveldb.engine.torn_end import SECTOR_BYTES
from tests.storage.disks import copied_at_once

SHAPE = Shape(1 << 20, 1 << 20, 1 << 20)


def rows_of(path: Path) -> list[bytes]:
    database = Database(path, SHAPE, create=False)
    try:
        return [key for key, _ in database.own_rows(b"\x01", b"\x02")]
    finally:
        database.close()


def manifest(directory: Path) -> Path:
    return directory / (directory / "CURRENT").read_text().strip()


@pytest.fixture
def images(tmp_path):
    """Directories after power cuts, each with a partly stored edit that crosses a sector boundary; and the rows."""
    database, path = Database(tmp_path / "db", SHAPE, create=True), tmp_path / "db"
    made, written = [], []
    for number in range(60):
        key = b"\x01" + number.to_bytes(2, "big") + bytes(40)
        with database.batch(sync=True) as batch:
            batch.put(key, b"row")
        written.append(key)
        before = copied_at_once(path, tmp_path / "before")
        start = len(manifest(path).read_bytes())
        database.flush_memory()
        after = manifest(path).read_bytes()
        first, last = start // SECTOR_BYTES, (len(after) - 1) // SECTOR_BYTES
        if first != last and manifest(path).name == manifest(before).name:
            for lost in (first, last):
                data = bytearray(after)
                at, end = max(start, lost * SECTOR_BYTES), min(len(after), (lost + 1) * SECTOR_BYTES)
                data[at:end] = bytes(end - at)
                image = shutil.copytree(before, tmp_path / f"image{len(made)}")
                for table in path.glob("*.ldb"):
                    shutil.copyfile(table, image / table.name)
                manifest(image).write_bytes(data)
                made.append((image, list(written)))
        shutil.rmtree(before)
    database.close()
    assert len(made) >= 4
    return made


def test_a_manifest_whose_last_edit_is_torn_at_a_sector_opens_with_every_row(images):
    for image, written in images:
        assert rows_of(image) == written
        assert rows_of(image) == written, "and again"


def test_a_torn_edit_on_a_full_disk_is_not_reported_as_damage(images, monkeypatch):
    image, written = images[-1]
    before = manifest(image).read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", no_space)
        with pytest.raises(StoreFull):
            rows_of(image)
    assert manifest(image).read_bytes() == before
    assert rows_of(image) == written


def test_an_edit_is_not_left_out_when_the_log_that_it_replaced_is_gone(images):
    image, _ = images[0]
    for log in image.glob("*.log"):
        log.unlink()
    before = manifest(image).read_bytes()
    with pytest.raises(StoreDamaged):
        rows_of(image)
    assert manifest(image).read_bytes() == before


def test_a_damaged_edit_with_another_one_after_it_is_damage(images):
    image, _ = images[-1]
    data = bytearray(manifest(image).read_bytes())
    data[60] ^= 0x55
    manifest(image).write_bytes(data)
    with pytest.raises(StoreDamaged):
        rows_of(image)
    assert manifest(image).read_bytes() == data
