"""Handles Ctrl-C before and after the program's work."""

from __future__ import annotations

import os


def quit_at_once(*_: object) -> None:
    """A handler for SIGINT: ends the process at once, because no work has begun, or all of it is done."""
    os._exit(130)
