"""A disk with controlled failures for a real daemon: ``disk.c``, compiled, preloaded, and controlled while it runs."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")
#: The kinds of calls, by their bits in ``disk.c``.
KINDS = {"open": 8, "write": 1, "sync": 2, "rename": 3, "unlink": 4, "mkdir": 5, "truncate": 6, "rmdir": 7}
#: Fields of eight bytes each in the memory shared with the library, followed by text.
FIELDS = (
    *("armed", "kinds", "calls", "first", "last", "every"),
    *("error", "torn", "made", "stalled", "waiting", "slow_us"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls that fail, and how: every ``every``-th one from the ``first`` to the ``last``.

    Without an error a write stores fewer bytes than requested and returns their number, as POSIX allows.
    """

    first: int
    last: int | None = None
    every: int = 1
    error: int = errno.EIO
    torn: bool = False
    """If true, a failing write stores its first half."""
    kinds: Sequence[str] = tuple(KINDS)

    def __str__(self) -> str:
        what = errno.errorcode[self.error] if self.error else "short write"
        which = f"call {self.first}" if self.last is None else f"call {self.first} to {self.last}"
        return f"{what}{', torn' * self.torn} at {which}{f', each {self.every}th' * (self.every > 1)}"


def why_not() -> str | None:
    """Return the reason why disks cannot fail on this machine; None if they can."""
    return None if _compiler() else "NOT TESTED: disks that fail at every call, since there is no C compiler"


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def library(directory: Path) -> Path:
    """Compile the library if necessary; return its path."""
    compiler = _compiler()
    assert compiler is not None
    made = directory / "disk.so"
    if not made.exists():
        options = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fno-builtin"]
        new = directory / f"disk.{os.getpid()}.so"
        command = [compiler, *options, "-o", str(new), str(SOURCE), "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(done.stderr)
        new.rename(made)
    return made


class Disk:
    """The disk of one data directory, ``root``. It works normally until ``fail``, ``stall`` or ``slow`` is called."""

    def __init__(self, root: Path, made: Path, *, log: bool = False) -> None:
        self.root = root
        shared = root.with_suffix(".control")
        shared.write_bytes(bytes(mmap.PAGESIZE))
        with shared.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environ = {"LD_PRELOAD": str(made), "TORTURE_ROOT": str(root), "TORTURE_CONTROL": str(shared)}
        self.log = root.with_suffix(".log") if log else None
        if self.log is not None:
            self.log.write_bytes(b"")
            self.environ["TORTURE_LOG"] = str(self.log)
        self._count(KINDS)

    def close(self) -> None:
        self._memory.close()

    def fail(self, plan: Plan) -> None:
        """From now on, count calls from 1 and make them fail as planned."""
        self._set("armed", 0)
        self._set("calls", 0)
        self._count(plan.kinds)
        self._set("first", plan.first)
        self._set("last", plan.last or plan.first)
        self._set("every", plan.every)
        self._set("error", plan.error)
        self._set("torn", plan.torn)
        self._set("armed", 1)

    def slow(self, each_call_s: float, kinds: Sequence[str] = tuple(KINDS)) -> None:
        """From now on, delay every call of these kinds."""
        self._count(kinds)
        self._set("slow_us", round(each_call_s * 1_000_000))
        self._set("armed", 1)

    def stall(self, kinds: Sequence[str] = tuple(KINDS)) -> None:
        """From now on, block calls of these kinds until ``heal``."""
        self._count(kinds)
        self._set("stalled", 1)
        self._set("armed", 1)

    def heal(self) -> None:
        """Work normally from now on; blocked calls continue."""
        for name in ("armed", "first", "slow_us", "stalled"):
            self._set(name, 0)

    @property
    def calls(self) -> int:
        """Number of calls since the last ``fail``."""
        return self._get("calls")

    @property
    def made(self) -> int:
        """Total number of failed calls."""
        return self._get("made")

    @property
    def waiting(self) -> int:
        """Number of calls that are blocked now."""
        return self._get("waiting")

    @property
    def what(self) -> str:
        """The latest failed call and its file."""
        at = 8 * len(FIELDS)
        return self._memory[at : at + 256].partition(b"\0")[0].decode(errors="replace")

    def _count(self, kinds: Sequence[str] | dict[str, int]) -> None:
        self._set("kinds", sum(1 << KINDS[kind] for kind in kinds))

    def _set(self, name: str, value: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * FIELDS.index(name), value)

    def _get(self, name: str) -> int:
        return int(struct.unpack_from("<Q", self._memory, 8 * FIELDS.index(name))[0])
