"""The machine below a daemon: how its disk syncs, its free space, limits and clock, and what a message survives on it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from plainsong.cli.options import show_length
from plainsong.cli.output import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The verdict on a disk's syncs.
Trust = Literal["ok", "warning", "bad"]


# --- findings --------------------------------------------------------------------------------------
#
# One function for each subject; each returns findings.


State: TypeAlias = Trust
#: Below this the daemon refuses publishes by default.
LOW_BYTES = 256 << 20
ROOMY_BYTES = 2 << 30
#: A commit waits for a sync; beyond this, users notice.
SLOW_SYNC_S = 0.02
#: Open files for several hundred connections, and for the ten thousand that the daemon allows by default.
FEW_FILES, MANY_FILES = 1_024, 10_600
#: 2024-01-01, in seconds: an earlier clock is wrong.
EARLIEST_S = 1_704_067_200
_CLOCK_UNSYNCHRONIZED = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    state: State
    says: str
    hint: str = ""


def look_at_disk(directory: Path) -> tuple[list[Finding], State | None]:
    """Checks sync time, plausibility and free space; also returns whether syncs can be trusted (None: not measured)."""
    findings = look_at_space(directory)
    try:
        times = measure_sync(directory)
    except OSError as error:
        says = f"cannot write to {directory}: {error.strerror}"
        return [Finding("disk", "bad", says, "give --data-dir, or run as the daemon's user"), *findings], None
    mount = mount_of(directory)
    trust, why = judged(times, mount, rotating=is_rotating(directory), preload=os.environ.get("LD_PRELOAD", ""))
    said = f"{show_seconds(times.median_s)} each (p99 {show_seconds(times.p99_s)}), on {directory}"
    slow = times.median_s > SLOW_SYNC_S
    hint = "each commit waits for a sync, which limits commits per second" if slow else ""
    syncs = Finding("sync time", "warning" if slow else "ok", said, hint)
    return [syncs, Finding("honesty", trust, why), *findings], trust


def look_at_space(directory: Path) -> list[Finding]:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    state: State = "bad" if free < LOW_BYTES else "warning" if free < ROOMY_BYTES else "ok"
    hint = "" if state == "ok" else f"below {show_bytes(LOW_BYTES)} the daemon refuses publishes (low_space)"
    findings = [
        Finding("free space", state, f"{show_bytes(free)} of {show_bytes(found.f_blocks * found.f_frsize)}", hint)
    ]
    if found.f_files and found.f_favail < 10_000:
        findings.append(
            Finding("free inodes", "warning", show_count(found.f_favail), "each table of LevelDB is a file")
        )
    return findings


def look_at_limits() -> list[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = []
    if hard == resource.RLIM_INFINITY or hard >= MANY_FILES:
        findings.append(Finding("open files", "ok", "limit is high enough"))
    else:
        state: State = "bad" if hard < FEW_FILES else "warning"
        hint = "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower http.max_connections"
        says = f"limit is {show_count(hard)}; the daemon needs {show_count(MANY_FILES)} for all its connections"
        findings.append(Finding("open files", state, says, hint))
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        says = f"files are limited to {show_bytes(largest)}"
        findings.append(Finding("file size", "warning", says, "ulimit -f unlimited"))
    return findings


def look_at_clock() -> list[Finding]:
    """Checks whether this computer's clock is plausible, steady and synchronized."""
    now_s = time.time()
    if now_s < EARLIEST_S:
        hint = "set the clock before you publish: publish times never go back"
        return [Finding("clock", "bad", f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}", hint)]
    wall, steady = time.time_ns(), time.monotonic_ns()
    time.sleep(0.05)
    drift_ms = abs((time.time_ns() - wall) - (time.monotonic_ns() - steady)) / 1e6
    if drift_ms > 10:
        return [Finding("clock", "bad", f"the clock jumped by {show_length(drift_ms)} during the check")]
    if _is_unsynchronized():
        hint = "run an NTP client; order survives any clock, but times and expiry depend on it"
        return [Finding("clock", "warning", "the kernel reports that the clock is not synchronized", hint)]
    return [Finding("clock", "ok", "plausible and steady")]


def _is_unsynchronized() -> bool:
    """True if the kernel reports the clock as unsynchronized; False if it reports nothing."""
    try:
        # A struct timex full of zeros queries and changes nothing; it is smaller than this everywhere.
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
        return state == _CLOCK_UNSYNCHRONIZED
    except (OSError, AttributeError):
        return False


def survives(store: str, trust: State | None, directory: Path | None) -> str:
    """Says in one sentence what an acknowledged message survives.

    Args:
      store: the kind of the daemon's store; empty when no daemon answers.
      trust: whether the syncs of ``directory`` can be trusted; None when they were not measured.
    """
    if store == "memory":
        return "An acknowledged message survives no restart: this daemon keeps its messages in memory only."
    if store == "hbase":
        return (
            "An acknowledged message survives the daemon and its machine: it is in HBase's write-ahead log, and as "
            "durable as HBase's file system."
        )
    if trust is None or directory is None:
        return "An acknowledged message survives kill -9; give --data-dir to find out about power cuts."
    if trust != "bad":
        return (
            "An acknowledged message survives kill -9, a crash of the machine and a power cut,"
            f" provided the disk under {directory} keeps what it reports as synced."
        )
    return (
        "An acknowledged message survives kill -9, and is lost in a power cut or a crash of the machine:"
        f" the disk under {directory} does not sync."
    )


# --- the data directory ------------------------------------------------------------------------------


#: In the data directory, open and locked while a daemon uses it.
LOCK_FILE = "plainsong.lock"
_PORT = re.compile(r":([0-9]{1,5})(?:/|$)")
#: The state TCP_LISTEN in /proc/net/tcp.
_LISTENS = "0A"


def nearest_directory(path: Path) -> Path:
    """Returns ``path``, or the closest directory above it that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def directory_of_daemon(urls: Sequence[str], proc: Path = Path("/proc")) -> Path | None:
    """The data directory of a daemon of this user on this machine: the one whose lock file it holds open; None: not found."""
    ports = {int(found[1]) for url in urls if (found := _PORT.search(url))}
    listening = _listening_sockets(ports, proc)
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or gone
            links = [os.readlink(each) for each in (process / "fd").iterdir()]
            if listening.isdisjoint(links):
                continue
            for link in links:
                if link.endswith(f"/{LOCK_FILE}"):
                    return Path(link).parent
    return None


def _listening_sockets(ports: set[int], proc: Path) -> set[str]:
    """``socket:[inode]`` of the sockets that listen on these ports."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) in ports:
                    found.add(f"socket:[{fields[9]}]")
    return found


# --- syncs ------------------------------------------------------------------------------------------


#: A faster sync reached no device: the fastest with a safe cache take about 10 µs.
IMPLAUSIBLE_S = 8e-6
#: A rotating disk cannot write twice within less than this, unless a cache answers for it.
ROTATION_S = 2e-3
#: Bytes that a commit of a few messages writes.
WRITE_BYTES = 4096
MAX_ROUNDS = 400
MAX_MEASURE_S = 1.0
#: File systems that keep nothing.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
#: File systems whose sync is a promise of the other side.
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "ceph", "glusterfs", "vboxsf"})


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Times of a loop of small writes, each followed by ``fdatasync``."""

    median_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    source: str
    kind: str
    options: tuple[str, ...]


def measure_sync(directory: Path) -> SyncTimes:
    """Writes and syncs for at most a second, in a separate file that it removes.

    Raises:
      OSError: the directory cannot be written to.
    """
    block = os.urandom(WRITE_BYTES)
    syncs: list[float] = []
    handle, name = tempfile.mkstemp(prefix=".plainsong-doctor-", dir=directory)
    try:
        over = time.perf_counter() + MAX_MEASURE_S
        while len(syncs) < MAX_ROUNDS and (len(syncs) < 5 or time.perf_counter() < over):
            os.write(handle, block)
            written = time.perf_counter()
            os.fdatasync(handle)
            syncs.append(time.perf_counter() - written)
    finally:
        os.close(handle)
        with suppress(OSError):
            Path(name).unlink()
    syncs.sort()
    return SyncTimes(syncs[len(syncs) // 2], syncs[len(syncs) * 99 // 100])


def mount_of(directory: Path, mounts: str | None = None) -> Mount | None:
    """Returns the mount that ``directory`` is on; None if the system does not report it.

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
        # A later mount on the same path hides the earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, source, kind, tuple(options.split(",")))
    return found


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def is_rotating(directory: Path) -> bool | None:
    """True if the disk rotates; None if the system does not report it."""
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
    """Says whether the syncs can be trusted (``ok``), perhaps (``warning``) or not (``bad``), and why.

    Args:
      preload: ``LD_PRELOAD`` of this process.
    """
    kind = mount.kind if mount is not None else ""
    options = set(mount.options) if mount is not None else set()
    if "eatmydata" in preload:
        return "bad", "LD_PRELOAD names eatmydata, which swallows syncs"
    if kind in IN_MEMORY:
        return "bad", f"the file system is {kind}: memory, which a restart of the machine clears"
    if {"nobarrier", "barrier=0"} & options:
        return "bad", "the file system is mounted without barriers: the disk's own cache may lose what was synced"
    if kind == "overlay" and "volatile" in options:
        return "bad", "the file system is a volatile overlay, which swallows syncs"
    if times.median_s < IMPLAUSIBLE_S:
        return "bad", "no device syncs this fast: a layer above the disk only claims to have synced"
    if kind.split(".")[0] in REMOTE:
        return "warning", f"the file system is {kind}: the server decides whether a sync is real"
    if rotating and times.median_s < ROTATION_S:
        # Virtual disks often call themselves rotating; what is below them cannot be seen from here.
        return "warning", "the system reports a rotating disk, which cannot be this fast: a cache answers for it"
    return "ok", "plausible for a real disk"
