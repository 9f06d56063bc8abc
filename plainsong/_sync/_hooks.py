"""Fork and exit hooks of publishers, producers and streams."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Protocol
from weakref import WeakSet


class Hooked(Protocol):
    """An object with fork and exit hooks."""

    def _after_fork(self) -> None:
        """Runs in the child, before any other code there."""
        ...

    def _at_exit(self) -> None:
        """Runs once when the interpreter exits, while threads still run."""
        ...


log = logging.getLogger("plainsong.client")

_hooked: WeakSet[Hooked] = WeakSet()


def watch(each: Hooked) -> None:
    """Registers the hooks of ``each`` for its lifetime."""
    _hooked.add(each)


def _after_fork() -> None:
    for each in list(_hooked):
        each._after_fork()


def _at_exit() -> None:
    for each in list(_hooked):
        try:
            each._at_exit()
        except Exception:  # the others have messages too
            log.exception("%r could not be closed at the end of the program", each)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
