"""Environments of their own for tools that have no place in ``.venv``, each installed from its lock file, with hashes."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lock_of(name: str) -> Path:
    """Return the lock file of an environment."""
    return ROOT / f"requirements-{name}.lock"


def installed(name: str) -> Path | None:
    """Return the interpreter of ``.cache/NAME``, which has what ``requirements-NAME.lock`` lists.

    The first call installs it; so does the first call after a change of the lock file.

    Returns:
      None if it could not be installed; pip writes the reason to standard error.
    """
    place, lock = ROOT / ".cache" / name, lock_of(name)
    python, stamp = place / "bin/python", place / "installed.lock"
    if python.exists() and stamp.exists() and stamp.read_bytes() == lock.read_bytes():
        return python
    print(f"installing {lock.name}", file=sys.stderr)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", lock]
    try:
        venv.create(place, with_pip=True, clear=True)
        subprocess.run(command, check=True)  # noqa: S603 - fixed words
    except subprocess.CalledProcessError:
        return None
    stamp.write_bytes(lock.read_bytes())
    return python
