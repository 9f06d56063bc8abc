"""Loads modules that the client needs only after its import.

An exception that a signal handler raises (Ctrl-C, a time limit by SIGALRM) ends an import in the middle. Some modules
cannot be loaded again after that, and every later call would fail. Python runs signal handlers only in the main thread,
so another thread does the import.
"""

from __future__ import annotations

import threading
from importlib import import_module
from queue import SimpleQueue

_loaded: set[str] = set()


def load(name: str) -> None:
    """Imports a module as a whole, once. Raises ImportError."""
    if name in _loaded:
        return
    if threading.current_thread() is threading.main_thread():
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        try:
            threading.Thread(target=_load, args=(name, done), name="plainsong-loading", daemon=True).start()
        except RuntimeError:  # the system refuses a thread
            import_module(name)
        else:
            error = done.get()
            if error is not None:
                raise error
    else:
        import_module(name)
    _loaded.add(name)


def _load(name: str, done: SimpleQueue[BaseException | None]) -> None:
    try:
        import_module(name)
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        done.put(error)
    else:
        done.put(None)
