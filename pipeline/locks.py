"""One writer at a time: a lock that the kernel gives back whatever its holder dies of."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from plainsong.cli.output import harmless
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Of what a lock's file says about its holder.
MAX_OWNER_CHARS = 200


class Busy(CommandFailed):
    """Another process is at it. Nothing was changed."""


class Hold(Protocol):
    """Being the only writer of something."""

    def check(self) -> None:
        """Raises Busy: it is so no longer, so nothing may be finished."""


class KernelHold:
    """Held until it is given back, by the kernel's word."""

    def check(self) -> None:
        """As ``Hold``; nobody can take this away."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[Hold]:
    """Hold a lock on a local file, which is made with its folders if need be and stays.

    Args:
      what: is written by its holder, for the error: ``the archive of default:orders``.
    Raises:
      Busy: another process holds it, or another thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise busy(what, file.read(MAX_OWNER_CHARS)) from error
        file.truncate(0)
        file.write(owner())
        file.flush()
        yield KernelHold()


def owner() -> str:
    """This process, for people."""
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"process {os.getpid()} on {socket.gethostname()}, since {since}"


def busy(what: str, by: str) -> Busy:
    """The error of one who came second."""
    who = harmless(by.strip()[:MAX_OWNER_CHARS]) or "another process"
    return Busy(f"{what} is being written already, by {who}", hint="wait until it ends", code=Exit.STORE)
