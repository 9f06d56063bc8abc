"""Asks the system for as many open files as the settings need."""

from __future__ import annotations

import resource


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit on open files to ``wanted``, as far as it may; returns what is allowed now.

    A shell's limit is often 1024, for the sake of programs that ``select``; what a process may raise it
    to by itself is usually far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):
        return soft
    return target
