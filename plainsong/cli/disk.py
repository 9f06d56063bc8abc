"""A disk as far as it can be judged from outside: how long a sync takes, and whether that can be true."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: How far syncs can be believed.
Trust = Literal["ok", "warning", "bad"]

#: A sync faster than this has not been to any device: the fastest with a safe cache take about 10 µs.
IMPLAUSIBLE_S = 8e-6
#: A disk that turns cannot write twice within less than about this, unless something caches for it.
ROTATION_S = 2e-3
#: What one commit of a few messages writes.
WRITE_BYTES = 4096
MAX_ROUNDS = 400
MAX_MEASURE_S = 1.0

#: File systems that keep nothing.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
#: File systems whose sync is somebody else's promise.
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "ceph", "glusterfs", "vboxsf"})


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """What a loop of small writes, each followed by ``fdatasync``, took."""

    rounds: int
    median_s: float
    p99_s: float
    write_s: float
    """The median of the writes alone, without their syncs."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a directory lies."""

    point: str
    source: str
    kind: str
    options: tuple[str, ...]


def nearest_directory(path: Path) -> Path:
    """``path``, or the closest directory above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def measure_sync(directory: Path) -> SyncTimes:
    """Write and sync for a second at most, in a file of its own that is gone afterwards.

    Raises:
      OSError: nothing can be written there.
    """
    block = os.urandom(WRITE_BYTES)
    writes: list[float] = []
    syncs: list[float] = []
    handle, name = tempfile.mkstemp(prefix=".plainsong-doctor-", dir=directory)
    try:
        over = time.perf_counter() + MAX_MEASURE_S
        while len(syncs) < MAX_ROUNDS and (len(syncs) < 5 or time.perf_counter() < over):
            began = time.perf_counter()
            os.write(handle, block)
            written = time.perf_counter()
            os.fdatasync(handle)
            writes.append(written - began)
            syncs.append(time.perf_counter() - written)
    finally:
        os.close(handle)
        with suppress(OSError):
            Path(name).unlink()
    syncs.sort()
    writes.sort()
    return SyncTimes(len(syncs), syncs[len(syncs) // 2], syncs[len(syncs) * 99 // 100], writes[len(writes) // 2])


def mount_of(directory: Path, mounts: str | None = None) -> Mount | None:
    """The mount that ``directory`` is on; None when the system does not tell.

    Args:
      mounts: the text of ``/proc/self/mounts``.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    path, found = directory.resolve(), None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        source, point, kind, options = (_unescaped(each) for each in fields[:4])
        # A later mount of the same place hides the earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, source, kind, tuple(options.split(",")))
    return found


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def is_rotating(directory: Path) -> bool | None:
    """Whether the disk below turns; None when the system does not tell."""
    try:
        device = directory.stat().st_dev
        at = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None
    for each in (at, at.parent):
        with suppress(OSError):
            return (each / "queue/rotational").read_text().strip() == "1"
    return None


def judged(times: SyncTimes, mount: Mount | None, *, rotating: bool | None, preload: str = "") -> tuple[Trust, str]:
    """Whether the syncs can be believed (``ok``), perhaps (``warning``) or not (``bad``), and why.

    Args:
      preload: ``LD_PRELOAD`` of this process.
    """
    kind = mount.kind if mount is not None else ""
    options = set(mount.options) if mount is not None else set()
    if "eatmydata" in preload:
        return "bad", "LD_PRELOAD names eatmydata, which swallows syncs"
    if kind in IN_MEMORY:
        return "bad", f"the file system is {kind}: memory, gone with a restart of the machine"
    if {"nobarrier", "barrier=0"} & options:
        return "bad", "the file system is mounted without barriers: the disk's own cache may lose what was synced"
    if kind == "overlay" and "volatile" in options:
        return "bad", "the file system is a volatile overlay, which swallows syncs"
    if times.median_s < IMPLAUSIBLE_S:
        return "bad", "no device syncs so fast: something between here and the disk only says that it did"
    if kind.split(".")[0] in REMOTE:
        return "warning", f"the file system is {kind}: whether a sync is one is up to the other side"
    if rotating and times.median_s < ROTATION_S:
        # Virtual disks are often called so; what is below them cannot be seen from here.
        return "warning", "the system calls it a disk that turns, which could not be so fast: a cache answers for it"
    return "ok", "a plausible time for a real disk"
