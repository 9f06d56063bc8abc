"""The effect of Ctrl-C before and after the program's work."""

from __future__ import annotations

import os


def quit_at_once(*_: object) -> None:
    """Ends the process: nothing has been done yet, or everything. A handler of SIGINT."""
    os._exit(130)
