"""What happens to publishers, producers and streams when the process forks or the interpreter exits."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet


class Hooked(Protocol):
    """Has to do something about it."""

    def _after_fork(self) -> None:
        """Called in the child, before anything else runs there."""
        ...

    def _at_exit(self) -> None:
        """Called once when the interpreter exits, while threads still run."""
        ...


_hooked: WeakSet[Hooked] = WeakSet()


def watch(each: Hooked) -> None:
    """Call its hooks, as long as it lives."""
    _hooked.add(each)


def _after_fork() -> None:
    for each in list(_hooked):
        each._after_fork()


def _at_exit() -> None:
    for each in list(_hooked):
        each._at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
