"""What happens to publishers when the process forks or the interpreter exits."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet


class Mortal(Protocol):
    """Who wants to know."""

    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""
        ...

    def at_exit(self) -> None:
        """Called once when the interpreter exits, while threads still run."""
        ...


_watched: WeakSet[Mortal] = WeakSet()


def watch(mortal: Mortal) -> None:
    """Tell ``mortal``, as long as it lives."""
    _watched.add(mortal)


def _after_fork() -> None:
    for mortal in list(_watched):
        mortal.after_fork()


def _at_exit() -> None:
    for mortal in list(_watched):
        mortal.at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
